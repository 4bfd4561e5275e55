"""Which parser reads a model's thinking: by the server's flag, else by the model's chat template.

Third parties add families through the entry-point group `forebay.reasoning_parsers`.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from forebay_shared.settings import StartError

from forebay_gateway.reasoning.base import ReasoningParser

GROUP = "forebay.reasoning_parsers"
AUTO, NONE = "auto", "none"


class Qwen3Reasoning(ReasoningParser):
    """Qwen3, QwQ, SmolLM3: thinks when it or its template opens the tag."""


class DeepSeekR1Reasoning(ReasoningParser):
    """DeepSeek R1: thinks from its first token on, with or without an opening tag."""

    starts_thinking = True


BUILT_IN: Mapping[str, type[ReasoningParser]] = {
    "qwen3": Qwen3Reasoning,
    "deepseek_r1": DeepSeekR1Reasoning,
}


@cache
def reasoning_parsers() -> Mapping[str, type[ReasoningParser]]:
    """All parsers by name; an installed one may replace a built-in one."""
    found: dict[str, type[ReasoningParser]] = {}
    for entry in entry_points(group=GROUP):
        loaded: object = entry.load()
        if not (isinstance(loaded, type) and issubclass(loaded, ReasoningParser)):
            raise StartError(f"{GROUP}: {entry.name} is no ReasoningParser")
        found[entry.name] = loaded
    return {**BUILT_IN, **found}


def check_reasoning_parser(name: str) -> None:
    """Raises StartError for a name that is none."""
    if name not in (AUTO, NONE) and name not in reasoning_parsers():
        known = ", ".join([AUTO, NONE, *sorted(reasoning_parsers())])
        raise StartError(f"--reasoning-parser must be one of {known}")


def reasoning_parser(name: str, template: str) -> type[ReasoningParser] | None:
    """The parser of that name; for `auto` what the template shows; None: no thinking is told."""
    if name == NONE:
        return None
    if name != AUTO:
        return reasoning_parsers()[name]
    if ReasoningParser.end not in template:
        return None
    return reasoning_parsers()["deepseek_r1" if "<\uff5c" in template else "qwen3"]
