"""Tools for a model whose chat template knows none: said in plain words, in the form of Hermes.

Small models get no section for tools in their templates; without this the tools of a request would
be dropped in silence. It knows no template and no dialect.
"""

import json
import re
from collections.abc import Mapping, Sequence

from forebay_shared.template import Json

_TOOLS = re.compile(r"\btools\b")
_HEAD = (
    "You may call one or more functions to answer. They are described within <tools></tools>:\n"
    "<tools>\n{}\n</tools>\n\n"
    "For each call write a JSON object with the function's name and arguments within "
    "<tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": "function-name", "arguments": {{"key": "value"}}}}\n</tool_call>'
)


def reads_tools(template: str) -> bool:
    """Whether a chat template tells its model of tools."""
    return _TOOLS.search(template) is not None


def with_spelled_calls(messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """The messages with calls and their results as text."""
    return [_spelled(message) for message in messages]


def with_spelled_tools(
    messages: Sequence[dict[str, Json]], tools: Sequence[Json]
) -> list[dict[str, Json]]:
    """The messages with the tools in the system message."""
    spelled = list(messages)
    head = _HEAD.format("\n".join(_dump(tool) for tool in tools))
    if spelled and spelled[0]["role"] == "system":
        first = spelled[0] | {"content": f"{spelled[0]['content']}\n\n{head}"}
        return [first, *spelled[1:]]
    return [{"role": "system", "content": head}, *spelled]


def _spelled(message: Mapping[str, Json]) -> dict[str, Json]:
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    written = [_call(call["function"]) for call in calls if isinstance(call, dict)]
    content = "\n".join([*([str(message["content"])] if message["content"] else []), *written])
    return {"role": "assistant", "content": content}


def _call(function: Json) -> str:
    assert isinstance(function, dict)
    called = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_dump(called)}\n</tool_call>"


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
