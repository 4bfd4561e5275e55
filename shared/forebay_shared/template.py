"""A model's chat template: sandboxed Jinja with the helpers that such templates use.

The gateway and the offline API render with it, so both make the same prompt of a conversation. It
bounds neither time nor memory: a template that is no model's own needs more than this sandbox. It
knows no tokens and no HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn, TypeAlias

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay_shared.errors import InvalidRequestError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""What a template may be given."""

_MAX_REASON = 200


class TemplateRefusalError(TemplateError):
    """The template called raise_exception."""


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  the library's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Rendering is pure but for the date that a template may ask for."""

    def __init__(
        self, source: str, tokens: Mapping[str, str], name: str = "The model's chat template"
    ) -> None:
        """`name` is what errors call it. Raises InvalidRequestError for what is no Jinja."""
        self._name = name
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        # One plain dict: of the chain of maps that from_string makes, every rendering would make a
        # dict anew, which took longer than the template itself.
        names = {
            **environment.globals,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            **tokens,
        }
        try:
            code = environment.compile(source)
        except TemplateError as error:
            reason = (error.message or "")[:_MAX_REASON]
            raise InvalidRequestError(f"{name} is no Jinja: {reason}", param="messages") from None
        self._template = Template.from_code(environment, code, names)

    def render(
        self,
        messages: Sequence[Json],
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Json],
    ) -> str:
        """The prompt's text. Raises InvalidRequestError when the template refuses the messages."""
        try:
            return self._template.render(
                {
                    "tools": None,
                    "documents": None,
                    **kwargs,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateRefusalError as error:
            reason = (error.message or "")[:_MAX_REASON]
            raise InvalidRequestError(
                f"{self._name} refuses these messages: {reason}", param="messages"
            ) from None
        except Exception as error:  # a template is a program: it may fail in any way
            raise InvalidRequestError(
                f"{self._name} cannot render these messages.", param="messages"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as authors of chat templates expect it: no HTML escapes, unlike Jinja's filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
