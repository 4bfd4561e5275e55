"""`forebay`: finds the sub-commands of what is installed and runs one.

A sub-command is an entry point of the group `forebay.commands`: a Command, or a function that takes
the arguments and returns the exit status. What cannot start as asked is one line and status 2.
"""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from forebay_shared import __version__
from forebay_shared.commands import Command, Tool
from forebay_shared.settings import StartError

GROUP = "forebay.commands"

_ORDER = ("serve", "gateway", "worker", "admin", "bench")


def main(arguments: list[str] | None = None) -> int:
    """Runs the sub-command that `arguments` (default: the process's) name; returns the status."""
    words = sys.argv[1:] if arguments is None else arguments
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_help(found))
        return 0 if words else 2
    if words[0] in {"-V", "--version"}:
        print(f"forebay {__version__}")
        return 0
    name, *rest = words
    if name not in found:
        known = ", ".join(_sorted(found))
        print(f"forebay: unknown command {name!r}: one of {known}", file=sys.stderr)
        return 2
    try:
        command = cast("Callable[[list[str]], int]", found[name].load())
        return command(rest)
    except StartError as error:
        print(f"forebay {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _help(found: dict[str, EntryPoint]) -> str:
    lines = [f"  {name:<9} {_summary(found[name])}" for name in _sorted(found)]
    return "\n".join(
        [
            "forebay: an OpenAI-compatible gateway with its own continuous-batching engine",
            "",
            "usage: forebay COMMAND [flags]",
            "",
            *lines,
            "",
            "  forebay serve            starts everything with a demo model: begin here",
            "  forebay COMMAND --help   shows the flags of a command",
            "  forebay --version        shows the version",
        ]
    )


def _sorted(found: dict[str, EntryPoint]) -> list[str]:
    known = [name for name in _ORDER if name in found]
    return known + sorted(set(found) - set(known))


def _summary(entry: EntryPoint) -> str:
    command: object = entry.load()
    return command.summary if isinstance(command, Command | Tool) else f"(from {entry.module})"


if __name__ == "__main__":
    sys.exit(main())
