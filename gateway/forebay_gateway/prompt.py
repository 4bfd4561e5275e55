"""Messages and texts to token ids: the model's chat template and tokenizer, pure and off the loop.

A small prompt is rendered inline, a large one in a bounded thread pool, so the event loop never
stalls. Text of a special token inside a client's string is encoded as plain text: only the template
may write control tokens. It knows no HTTP dialect and no bus; blobs come from whoever builds it.
"""

import asyncio
import copy
import ctypes
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Protocol, Self, TypeVar

import msgspec
from forebay_shared.errors import (
    BusError,
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

log = logging.getLogger(__name__)

T = TypeVar("T")
Message = dict[str, Json]
"""A message as templates read it."""

INLINE_CHARS = 4_096
"""Longer texts go to the thread pool: the tokenizer takes up to 1 us a character on a busy core."""
THREADS = 2
MAX_RENDERERS = 8
MAX_BORROWED = 2
"""Templates of requests that are run at once."""

# Noncharacters: no text needs them. One marks the end of a message to continue, one cuts a special
# token's text in two so that neither half is it.
_CONTINUE = "\ufdd0"
_CUT = "\ufdd1"
_PREPARE_ATTEMPTS, _PREPARE_AGAIN_S = 5, 1.0
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


class Renderers:
    """Renderers by model, loaded on first use and kept in a small LRU; owns the thread pool."""

    def __init__(self, blob: Callable[[str], Awaitable[bytes]]) -> None:
        self._blob = blob
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prompt")
        self._patient = ThreadPoolExecutor(MAX_BORROWED, thread_name_prefix="template")
        self._borrowing = asyncio.Semaphore(MAX_BORROWED)
        self._ready: OrderedDict[tuple[object, ...], Renderer] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, card: ModelCard) -> Renderer:
        """The renderer of a card. Raises BusError when its tokenizer cannot be fetched, and
        UnsupportedError where the model's tokens are known to its engine alone."""
        if card.speaks_text:
            raise UnsupportedError(
                f"Tokens of the model '{card.name}' are not known here: it is served elsewhere.",
                param="model",
            )
        key = _renderer_key(card)
        renderer = self._ready.get(key)
        if renderer is None:
            async with self._lock:
                renderer = self._ready.get(key) or await self._load(card)
                self._ready[key] = renderer
                while len(self._ready) > MAX_RENDERERS:
                    self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return renderer

    async def warm(self, cards: Sequence[ModelCard]) -> None:
        """Loads the renderers of these models, as many as are kept."""
        for card in [card for card in cards if not card.speaks_text][:MAX_RENDERERS]:
            await self.get(card)

    async def prepare(self, card: ModelCard) -> None:
        """Loads a renderer before anybody waits for it, if there is room; gives up in the end."""
        for _ in range(_PREPARE_ATTEMPTS):
            if card.speaks_text or len(self._ready) >= MAX_RENDERERS:
                return
            try:
                await self.get(card)
            except BusError:
                await asyncio.sleep(_PREPARE_AGAIN_S)
            except Exception:  # whoever asks for this model will be told
                log.exception("the tokenizer of %s cannot be used", card.name)
                return
            else:
                return

    async def _load(self, card: ModelCard) -> Renderer:
        tokenizer = await self._blob(card.tokenizer)
        template = None if card.chat_template is None else await self._blob(card.chat_template)
        renderer = await self.in_thread(lambda: Renderer(card, tokenizer, template))
        _give_memory_back()
        return renderer

    async def run(self, work: Callable[[], T], chars: int) -> T:
        """`work` inline when it is about few characters, else in a thread."""
        return work() if chars <= INLINE_CHARS else await self.in_thread(work)

    async def patiently(self, work: Callable[[], T]) -> T:
        """`work` that waits for another process, in a thread that nobody else needs.

        Who waits for a thread may leave, so none is left to be done when this process ends.
        """

        def over(done: asyncio.Future[T]) -> None:
            self._borrowing.release()
            if not done.cancelled():
                done.exception()  # seen, though who asked may have left

        await self._borrowing.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._patient, work)
        working.add_done_callback(over)
        return await asyncio.shield(working)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _give_memory_back() -> None:
    """Parsing a tokenizer leaves holes: 34 of 112 MB with 49,152 tokens. glibc can close them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _renderer_key(card: ModelCard) -> tuple[object, ...]:
    """Everything of a card that a Renderer depends on."""
    tokens = tuple(sorted(card.template_tokens.items()))
    return (
        card.tokenizer,
        card.chat_template,
        tokens,
        card.vocab_size,
        card.max_model_len,
        card.bos_token_id,
    )
