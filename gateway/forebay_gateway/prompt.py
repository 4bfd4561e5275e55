"""Messages and texts to token ids: one model's chat template and tokenizer. Pure.

Text of a special token inside a client's string is encoded as plain text: only the template may
write control tokens. It knows no HTTP dialect, no bus and no event loop.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol, Self

import msgspec
from forebay_shared.errors import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedError,
)
from forebay_shared.models import ModelCard
from forebay_shared.template import ChatTemplate, Json
from tokenizers import Tokenizer

from forebay_gateway.order import orders
from forebay_gateway.output import Vocabulary
from forebay_gateway.request_template import RequestTemplate
from forebay_gateway.tools.history import with_short_ids, with_text_arguments
from forebay_gateway.tools.spelled import reads_tools, with_spelled_calls, with_spelled_tools

Message = dict[str, Json]
"""A message as templates read it."""

# Noncharacters: no text needs them. One marks the end of a message to continue, one cuts a special
# token's text in two so that neither half is it.
_CONTINUE = "\ufdd0"
_CUT = "\ufdd1"
_MARGIN = 64
"""Tokens that a text is kept beyond what a truncation leaves of it."""
_DOCUMENTS = re.compile(r"\bdocuments\b")
_SHORT_IDS = re.compile(r"length\s*(!=|==|<|>)\s*9\b")
"""A template that insists on ids of nine letters, as Mistral's do."""


class Truncation(msgspec.Struct, frozen=True):
    """Of a prompt of more than `most` tokens only so many are kept: its end, or its beginning."""

    most: int
    keeps_end: bool = True

    def cut(self, token_ids: list[int], reserved: int) -> list[int]:
        """What is kept beside so many tokens of the tokenizer's own."""
        most = max(0, self.most - reserved)
        return token_ids[max(0, len(token_ids) - most) :] if self.keeps_end else token_ids[:most]

    def shorten(self, text: str, longest: int) -> str:
        """Without what is far from the part that is kept; a token has at most `longest` characters,
        and where a text is cut off changes none of the tokens that are far from there."""
        chars = (self.most + _MARGIN) * longest
        return text[-chars:] if self.keeps_end else text[:chars]


class TemplateOptions(msgspec.Struct, frozen=True):
    """What a request may say to the chat template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Json] = {}
    tools: list[Json] = []
    """Functions as templates read them."""
    documents: list[Json] = []
    """Texts to answer from, as templates read them."""
    add_special_tokens: bool = False
    """Whether the tokenizer's own tokens come too; most templates write them themselves."""
    truncation: Truncation | None = None


class Template(Protocol):
    """See template.ChatTemplate."""

    def render(
        self,
        messages: Sequence[Json],
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Json],
    ) -> str: ...


class Renderer:
    """One model's template and tokenizer. Safe to use from several threads."""

    def __init__(self, card: ModelCard, tokenizer: bytes, template: bytes | None) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.template = "" if template is None else template.decode()
        self._tokens = card.template_tokens
        self._template: Template | None = None
        if template:
            self._template = ChatTemplate(self.template, self._tokens)
        self._max_model_len = card.max_model_len
        self._bos = card.bos_token_id
        self.vocabulary = Vocabulary(self._tokenizer, card.vocab_size)
        longest_first = sorted(self.vocabulary.special_texts, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def tokenizer(self) -> Tokenizer:
        """Neither cuts nor pads."""
        return self._tokenizer

    def borrowing(self, template: str) -> Self:
        """The same with a request's own template, whose `chat` waits for another process.

        Raises InvalidRequestError when it is too long.
        """
        borrowing = copy.copy(self)
        borrowing.template = template
        borrowing._template = RequestTemplate(template, self._tokens)
        return borrowing

    def chat(self, messages: Sequence[Message], options: TemplateOptions) -> list[int]:
        """The prompt of a conversation.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses these messages.
            ContextLengthError: the text is longer than any text that fits.
            UnsupportedError: the template reads no documents.
        """
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        given = [self._shield(message) for message in messages]
        given, tools = self._with_tools(given, [self._cut(tool) for tool in options.tools])
        if options.continue_final_message:
            given[-1] = given[-1] | {"content": f"{given[-1]['content']}{_CONTINUE}"}
        kwargs = self._shield(options.kwargs)
        if tools:
            kwargs["tools"] = tools
        if options.documents:
            if not _DOCUMENTS.search(self.template):
                raise UnsupportedError(
                    "This model's chat template does not read documents.", param="documents"
                )
            kwargs["documents"] = [self._cut(each) for each in options.documents]
        text = self._render(self._template, given, options.add_generation_prompt, kwargs)
        if options.continue_final_message:
            text, found, _ = text.rpartition(_CONTINUE)
            if not found:
                raise InvalidRequestError(
                    "The model's chat template cannot continue this message.", param="messages"
                )
        text = self._fitting(text, options.truncation, "messages")
        ids = self._encode_cut(text) if _CUT in text else self._encode(text)
        return self._completed(ids, options.truncation, special=options.add_special_tokens)

    def _with_tools(
        self, messages: list[Message], tools: list[Json]
    ) -> tuple[list[Message], list[Json]]:
        """Messages and tools in the form that the template reads; in words what it knows not."""
        if "tool_calls" not in self.template:
            messages = with_spelled_calls(messages)
        elif _SHORT_IDS.search(self.template):
            messages = with_short_ids(messages)
        if tools and not reads_tools(self.template):
            return with_spelled_tools(messages, tools), []
        return messages, tools

    def _render(
        self,
        template: Template,
        messages: list[Message],
        add_generation_prompt: bool,
        kwargs: dict[str, Json],
    ) -> str:
        """Most templates want the arguments of calls as objects, some as text, and some insist on
        an order of the roles. Raises what the template said of the conversation as it is."""
        refusal: InvalidRequestError | None = None
        for said in self._forms(template, messages):
            try:
                return template.render(
                    said, add_generation_prompt=add_generation_prompt, kwargs=kwargs
                )
            except InvalidRequestError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _forms(self, template: Template, messages: list[Message]) -> Iterator[list[Message]]:
        """What to try: a request's own template gets its conversation in its own order."""
        own = isinstance(template, RequestTemplate)
        for said in [messages] if own else orders(messages):
            yield said
            if any("tool_calls" in message for message in said):
                yield with_text_arguments(said)

    def text(
        self,
        prompt: str,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """The ids of a raw prompt, special tokens included, with at most one BOS token."""
        prompt = self._fitting(prompt, truncation, "prompt")
        return self._completed(self._encode(prompt), truncation, special=add_special_tokens)

    def words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word as it begins a text and as it follows a space."""
        spelled = [spaced for word in words for spaced in (word.lstrip(), f" {word.lstrip()}")]
        ids = (tuple(self._encode_inner(each)) for each in spelled)
        return tuple(dict.fromkeys(each for each in ids if each))

    def own_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of the tokenizer's own tokens a prompt begins with."""
        before, _ = self._own_tokens
        return len(before) if list(token_ids[: len(before)]) == before else 0

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The part of the whole text that each of these ids gives, special tokens included."""
        detokeniser = self.vocabulary.detokeniser(skip_special=False)
        pieces = [detokeniser.push((token_id,)) for token_id in token_ids]
        if pieces:
            pieces[-1] += detokeniser.flush()
        return pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of these ids, special tokens included."""
        detokeniser = self.vocabulary.detokeniser(skip_special=False)
        return detokeniser.push(token_ids) + detokeniser.flush()

    def _completed(
        self, ids: list[int], truncation: Truncation | None, *, special: bool
    ) -> list[int]:
        """The ids of a prompt, cut, and with the tokenizer's own tokens; never with two of BOS."""
        before, after = self._own_tokens if special else ([], [])
        if truncation is not None:
            ids = truncation.cut(ids, len(before) + len(after))
        if before and self._bos is not None and ids[:1] == before[-1:] == [self._bos]:
            before = before[:-1]
        return [*before, *ids, *after] if before or after else ids

    @cached_property
    def _own_tokens(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind a text by itself."""
        bare, whole = self._encode("a"), self._encode("a", True)
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return [], []

    def _encode(self, text: str, special: bool = False) -> list[int]:
        # Of the encode methods only the batch ones release the GIL for all of their work: another
        # thread waits 17 ms at most beside 1 MB, against 165 ms with `encode`.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def _encode_cut(self, text: str) -> list[int]:
        first, *rest = text.split(_CUT)
        ids = self._encode(first)
        for piece in rest:
            ids += self._encode_inner(piece)
        return ids

    def _encode_inner(self, piece: str) -> list[int]:
        """Encodes text that follows other text; sentencepiece adds a space to what begins one."""
        if self.vocabulary.byte_level:
            return self._encode(piece)
        newline = self._encode("\n")
        ids = self._encode("\n" + piece)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self._encode(piece)

    def _shield(self, values: dict[str, Json]) -> dict[str, Json]:
        """The values with every special token's text cut in two."""
        return {name: self._cut(value) for name, value in values.items()}

    def _cut(self, value: Json) -> Json:
        if isinstance(value, str):
            return self._special.sub(_cut_in_two, value)
        if isinstance(value, dict):
            return self._shield(value)
        if isinstance(value, list):
            return [self._cut(item) for item in value]
        return value

    def _fitting(self, text: str, truncation: Truncation | None, param: str) -> str:
        """The text, or what of it may be kept. Refuses before tokenising what cannot fit, whatever
        its tokens are."""
        if truncation is not None:
            return truncation.shorten(text, self.vocabulary.longest)
        least = -(-len(text) // self.vocabulary.longest)
        if least >= self._max_model_len:
            raise context_length_error(least, self._max_model_len, param, counted=False)
        return text


def _cut_in_two(match: re.Match[str]) -> str:
    text = match.group()
    return f"{text[:1]}{_CUT}{text[1:]}"


def context_length_error(
    tokens: int, limit: int, param: str, *, counted: bool = True
) -> ContextLengthError:
    """Not `counted`: there are so many tokens at least."""
    found = str(tokens) if counted else f"at least {tokens}"
    error = ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, your {param} resulted in "
        f"{found} tokens, which leaves no room for an answer. Please reduce the length.",
        param=param,
    )
    error.tokens, error.limit = tokens, limit
    return error
