"""LLM: the engine without a server, for scripts and notebooks.

    llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct")
    print(llm.chat([{"role": "user", "content": "What is the capital of France?"}])[0].text)

It drives the engine's core in the caller's thread. It knows text, which the core does not, and
neither Redis nor HTTP.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from time import monotonic
from typing import cast

import msgspec
from forebay_shared.errors import InvalidRequestError, from_code
from forebay_shared.models import ModelCard
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.template import ChatTemplate, Json
from forebay_shared.wire import (
    Delta,
    Done,
    Failed,
    FinishReason,
    PromptLogprobs,
    Reply,
    SequenceStart,
    Submit,
    TokenLogprobs,
    Usage,
    pack_ids,
)
from tokenizers import Tokenizer
from tqdm import tqdm

from forebay_worker.engine.ports import Unrecorded
from forebay_worker.engines.native import NativeEngine

DEFAULT_MAX_TOKENS = 256

Message = dict[str, Json]
"""A message as chat templates read it."""


@dataclass(slots=True)
class Output:
    """One generation; `text` holds no special tokens."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)


@dataclass(slots=True)
class Result:
    """The generations of one prompt. `prompt_logprobs` has an entry per prompt token, of which the
    first is None, when the sampling asked for them."""

    prompt_token_ids: list[int]
    outputs: list[Output]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids


class LLM:
    """A model in this process. Settings carry the names of `WorkerSettings`.

    Raises StartError when the model cannot be used, TypeError for an unknown setting and
    msgspec.ValidationError for a bad value.
    """

    def __init__(self, model: str = "", **settings: object) -> None:
        engine = NativeEngine(_settings(model, settings))
        self.card: ModelCard = engine.card
        self.tokenizer = Tokenizer.from_buffer(engine.blobs[engine.card.tokenizer])
        self._template = _template(engine)
        self._core = engine.core(Unrecorded())
        self._ids = count()

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's makers advise, for at most 256 tokens if they say nothing of that."""
        defaults = {"max_tokens": DEFAULT_MAX_TOKENS, **self.card.generation_defaults}
        return msgspec.convert(defaults, SamplingParams)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        progress: bool = True,
        adapter: str = "",
    ) -> list[Result]:
        """Continues texts or lists of token ids, all in one batch. One result per prompt, in order.
        `adapter` names one of `lora_modules`.

        Raises a ForebayError for the first prompt that cannot be run; then none has a result.
        """
        batch = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._encode(each) if isinstance(each, str) else list(each) for each in batch]
        return self._run(ids, sampling or self.default_sampling, n, progress, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        progress: bool = True,
        add_generation_prompt: bool = True,
        adapter: str = "",
        **variables: Json,
    ) -> list[Result]:
        """Answers one conversation, or several at once. `variables` go to the chat template."""
        if self._template is None:
            raise InvalidRequestError("This model has no chat template.", param="messages")
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        prompts = [
            self._template.render(
                each, add_generation_prompt=add_generation_prompt, kwargs=variables
            )
            for each in conversations
        ]
        ids = [self._encode(prompt, special=False) for prompt in prompts]
        return self._run(ids, sampling or self.default_sampling, n, progress, adapter)

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def _run(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        n: int,
        progress: bool,
        adapter: str,
    ) -> list[Result]:
        names = [str(next(self._ids)) for _ in prompts]
        results = {
            name: Result(
                prompt,
                [Output() for _ in range(n)],
                None if sampling.prompt_logprobs is None else [None],
            )
            for name, prompt in zip(names, prompts, strict=True)
        }
        try:
            for name in names:
                self._core.submit(_submit(name, results[name], sampling, adapter), monotonic())
            self._drive(results, progress)
        finally:  # an error or Ctrl-C leaves nothing running
            self._core.cancel_gateway("")
            self._core.take_events()
        return [results[name] for name in names]

    def _drive(self, results: dict[str, Result], progress: bool) -> None:
        total = sum(len(result.outputs) for result in results.values())
        with tqdm(total=total, unit="seq", disable=not progress) as bar:
            while True:
                events = self._core.take_events()
                for _, message in events:
                    self._apply(message, results)
                bar.update(sum(isinstance(message, Done) for _, message in events))
                if self._core.idle:
                    return
                if self._core.stalled:
                    self._core.wait_for_grammar(timeout_s=1)
                self._core.step()

    def _apply(self, message: Reply, results: dict[str, Result]) -> None:
        match message:
            case Delta():
                output = results[message.request_id].outputs[message.index]
                output.token_ids += message.token_ids
                output.logprobs += message.logprobs or []
            case PromptLogprobs():
                scores = results[message.request_id].prompt_logprobs
                assert scores is not None, "nobody asked for them"
                scores += message.entries
            case Done():
                output = results[message.request_id].outputs[message.index]
                output.text = self.tokenizer.decode(output.token_ids)
                output.finish_reason = message.finish_reason
                output.usage = message.usage
            case Failed():
                raise from_code(message.code, message.message, param=message.param)
            case _:
                pass


def _settings(model: str, settings: dict[str, object]) -> WorkerSettings:
    unknown = settings.keys() - {each.name for each in fields(WorkerSettings)}
    if unknown:
        raise TypeError(f"LLM has no setting {min(unknown)!r}")
    # Nobody waits for the next token of another's prompt: all of a step's tokens may be prefilled.
    unbounded = {"max_num_queued_reqs": sys.maxsize, "max_num_prefill_tokens": sys.maxsize}
    return msgspec.convert({"model": model, **unbounded, **settings}, WorkerSettings)


def _template(engine: NativeEngine) -> ChatTemplate | None:
    card = engine.card
    if card.chat_template is None:
        return None
    return ChatTemplate(engine.blobs[card.chat_template].decode(), card.template_tokens)


def _submit(name: str, result: Result, sampling: SamplingParams, adapter: str) -> Submit:
    return Submit(
        request_id=name,
        attempt=1,
        gateway="",
        prompt=pack_ids(result.prompt_token_ids),
        sampling=sampling,
        starts=tuple(SequenceStart(index) for index in range(len(result.outputs))),
        adapter=adapter,
    )
