"""What a request asks for in vLLM's words, and its log-probabilities in ours.

A sequence that goes on where another worker left off is, to vLLM, one with a longer prompt: what it
has emitted counts for max_tokens, min_tokens and the repetition penalty. For the other penalties
and for a grammar it would not count, so such a sequence is not taken up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from forebay_shared.errors import WorkerLostError
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.wire import Submit, TokenLogprobs, unpack_ids

SALT, ADAPTER = "salt:", "adapter:"
"""Before the salts and the names of adapters that vLLM is told: it hashes both as bare texts, so a
client's salt could be an adapter's name, whose first block it would then read."""
_SEEDS = 2**63
_STRIDE = 0x9E3779B97F4A7C15
"""An odd number far from round ones: it sets the seeds of neighbours apart."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A request, checked: its prompt's ids, what each sequence has emitted before, by index, the
    ids that may end one, and the name of its adapter, if any."""

    prompt: list[int]
    emitted: dict[int, list[int]]
    sampling: SamplingParams
    enders: frozenset[int]
    cache_salt: dict[str, str]
    adapter: str = ""


def terms_of(submit: Submit, prompt: list[int], eos: Sequence[int]) -> Terms:
    """Raises WorkerLostError for a sequence that cannot be taken up."""
    sampling = submit.sampling
    emitted = {start.index: unpack_ids(start.emitted) for start in submit.starts}
    counts = sampling.presence_penalty or sampling.frequency_penalty or sampling.grammar is not None
    if counts and any(emitted.values()):
        raise _LostError("The worker was lost, and no other can go on with this request.")
    ends = () if sampling.ignore_eos else eos
    salt = {"cache_salt": SALT + submit.cache_salt} if submit.cache_salt else {}
    enders = frozenset([*ends, *sampling.stop_token_ids])
    return Terms(prompt, emitted, sampling, enders, salt, submit.adapter)


class _LostError(WorkerLostError):
    """Another worker could not do it either."""

    retryable = False


def sampling_params(library: Any, terms: Terms, index: int, limit: int) -> Any:
    """vLLM's SamplingParams for one sequence, which may have `limit` tokens in all."""
    sampling, before = terms.sampling, len(terms.emitted[index])
    greedy = sampling.greedy
    params = library.SamplingParams(
        max_tokens=limit - before,
        min_tokens=min(max(0, sampling.min_tokens - before), limit - before),
        temperature=0.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        min_p=0.0 if greedy else sampling.min_p,
        seed=None if greedy else (sampling.seed + _STRIDE * index + before) % _SEEDS,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or None,
        allowed_token_ids=_listed(sampling.allowed_token_ids),
        stop_token_ids=_listed(tuple(terms.enders)),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        structured_outputs=_structured(library, sampling.grammar),
        detokenize=False,
        output_kind=library.sampling_params.RequestOutputKind.DELTA,
    )
    if sampling.bad_words:
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    return params


def _listed(ids: Sequence[int] | None) -> list[int] | None:
    return list(ids) if ids else None


def _structured(library: Any, grammar: Grammar | None) -> Any:
    if grammar is None:
        return None
    make = library.sampling_params.StructuredOutputsParams
    match grammar.kind:
        case "json_schema":
            return make(json=grammar.source)
        case "json_object":
            return make(json_object=True)
        case "regex":
            return make(regex=grammar.source)
        case "choice":
            return make(choice=msgspec.json.decode(grammar.source, type=list[str]))
        case "lark":
            return make(grammar=grammar.source)


def logprobs_of(
    told: Sequence[Mapping[int, Any]] | None, ids: Sequence[int], top: int | None
) -> list[TokenLogprobs] | None:
    """One entry per id; vLLM lists the sampled token beside the most likely ones."""
    if top is None or told is None:
        return None
    entries: list[TokenLogprobs] = []
    for token, listed in zip(ids, told, strict=False):
        ranked = sorted(listed.items(), key=lambda item: item[1].rank or 0)
        best = [(other, float(each.logprob)) for other, each in ranked[:top]]
        own = listed[token]
        entries.append(TokenLogprobs(float(own.logprob), best, own.rank or 0))
    return entries
