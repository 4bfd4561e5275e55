"""A checkpoint's answers on a card beside those of the CPU engine, and of transformers.

    python benchmarks/agreement.py make answers.json                 on the CPU; the demo model
    PYTHONPATH=worker:shared python3 benchmarks/agreement.py check answers.json --model DIR \
        --dtype float32 --out agreement.csv                          on the card

make: greedy answers of 200 tokens to 50 pieces of this repository's documentation, with how far
each token was ahead of the second (`gap`, of log p). check: the same by the card, all at once and
one after the other. Where an answer first takes another token, its gap is the largest that rounding
moved: `widest gap` of all. Beside it the log p that the card gives each token of the prompts,
against transformers in float32 on the same card: the largest and the mean distance.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from forebay_shared.sampling import SamplingParams
from forebay_worker.checkpoint import resolve
from forebay_worker.llm import LLM, Result
from quantization import text_windows

PROMPTS, NEW, LENGTH = 50, 200, 64
Answers = dict[str, list[Any]]


def generate(llm: LLM, prompts: list[list[int]], **more: Any) -> list[Result]:
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, **more)
    return llm.generate(prompts, sampling, progress=sys.stderr.isatty())


def make(model: str) -> Answers:
    windows = text_windows(resolve(model), PROMPTS)
    windows += [window[256:] for window in windows]
    prompts = [window[:LENGTH] for window in windows[:PROMPTS]]
    if len(prompts) < PROMPTS:
        raise SystemExit(f"the documentation has {len(prompts)} pieces, {PROMPTS} are needed")
    llm = LLM(model, device="cpu", dtype="float32", max_model_len=LENGTH + NEW)
    outputs = [each.outputs[0] for each in generate(llm, prompts, logprobs=2)]
    return {
        "prompts": prompts,
        "tokens": [each.token_ids for each in outputs],
        "gaps": [[one.top[0][1] - one.top[1][1] for one in each.logprobs] for each in outputs],
    }


def differences(answers: Answers, found: list[list[int]]) -> Iterator[float]:
    """The gap where an answer first takes another token."""
    for tokens, gaps, other in zip(answers["tokens"], answers["gaps"], found, strict=True):
        for token, gap, theirs in zip(tokens, gaps, other, strict=True):
            if token != theirs:
                yield gap
                break


def check(answers: Answers, model: str, dtype: str) -> Iterator[tuple[str, object]]:
    prompts = answers["prompts"]
    llm = LLM(
        model, device="cuda", dtype=dtype, max_model_len=LENGTH + NEW,
        kv_cache_memory_bytes=4 << 30,
    )  # fmt: skip
    together = [each.token_ids for each in generate(llm, prompts)]
    alone = [generate(llm, [prompt])[0].token_ids for prompt in prompts]
    for name, found in (("together", together), ("alone", alone)):
        apart = list(differences(answers, found))
        yield f"{name}: answers alike", len(prompts) - len(apart)
        yield f"{name}: widest gap", round(max(apart, default=0.0), 5)
    distances = torch.cat(list(from_transformers(llm, prompts, answers["tokens"], model)))
    yield "log p from transformers, largest", round(float(distances.max()), 6)
    yield "log p from transformers, mean", round(float(distances.mean()), 6)


@torch.inference_mode()
def from_transformers(
    llm: LLM, prompts: list[list[int]], tokens: list[list[int]], model: str
) -> Iterator[torch.Tensor]:
    """Of each text, how far each token's log p is from theirs."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32)
    theirs = theirs.to("cuda" if torch.cuda.is_available() else "cpu")
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for prompt, answer in zip(prompts, tokens, strict=True):
        text = prompt + answer[: NEW - 1]
        [result] = llm.generate([text], asked, progress=False)
        assert result.prompt_logprobs is not None
        ours = torch.tensor([each.logprob for each in result.prompt_logprobs if each is not None])
        logits = theirs(torch.tensor([text], device=theirs.device)).logits[0, :-1]
        wanted = logits.float().log_softmax(-1).cpu()[range(len(ours)), text[1:]]
        yield (ours - wanted).abs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["make", "check"])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--dtype", default="float32", help="on the card")
    parser.add_argument("--out", help="append rows to this CSV")
    args = parser.parse_args()
    if args.what == "make":
        args.answers.write_text(json.dumps(make(args.model)))
        return
    rows = list(check(json.loads(args.answers.read_text()), args.model, args.dtype))
    for name, value in rows:
        print(args.dtype, name, value, sep="\t", flush=True)
    if args.out:
        from kernels import provenance

        source = provenance()
        with open(args.out, "a", newline="") as file:
            csv.writer(file).writerows(
                [args.dtype, name, value, *source.values()] for name, value in rows
            )


if __name__ == "__main__":
    main()
