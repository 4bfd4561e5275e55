"""A chat template that came with a request, run in a process of its own: `python -m` this module.

A template is a program. The model's own is trusted not to run for ever; what a client sends may
loop or grow without end, and a thread cannot be killed, so it is compiled and run where the system
counts its seconds and its bytes. One process does one rendering, in 0.1 s. It knows no model.
"""

import math
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from forebay_shared.errors import InvalidRequestError
from forebay_shared.template import ChatTemplate, Json

MAX_CHARS = 65_536
"""Of a template; the longest that models come with have 20,000."""
MAX_TEXT_CHARS = 8_388_608
CPU_S = 1
MEMORY_BYTES = 512 * 2**20
PATIENCE_S = 10.0
"""On the clock, for a machine that is busy with other things."""

_PARAM = "chat_template"
_COMMAND = (sys.executable, "-I", "-X", "utf8", "-m", "forebay_gateway.request_template")


class _Task(msgspec.Struct, frozen=True):
    source: str
    tokens: dict[str, str]
    messages: list[Any]
    add_generation_prompt: bool
    kwargs: dict[str, Any]


class _Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """`refusal` is for the client; without one there is a text."""

    text: str = ""
    refusal: str = ""


class RequestTemplate:
    """Has the place of a `ChatTemplate`. Blocks for as long as its process takes."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_CHARS:
            raise InvalidRequestError(
                f"{_PARAM} may have at most {MAX_CHARS} characters.", param=_PARAM
            )
        self._source = source
        self._tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Json],
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Json],
    ) -> str:
        """The prompt's text. Raises InvalidRequestError when there is none within the bounds."""
        task = _Task(
            self._source, self._tokens, list(messages), add_generation_prompt, dict(kwargs)
        )
        try:
            done = subprocess.run(  # noqa: S603  our own interpreter and module
                _COMMAND,
                input=msgspec.json.encode(task),
                capture_output=True,
                timeout=PATIENCE_S,
                check=True,
                env={},
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
            raise InvalidRequestError(
                f"{_PARAM} takes more than {CPU_S} s or {MEMORY_BYTES // 2**20} MB.", param=_PARAM
            ) from None
        outcome = msgspec.json.decode(done.stdout, type=_Outcome)
        if outcome.refusal:
            raise InvalidRequestError(outcome.refusal, param=_PARAM)
        return outcome.text


def main() -> None:
    """Renders what stdin asks for."""
    # What its start took (0.2 s, on a slow machine a second) is not the template's.
    cpu_s = math.ceil(time.process_time()) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    sys.stdout.buffer.write(msgspec.json.encode(_outcome(task)))


def _outcome(task: _Task) -> _Outcome:
    try:
        template = ChatTemplate(task.source, task.tokens, name=_PARAM)
        text = template.render(
            task.messages, add_generation_prompt=task.add_generation_prompt, kwargs=task.kwargs
        )
    except InvalidRequestError as error:
        return _Outcome(refusal=error.message)
    if len(text) > MAX_TEXT_CHARS:
        return _Outcome(refusal=f"{_PARAM} gives more than {MAX_TEXT_CHARS} characters.")
    return _Outcome(text)


if __name__ == "__main__":
    main()
