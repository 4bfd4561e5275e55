"""Every message that crosses Redis, as tagged unions in msgpack, and the one WIRE_VERSION.

Version N reads N-1: a field is only ever added, at the end and with a default; a message type too;
a reader counts and drops what it does not know. Token ids of prompts travel as packed
uint32, those of a step as a short list.

    gateway -> worker   Submit, SubmitText, Encode, Cancel,
                        Sync                                    on keys.work(worker)
    worker -> gateway   Accepted, Started, PromptLogprobs,
                        Delta, TextDelta, Done, Failed,
                        Embedded                                on keys.reply(gateway)
    worker -> all       Beacon, Farewell                        on keys.roster()
    worker -> all       Digest, Snapshot                        on keys.digests()
    gateway -> gateways Changed                                 on keys.changes()

For one sequence of a request the order is: Accepted (of a suspect up to three), Started, Delta*,
then exactly one Done. The PromptLogprobs of a request come before the first Delta of the first of
its sequences. Failed ends every sequence of the request that is not done, and may come at any
point. For an Encode it is: Accepted, perhaps Started, then one Embedded, Failed or Done("abort").
For a SubmitText it is that of a Submit, with TextDeltas. A receiver drops what carries another
attempt than its own.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay_shared.asked import Asked, estimated_tokens
from forebay_shared.blocks import ID_BYTES
from forebay_shared.sampling import SamplingParams

WIRE_VERSION = 1

FinishReason = Literal["stop", "length", "abort"]


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The token ids of `pack_ids`. Raises ValueError when the bytes are not whole uint32."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate: its index among the request's n, and the ids it has emitted before.

    `emitted` is empty but for a resumed sequence; it counts towards max_tokens, penalties and the
    noise position as if this worker had generated it.
    """

    index: int = 0
    emitted: bytes = b""


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True, kw_only=True):
    """Generate. (request_id, attempt) is unique; a worker drops a duplicate."""

    request_id: str
    attempt: int
    gateway: str
    prompt: bytes
    sampling: SamplingParams
    starts: tuple[SequenceStart, ...] = (SequenceStart(),)
    cache_salt: str = ""
    team: str = ""
    """Fairness key: an opaque id, never a name."""
    weight: float = 1.0
    priority: int = 0
    """Lower runs earlier."""
    queue_timeout_ms: int = 0
    """Longest wait for a first step, from intake on; 0: no limit. Relative: clocks may differ."""
    traceparent: str = ""
    """Where the worker's spans belong, as W3C says it; empty: no trace is kept."""
    metered: bool = False
    """It has a Hold in Redis, which the worker settles when its gateway is gone."""
    suspect: bool = False
    """Workers were lost under it: it is to be begun alone."""
    adapter: str = ""
    """The name of one on the worker's card; empty: the model itself answers."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return len(self.prompt) // ID_BYTES

    @property
    def indexes(self) -> tuple[int, ...]:
        return tuple(start.index for start in self.starts)

    @property
    def num_sequences(self) -> int:
        return len(self.starts)


class SubmitText(msgspec.Struct, frozen=True, tag="text", omit_defaults=True, kw_only=True):
    """Generate from text. Only to a worker whose card has CAP_TEXT; nobody can resume it.

    The worker uses of `sampling` what `given` names, the client's own wishes: for the rest the
    model behind the worker has defaults that nobody here knows.
    """

    request_id: str
    attempt: int
    gateway: str
    asked: Asked
    sampling: SamplingParams
    given: tuple[str, ...] = ()
    indexes: tuple[int, ...] = (0,)
    cache_salt: str = ""
    team: str = ""
    weight: float = 1.0
    priority: int = 0
    queue_timeout_ms: int = 0
    traceparent: str = ""
    metered: bool = False
    suspect: bool = False
    """As Submit's."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt, as estimated."""
        return self.asked.estimated_tokens

    @property
    def num_sequences(self) -> int:
        return len(self.indexes)


class Encode(msgspec.Struct, frozen=True, tag="encode", omit_defaults=True, kw_only=True):
    """Make one vector of each input. Only to a worker whose card has `embedding`.

    A gateway bounds what one message asks for: MAX_ENCODE_INPUTS inputs, and MAX_ENCODE_TOKENS
    tokens unless it is one input alone.
    """

    request_id: str
    attempt: int
    gateway: str
    inputs: tuple[bytes, ...]
    """Each `pack_ids`, special tokens included."""
    dimensions: int = 0
    """Keep the first so many values of each vector; 0: all."""
    normalize: bool | None = None
    """Scale to length 1, or do not; None: as the model was made."""
    team: str = ""
    weight: float = 1.0
    priority: int = 0
    queue_timeout_ms: int = 0
    metered: bool = False
    """As Submit's."""
    texts: tuple[str, ...] = ()
    """The inputs, in the place of `inputs`, for a worker whose card has CAP_TEXT."""
    suspect: bool = False
    """As Submit's."""

    @property
    def num_tokens(self) -> int:
        """Of all inputs; of texts, as estimated."""
        return sum(map(len, self.inputs)) // ID_BYTES + sum(map(estimated_tokens, self.texts))

    @property
    def indexes(self) -> tuple[int, ...]:
        return (0,)

    @property
    def num_sequences(self) -> int:
        return 1


class Cancel(msgspec.Struct, frozen=True, tag="cancel", omit_defaults=True, kw_only=True):
    """Abort sequence `index` of a request, or all of them. Of an unknown request: ignored."""

    request_id: str
    attempt: int
    index: int | None = None


class Sync(msgspec.Struct, frozen=True, tag="sync", omit_defaults=True, kw_only=True):
    """A gateway does not know the worker's cache: publish a Snapshot. Many such need only one."""


Task = Submit | SubmitText | Encode
"""What a worker is to do; one Accepted answers each."""
Work = Task | Cancel | Sync

MAX_ENCODE_INPUTS = 64
MAX_ENCODE_TOKENS = 16_384


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one sequence cost, measured by the worker, or `estimated` where nothing told it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    reasoning_tokens: int | None = None
    """Of a text: those of the completion that were thinking, where the engine tells them."""
    estimated: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of the token and of the most likely ones, as (id, logprob), best first.

    `rank` is the token's place among all of the vocabulary, from 1; 0 where nobody counted.
    """

    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="a"):
    """The worker holds the request in its queue; from now on its lease tells whether it is lost.

    Of a suspect it comes again when that begins, `alone`, and when others may run beside it.
    """

    request_id: str
    attempt: int
    alone: bool = False


class Started(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="b"):
    """The first step of sequence `index` is scheduled."""

    request_id: str
    attempt: int
    index: int
    cached_tokens: int
    queued_ms: float
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Never sent: they come as PromptLogprobs, when they have been computed."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="p"):
    """Log-probabilities of a request's prompt tokens from position `offset` on, which is at least
    1: nothing comes before the first token. Sent once for all of the request's sequences."""

    request_id: str
    attempt: int
    offset: int
    entries: list[TokenLogprobs]


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="d"):
    """New tokens of a sequence. `offset` counts the sequence's emitted ids before these."""

    request_id: str
    attempt: int
    index: int
    offset: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class TextLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token as its bytes, its log-probability, and the likeliest ones, best first."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]] = []


UNSAID = -1
"""The number of a call of which nobody said which one it is."""


class CallDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of the function call number `index`, or of the last one where that is UNSAID: its
    first has the name, and an id if there is one; all `arguments` joined are the JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class TextDelta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="x"):
    """New text of a sequence: thinking, then the visible answer, then calls. `offset` counts the
    TextDeltas of the sequence before this one; `usage` is what it cost so far, where known."""

    request_id: str
    attempt: int
    index: int
    offset: int
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    logprobs: list[TextLogprobs] = []
    usage: Usage | None = None


class Done(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="e"):
    """The sequence ended. `stop_token` is the id that ended it, in no Delta (null for a length)."""

    request_id: str
    attempt: int
    index: int
    finish_reason: FinishReason
    stop_token: int | None
    usage: Usage


class Failed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="f"):
    """The worker gave the request up. `code` is of `errors`; `message` is safe for the client."""

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    retry_after_s: float | None = None


class Embedded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="v"):
    """The vectors of an Encode, in its order: each packed little-endian float32."""

    request_id: str
    attempt: int
    vectors: list[bytes]
    usage: Usage


Reply = Accepted | Started | PromptLogprobs | Delta | TextDelta | Done | Failed | Embedded


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker's state at one moment. Tokens are uncached prompt tokens still to prefill."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    step_age_s: float = 0.0
    """Seconds since the engine's loop last came round; grows when a step hangs."""
    prefill_rate: float = 0.0
    """Prompt tokens/s in steps that prefill, as measured; 0: not known yet."""
    decode_rate: float = 0.0
    """Tokens/s of a full batch in steps that decode; 0: not known yet."""


class Beacon(msgspec.Struct, frozen=True, tag="beacon", omit_defaults=True, kw_only=True):
    """A worker is alive. `card` is the hash of its ModelCard at `keys.worker_card`."""

    worker: str
    card: str
    load: Load
    draining: bool = False
    digest: int = -1
    """The number of its last Digest; -1: it publishes none."""
    loading: tuple[str, ...] = ()
    """The models that it will serve once they are loaded; `draining` until then, without a card."""


class Farewell(msgspec.Struct, frozen=True, tag="farewell", kw_only=True):
    """A worker leaves on purpose: what it holds must go elsewhere now."""

    worker: str


RosterEvent = Beacon | Farewell


class Digest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="d"):
    """Blocks that entered and left a worker's prefix cache, as hashes in packed 8 bytes each.

    Numbered from 1 without a gap for the life of the worker, whose cache was empty before; no hash
    is in both. `load` is the state at the same moment.
    """

    worker: str
    number: int
    stored: bytes = b""
    evicted: bytes = b""
    load: Load | None = None
    waited_ms: float = 0.0
    """Since the first of the changes."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="s"):
    """All blocks in a worker's cache after digest `number`, in `parts` that follow each other.

    With a number that no Digest had, it takes that one's place: the changes before it are not told.
    """

    worker: str
    number: int
    part: int
    parts: int
    hashes: bytes


CacheEvent = Digest | Snapshot


class Changed(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """Change number `revision` of the teams' directory: the record at `place` is now `value`, JSON;
    empty: it is gone."""

    revision: int
    place: str
    value: str


class WorkPacket(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: str
    messages: list[Work]


class ReplyPacket(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: str
    messages: list[Reply]


class RosterPacket(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: str
    messages: list[RosterEvent]


class ChangesPacket(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: str
    messages: list[Changed]


class CachePacket(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: str
    messages: list[CacheEvent]
