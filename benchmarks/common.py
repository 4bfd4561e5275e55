"""What the benchmarks share: servers as subprocesses, rounds in turns, process figures, CSV rows.

A result is a row of one metric of one target: the median over the rounds with its least and
greatest value, and the median of its ratio to the reference target in the same round, which is the
figure that repeats on a machine that does other work too.
"""

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
COLUMNS = [
    "date",
    "commit",
    "machine",
    "load",
    "case",
    "metric",
    "target",
    "median",
    "min",
    "max",
    "rounds",
    "reference",
    "ratio",
    "ratio_min",
    "ratio_max",
]

Figures = dict[str, float]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Flags that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    made.add_argument(
        "--peers",
        type=Path,
        default=os.environ.get("FOREBAY_PEERS"),
        help="folder with the `peer` command; default: $FOREBAY_PEERS",
    )
    made.add_argument("--no-save", action="store_true", help="print only, append to no CSV")
    return made


def peer(options: argparse.Namespace) -> str:
    """The `peer` command, or an end with one line."""
    if not options.peers or not (options.peers / "peer").exists():
        raise SystemExit("give the folder of the peers: --peers DIR or FOREBAY_PEERS")
    return str(options.peers / "peer")


# Servers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(
    command: Sequence[str],
    url: str,
    *,
    key: str = "",
    model: str = "smollm2",
    timeout_s: float = 300,
    cwd: Path | None = None,
) -> Iterator[int]:
    """Runs `command`, yields its pid once `url` answers a chat; ends it and its children."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            _wait(process, url, key, model, time.monotonic() + timeout_s)
            yield process.pid
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-3000:].decode("utf-8", "replace"))
            raise
        finally:
            _stop(process)


def _wait(process: "subprocess.Popen[bytes]", url: str, key: str, model: str, until: float) -> None:
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {key or 'none'}"},
    )
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60):
            return
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        time.sleep(0.2)
    raise SystemExit(f"no answer from {url}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the server, then SIGKILL to what is left of its process group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Processes


def family(pid: int) -> dict[int, str]:
    """The living process and its descendants: pid -> command line."""
    parents: dict[int, int] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            parents[int(entry)] = int(stat[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    lines: dict[int, str] = {}
    for member in found:
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{member}/cmdline").read_bytes()
            lines[member] = raw.replace(b"\0", b" ").decode("utf-8", "replace")
    return lines


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time so far, user and system, without children."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: Sequence[int]) -> int:
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.partition("VmRSS:")[2].split()[0]) * 1024
    return total


# Load


def load(options: argparse.Namespace, url: str, *flags: str, key: str = "") -> dict[str, Any]:
    """One run of the peers' load tool: its JSON."""
    command = [peer(options), "load", "--url", url, *(["--key", key] if key else []), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {"rps": 0}
    if found.get("errors"):
        print(f"  errors: {found['errors']} {found.get('first_error')}", file=sys.stderr)
    return found


def bench_serve(url: str, *flags: str, key: str = "") -> dict[str, Any]:
    """One run of `forebay bench serve`: its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "forebay_gateway.bench", "serve", "--base-url", url]
        command += ["--disable-tqdm", "--save-result", "--result-dir", folder]
        command += ["--result-filename", "result.json", *flags]
        env = {**os.environ, "OPENAI_API_KEY": key}
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=env)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return found


def in_turns(
    rounds: int, targets: Sequence[str], measure: Callable[[str, int], Figures]
) -> dict[str, list[Figures]]:
    """Measures every target once a round, in an order that moves on: all see the same load."""
    found: dict[str, list[Figures]] = {target: [] for target in targets}
    for turn in range(rounds):
        shift = turn % len(targets)
        for target in [*targets[shift:], *targets[:shift]]:
            figures = measure(target, turn)
            found[target].append(figures)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"round {turn + 1}/{rounds} {target}: {shown}", file=sys.stderr, flush=True)
    return found


# Results


class Results:
    """Rows of one benchmark: printed as they come, appended to results/<name>.csv by `write`."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._path = RESULTS / f"{name}.csv"
        self._save = not options.no_save
        self._about = {
            "date": date.today().isoformat(),
            "commit": commit(),
            "machine": machine(),
        }
        self._rows: list[dict[str, str]] = []

    def add(self, case: str, found: dict[str, list[Figures]], reference: str) -> None:
        """A row for each metric of each target; rounds in which it failed are left out."""
        for target, rounds in found.items():
            for metric in rounds[0]:
                pairs = [
                    (figures[metric], other.get(metric))
                    for figures, other in zip(rounds, found[reference], strict=True)
                    if metric in figures
                ]
                self._row(case, metric, target, [value for value, _ in pairs], reference, pairs)

    def _row(
        self,
        case: str,
        metric: str,
        target: str,
        values: list[float],
        reference: str,
        pairs: list[tuple[float, float | None]],
    ) -> None:
        ratios = [value / other for value, other in pairs if other]
        row = {
            **self._about,
            "load": f"{os.getloadavg()[0]:.1f}",
            "case": case,
            "metric": metric,
            "target": target,
            **_spread(values, ""),
            "rounds": str(len(values)),
            "reference": reference,
            **(_spread(ratios, "ratio") if ratios else {}),
        }
        self._rows.append(row)
        ratio = f"{row['ratio']}x {reference}" if ratios and target != reference else ""
        span = f"[{row['min']} .. {row['max']}]"
        print(f"{case:<16} {metric:<24} {target:<14} {row['median']:>10} {span:<24} {ratio}")

    def write(self) -> None:
        """Appends the rows since the last call."""
        if not self._save:
            return
        RESULTS.mkdir(exist_ok=True)
        new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerows(self._rows)
        print(f"added {len(self._rows)} rows to {self._path}")
        self._rows = []


def _spread(values: list[float], prefix: str) -> dict[str, str]:
    names = (f"{prefix}_min", f"{prefix}_max") if prefix else ("min", "max")
    figures = (median(values), min(values), max(values))
    return dict(
        zip((prefix or "median", *names), (f"{value:.4g}" for value in figures), strict=True)
    )


def commit() -> str:
    """The checked-out commit, with a + when tracked files differ from it."""
    git = shutil.which("git") or "git"
    run = ["-C", str(HERE), "rev-parse", "--short", "HEAD"]
    head = subprocess.run([git, *run], stdout=subprocess.PIPE, text=True, check=False).stdout
    run = ["-C", str(HERE), "status", "--porcelain", "--untracked-files=no"]
    dirty = subprocess.run([git, *run], stdout=subprocess.PIPE, text=True, check=False).stdout
    return head.strip() + ("+" if dirty.strip() else "")


def machine() -> str:
    """CPU model, cores and the widest vector unit, such as 'AMD EPYC x2 avx2'."""
    info = Path("/proc/cpuinfo").read_text()
    model = info.partition("model name")[2].partition(":")[2].partition("\n")[0].strip()
    vector = next((name for name in ("avx512_bf16", "avx512f", "avx2") if name in info), "")
    return f"{model} x{os.cpu_count()} {vector}".strip()
