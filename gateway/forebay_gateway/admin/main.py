"""`forebay admin`: teams, keys, limits and usage from the command line, over the admin API.

Only `init` speaks to Redis itself: it makes the first key of a fleet that has none.
"""

import argparse
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from forebay_shared.flags import Parser
from forebay_shared.settings import StartError

from forebay_gateway.admin import files
from forebay_gateway.admin.bootstrap import first_key
from forebay_gateway.admin.client import DEFAULT_URL, AdminClient, find_key
from forebay_gateway.teams.books import BY, DIMENSIONS
from forebay_gateway.teams.records import PLURALS, ROLES

Tree = dict[str, Any]

EXAMPLES = """\
examples:
  forebay admin apply teams.yaml --dry-run      what would change
  forebay admin apply teams.yaml                make it so; tokens of new keys are shown once
  forebay admin keys create --team red --name ci
  forebay admin usage --by team,model --from 2026-12-01 --format csv
"""


def main(arguments: list[str]) -> int:
    """Runs one command; its exit status. Raises StartError with one line for what went wrong."""
    if not arguments:
        _parser().print_help()
        return 2
    whereto, rest = _whereto().parse_known_args(arguments)
    given = _parser().parse_args(rest, whereto)
    run: Callable[[argparse.Namespace], None] = given.run
    run(given)
    return 0


def _whereto() -> argparse.ArgumentParser:
    """Which server, and where its key is: before the command or behind it."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"a gateway (default: {DEFAULT_URL})")
    parser.add_argument("--data-dir", default="", help="where `forebay serve` keeps its admin key")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        parents=[_whereto()],
        prog="forebay admin",
        description="Teams, keys, limits and usage.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    init = commands.add_parser("init", help="make the first owner's key of a fleet, in its Redis")
    init.add_argument("--redis-url", required=True, help="the fleet's Redis")
    init.set_defaults(run=_init)

    apply = commands.add_parser("apply", help="make the directory what a file says")
    apply.add_argument("file", help="teams.yaml, or - for standard input")
    apply.add_argument("--dry-run", action="store_true", help="only show what would change")
    apply.add_argument("--prune", action="store_true", help="delete what the file does not name")
    apply.set_defaults(run=_apply)

    export = commands.add_parser("export", help="the file that gives the directory again")
    export.set_defaults(run=_export)
    whoami = commands.add_parser("whoami", help="the role of the admin key")
    whoami.set_defaults(run=_whoami)

    for name in PLURALS.values():
        section = commands.add_parser(name, help=f"list {name}" + _more(name))
        section.set_defaults(run=_list, section=name)
        actions = section.add_subparsers(metavar="ACTION", parser_class=Parser)
        _listing(actions.add_parser("list", help="show all"), name)
        if name == "keys":
            _key_actions(actions)

    _usage_command(commands.add_parser("usage", help="tokens and cost, summed"))
    audit = commands.add_parser("audit", help="who changed what")
    audit.add_argument("--format", choices=("table", "csv", "json"), default="table")
    audit.set_defaults(run=_audit)
    return parser


def _more(name: str) -> str:
    return "; create, rotate, disable, enable, delete" if name == "keys" else ""


def _listing(parser: argparse.ArgumentParser, section: str) -> None:
    parser.add_argument("--team", default="", help="of this team only")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table")
    parser.set_defaults(run=_list, section=section)


def _key_actions(actions: Any) -> None:
    create = actions.add_parser("create", help="make a key; its token is shown once")
    create.add_argument("--team", default="")
    create.add_argument("--organisation", default="", help="of an owner's key")
    create.add_argument("--name", required=True)
    create.add_argument("--user", default="")
    create.add_argument("--role", choices=ROLES, default="member")
    create.add_argument("--model", action="append", default=[], help="may use it; repeatable")
    create.add_argument("--network", action="append", default=[], help="may come from it")
    create.add_argument("--route", action="append", default=[], help="may use it; repeatable")
    create.add_argument("--expires", default="", help="ends as this day begins (UTC): 2027-03-31")
    create.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="its own, such as requests_per_minute=60; repeatable",
    )
    create.set_defaults(run=_create_key)
    rotate = actions.add_parser("rotate", help="a new secret; the old one lives on for a while")
    rotate.add_argument("id")
    rotate.add_argument("--grace-hours", type=float, default=24.0)
    rotate.set_defaults(run=_rotate_key)
    for name in ("disable", "enable", "delete"):
        action = actions.add_parser(name, help=f"{name} a key")
        action.add_argument("id")
        action.set_defaults(run=_change_key, action=name)


def _usage_command(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("--from", dest="first", default="", help="first day (UTC), 2026-12-01")
    usage.add_argument("--to", dest="last", default="", help="last day, included")
    usage.add_argument("--by", default="day", help=f"of {', '.join(BY)}; with commas between")
    for name in DIMENSIONS:
        usage.add_argument(f"--{name}", default="", help=f"of this {name} only")
    usage.add_argument("--format", choices=("table", "csv", "json"), default="table")
    usage.set_defaults(run=_usage)


def _client(given: argparse.Namespace) -> AdminClient:
    return AdminClient(given.url, find_key("", given.data_dir))


def _init(given: argparse.Namespace) -> None:
    token = first_key(given.redis_url)
    print("The first owner's key, shown this once. Set it as FOREBAY_ADMIN_KEY:", file=sys.stderr)
    print(token)


def _apply(given: argparse.Namespace) -> None:
    query = {"dry_run": int(given.dry_run), "prune": int(given.prune)}
    answer = _client(given).call("POST", "apply", files.load(given.file), query)
    for step in answer["changes"]:
        fields = ", ".join(step["fields"])
        print(f"{step['action']:<6}  {step['place']}" + (f"  ({fields})" if fields else ""))
    if not answer["changes"]:
        print("nothing to change")
    tokens: dict[str, str] = answer.get("tokens", {})
    if tokens:
        print("\nTokens of new keys, shown this once:", file=sys.stderr)
    for label, token in tokens.items():
        print(f"{label.removeprefix('key/')}  {token}")


def _export(given: argparse.Namespace) -> None:
    print(files.dump(_client(given).call("GET", "export")), end="")


def _whoami(given: argparse.Namespace) -> None:
    print(files.show([_client(given).call("GET", "whoami")], "table"), end="")


def _list(given: argparse.Namespace) -> None:
    query = {"team": getattr(given, "team", "")}
    rows = list(_client(given).pages(given.section, query))
    print(files.show(rows, getattr(given, "format", "table")), end="")


def _create_key(given: argparse.Namespace) -> None:
    body: Tree = {
        "team": given.team,
        "organisation": given.organisation,
        "name": given.name,
        "user": given.user,
        "role": given.role,
        "models": given.model,
        "networks": given.network,
        "routes": given.route,
        "limits": dict(_limit(pair) for pair in given.limit),
        "expires": _day(given.expires),
    }
    made = _client(given).call("POST", "keys", body)
    print(f"key {made['id']}: its token is shown this once", file=sys.stderr)
    print(made["token"])


def _day(text: str) -> float:
    """As teams.yaml has it: midnight in UTC, in seconds; 0 for never."""
    if not text:
        return 0
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise StartError(f"--expires: must be a day such as 2027-03-31, not {text!r}") from None


def _limit(pair: str) -> tuple[str, int]:
    """A limit of its text; the gateway knows which there are."""
    name, _, number = pair.partition("=")
    if not number.isdecimal():
        raise StartError(f"--limit: must be NAME=NUMBER, as requests_per_minute=60, not {pair!r}")
    return name, int(number)


def _rotate_key(given: argparse.Namespace) -> None:
    body = {"grace_s": given.grace_hours * 3600}
    made = _client(given).call("POST", f"rotate/{_word(given.id)}", body)
    print("the new token, shown this once; the old one ends after the grace time", file=sys.stderr)
    print(made["token"])


def _change_key(given: argparse.Namespace) -> None:
    client, path = _client(given), f"keys/{_word(given.id)}"
    if given.action == "delete":
        client.call("DELETE", path)
    else:
        key = client.call("GET", path)
        for hidden in ("secrets", "created"):
            key.pop(hidden, None)
        client.call("PUT", path, {**key, "disabled": given.action == "disable"})
    print(f"{given.action}d {given.id}")


def _usage(given: argparse.Namespace) -> None:
    query = {name: getattr(given, name) for name in ("by", *DIMENSIONS)}
    query |= {"from": given.first, "to": given.last}
    answer = _client(given).call("GET", "usage", query=query)
    print(files.show(answer["data"], given.format), end="")


def _audit(given: argparse.Namespace) -> None:
    rows = list(_client(given).pages("audit"))
    print(files.show(rows, given.format), end="")


def _word(text: str) -> str:
    """An id that may stand in a path."""
    if not text.isalnum():
        raise StartError("id: the public part of a key is needed, such as 3f2a9c01b7de")
    return text
