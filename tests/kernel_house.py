"""What tests of kernels share: steps on shuffled blocks, caches of NaN but for what rows have."""

import torch
from forebay_shared.sampling import SamplingParams
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.card_runner import CardRunner
from forebay_worker.engine.sequence import Sequence
from forebay_worker.kernels.reference import KvCache, Step


def build_step(
    chunks: list[int], kv_lens: list[int], block_size: int, device: torch.device
) -> tuple[Step, int]:
    """A step of rows with `chunks` new tokens and `kv_lens` positions on shuffled blocks."""
    counts = [-(-length // block_size) for length in kv_lens]
    blocks = (torch.randperm(sum(counts)) + 1).tolist()
    tables = torch.zeros(len(chunks), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk)
    empty = torch.empty(0, dtype=torch.int64)
    step = Step(
        num_decodes=sum(chunk == 1 for chunk in chunks),
        token_ids=empty,
        positions=empty,
        kv_slots=empty,
        starts=torch.tensor(starts, device=device),
        kv_lens=torch.tensor(kv_lens, device=device),
        block_tables=tables.to(device),
        logits_at=empty,
        host_starts=starts,
        host_kv_lens=kv_lens,
    )
    return step, sum(counts) + 1


def fill_cache(
    step: Step, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KvCache:
    """Random keys and values where a row has positions, NaN everywhere else."""
    shape = (blocks, block_size, kv_heads, head_dim)
    cache = KvCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    for row, length in enumerate(step.host_kv_lens):
        at = torch.arange(length)
        block = step.block_tables[row].cpu()[at // block_size]
        for side in (cache.keys, cache.values):
            side[block, at % block_size] = torch.randn(length, kv_heads, head_dim).to(dtype)
    device = step.kv_lens.device
    return KvCache(cache.keys.to(device), cache.values.to(device))


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


def make_sequence(prompt: list[int], blocks: list[int], sampling: SamplingParams) -> Sequence:
    return Sequence(
        request_id="r", attempt=1, gateway="", index=0, token_ids=list(prompt),
        num_prompt=len(prompt), sampling=sampling, seed=2**63 + 77, limit=10**6,
        stop_ids=frozenset(), block_table=list(blocks),
    )  # fmt: skip


def run_on(runner: CardRunner, rows: list[Sequence], steps: int, chunk: int = 0) -> list[list[int]]:
    """Prefills the rows (in chunks of `chunk`, decodes beside them) and goes on until each has so
    many tokens of output, which are returned."""
    while any(len(row.token_ids) < row.num_prompt + steps for row in rows):
        plan = []
        for row in rows:
            rest = len(row.token_ids) - row.num_computed
            if len(row.token_ids) < row.num_prompt + steps:
                num_new = min(rest, chunk or rest)
                plan.append(ScheduledRow(row, num_new, num_new == rest))
        plan.sort(key=lambda row: row.num_new > 1)
        for row, sampled in zip(plan, runner.execute(plan), strict=True):
            row.sequence.num_computed += row.num_new
            assert (sampled is not None) == row.samples
            if sampled is not None:
                assert not sampled.corrupt
                row.sequence.token_ids.append(sampled.token_id)
    return [row.token_ids[row.num_prompt :] for row in rows]
