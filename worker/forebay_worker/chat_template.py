"""ChatTemplate: a model's Jinja chat template, for the offline API.

Templates come with models, so they run in a sandbox that cannot change what it is given. It knows
no tokenizer; the gateway renders for itself.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from forebay_shared.errors import InvalidRequestError
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, object]


class ChatTemplate:
    """`source` with the special tokens that it reads by name."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        self._template = environment.from_string(source)
        self._names: dict[str, object] = {
            "add_generation_prompt": True,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            **tokens,
        }

    def render(self, messages: Sequence[Message], **variables: object) -> str:
        """The prompt up to where the assistant speaks. Raises InvalidRequestError."""
        try:
            return self._template.render({**self._names, **variables, "messages": messages})
        except TemplateError as error:
            raise InvalidRequestError(
                f"The chat template refused the messages: {error}", param="messages"
            ) from error


def _tojson(value: object, indent: int | None = None) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
