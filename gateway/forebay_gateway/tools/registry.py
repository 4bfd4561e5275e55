"""Which parser reads a model's tool calls: by the server's flag, else by the model's chat template.

Third parties add families through the entry-point group `forebay.tool_parsers`.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from forebay_shared.settings import StartError

from forebay_gateway.tools.base import ToolParser
from forebay_gateway.tools.deepseek_v3 import DeepSeekV3Parser
from forebay_gateway.tools.hermes import HermesParser
from forebay_gateway.tools.llama3_json import Llama3JsonParser
from forebay_gateway.tools.mistral import MistralParser
from forebay_gateway.tools.pythonic import PythonicParser
from forebay_gateway.tools.qwen3_coder import Qwen3CoderParser
from forebay_gateway.tools.spelled import reads_tools

GROUP = "forebay.tool_parsers"
AUTO = "auto"

BUILT_IN: Mapping[str, type[ToolParser]] = {
    "qwen3_coder": Qwen3CoderParser,
    "hermes": HermesParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekV3Parser,
    "pythonic": PythonicParser,
    "llama3_json": Llama3JsonParser,
}
"""In the order in which they look for themselves in a template."""


@cache
def tool_parsers() -> Mapping[str, type[ToolParser]]:
    """All parsers by name; an installed one may replace a built-in one."""
    found: dict[str, type[ToolParser]] = {}
    for entry in entry_points(group=GROUP):
        loaded: object = entry.load()
        if not (isinstance(loaded, type) and issubclass(loaded, ToolParser)):
            raise StartError(f"{GROUP}: {entry.name} is no ToolParser")
        found[entry.name] = loaded
    return {**found, **{name: cls for name, cls in BUILT_IN.items() if name not in found}}


def check_tool_parser(name: str) -> None:
    """Raises StartError for a name that is none."""
    if name != AUTO and name not in tool_parsers():
        known = ", ".join([AUTO, *sorted(tool_parsers())])
        raise StartError(f"--tool-call-parser must be one of {known}")


def tool_parser(name: str, template: str) -> type[ToolParser]:
    """The parser of that name; for `auto` the first that finds its form in the template.

    Hermes is the form that is spelled out to models whose template knows no tools.
    """
    if name != AUTO:
        return tool_parsers()[name]
    if not reads_tools(template):
        return HermesParser
    return next((cls for cls in tool_parsers().values() if cls.writes(template)), HermesParser)
