"""The text of blocks: what a model that reads text can read of a message, a result or a document.

It knows no roles and no tools.
"""

import re
from collections.abc import Iterable

from forebay_shared.errors import InvalidRequestError, UnsupportedError

from forebay_gateway.api.anthropic.schema import Block, Source
from forebay_gateway.api.unseen import told_of

BREAK = "\n"
"""What stands between two blocks of text in one message, and between the parts of a document."""

_MEDIA = ("base64", "url", "file")
"""Sources that are no text."""
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def texts_of(blocks: Iterable[Block], at: str) -> list[str]:
    """Raises InvalidRequestError that names the block which is no text."""
    return [text_of(block, f"{at}[{i}]", "text") for i, block in enumerate(blocks)]


def text_of(block: Block, at: str, allowed: str) -> str:
    """`allowed` says which types may stand at this place."""
    if block.type != "text":
        raise UnsupportedError(
            f"{at}.type must be {allowed}: nothing else can be read here.", param=f"{at}.type"
        )
    return required(block.text, at, "text")


def shown_of(block: Block, at: str, allowed: str = "text") -> str:
    """What a tool shows: a picture, or a file that is no text, the model is told of."""
    source = block.source
    is_media = isinstance(source, Source) and source.type in _MEDIA
    return (told_of(block.type) if is_media else None) or material_of(block, at, allowed)


def material_of(block: Block, at: str, allowed: str = "text") -> str:
    """What a user or a tool shows: documents and results of a search too, as far as they are text.

    Raises InvalidRequestError that names the block.
    """
    match block.type:
        case "document":
            return _document(block, at)
        case "search_result":
            return _search_result(block, at)
        case "tool_reference":
            return f"The tool {required(block.tool_name, at, 'tool_name')} can be called now."
        case _:
            return text_of(block, at, allowed)


def instructions(system: str | list[Block] | None) -> str:
    """The system's text, without a line that Claude Code writes into its beginning for whoever
    sends the bill: it changes with every request, so that no prefix would be found in the cache."""
    given = [system] if isinstance(system, str) else texts_of(system or (), "system")
    return BREAK.join([left for each in given if (left := _BILLING.sub("", each)) or not each])


def required(value: str | None, at: str, name: str) -> str:
    if value is None:
        raise InvalidRequestError(f"{at}.{name} is required.", param=f"{at}.{name}")
    return value


def _document(block: Block, at: str) -> str:
    """A document that is text: title, context, content."""
    _check_citations(block, at)
    source = block.source
    if not isinstance(source, Source):
        raise InvalidRequestError(f"{at}.source must be an object.", param=f"{at}.source")
    if source.type == "text":
        said = required(source.data, f"{at}.source", "data")
    elif source.type == "content":
        said = _content(source.content, f"{at}.source.content")
    else:
        raise UnsupportedError(
            f"{at}.source.type must be text or content: nothing else can be read here.",
            param=f"{at}.source.type",
        )
    return BREAK.join([each for each in (block.title, block.context, said) if each])


def _search_result(block: Block, at: str) -> str:
    _check_citations(block, at)
    if not isinstance(block.source, str):
        raise InvalidRequestError(f"{at}.source must be a string.", param=f"{at}.source")
    said = _content(block.content, f"{at}.content")
    return BREAK.join([each for each in (block.title, block.source, said) if each])


def _content(content: str | list[Block] | None, at: str) -> str:
    if content is None:
        raise InvalidRequestError(f"{at} is required.", param=at)
    return content if isinstance(content, str) else BREAK.join(texts_of(content, at))


def _check_citations(block: Block, at: str) -> None:
    if isinstance(block.citations, dict) and block.citations.get("enabled"):  # pyright: ignore
        raise UnsupportedError(f"{at}.citations are not supported.", param=f"{at}.citations")
