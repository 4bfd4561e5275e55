"""The tools that clients run themselves but name by a type alone: Anthropic's models know them.

The models here are shown what such a tool takes. It knows no request.
"""

from typing import NamedTuple

from forebay_shared.template import Json

_STRING: Json = {"type": "string"}
_LINES: Json = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line, from 1; -1 as the last is the end.",
}
_EDITS: dict[str, Json] = {
    "path": {"type": "string", "description": "The whole path of the file."},
    "view_range": _LINES,
    "file_text": {"type": "string", "description": "For create: what the file shall hold."},
    "old_str": {"type": "string", "description": "For str_replace: what is there, once."},
    "new_str": {"type": "string", "description": "For str_replace: what shall stand there."},
    "insert_line": {"type": "integer", "description": "For insert: the line to insert behind."},
    "insert_text": {"type": "string", "description": "For insert: the text."},
}


class ClientTool(NamedTuple):
    description: str
    parameters: dict[str, object]


def client_tool(type_: str) -> ClientTool | None:
    """The tool of a type such as bash_20250124, whatever its date; None for no such tool."""
    name, _, date = type_.rpartition("_")
    return _TOOLS.get(name) if date.isdecimal() else None


def _commands(*names: str) -> Json:
    return {"type": "string", "enum": list(names), "description": "What to do."}


def _tool(description: str, properties: dict[str, Json], *required: str) -> ClientTool:
    parameters: dict[str, object] = {
        "type": "object",
        "properties": properties,
        "required": list(required),
    }
    return ClientTool(description, parameters)


_TOOLS = {
    "bash": _tool(
        "Runs a command in a shell that stays open, and gives what it wrote.",
        {
            "command": {"type": "string", "description": "The command; none with restart."},
            "restart": {"type": "boolean", "description": "Whether to begin a new shell."},
        },
    ),
    "text_editor": _tool(
        "Shows files and directories, makes files, and changes them.",
        {"command": _commands("view", "create", "str_replace", "insert"), **_EDITS},
        "command",
        "path",
    ),
    "memory": _tool(
        "Keeps notes below /memories, which outlive the conversation: look there first.",
        {
            "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            "old_path": _STRING,
            "new_path": _STRING,
        },
        "command",
    ),
}
