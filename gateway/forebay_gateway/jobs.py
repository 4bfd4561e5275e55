"""What is asked of the workers: a job for each kind of work, ready to be placed.

Data alone: who asks, for which model, for what, and how much it may take. It knows no bus and no
dialect.
"""

from collections.abc import Sequence

import msgspec
from forebay_shared.asked import Asked
from forebay_shared.models import ModelCard
from forebay_shared.sampling import SamplingParams

from forebay_gateway.inputs import Input, input_tokens
from forebay_gateway.meter import Demand, Toll

FLOAT_BYTES = 4


class _Owned(msgspec.Struct, frozen=True, kw_only=True):
    """Whose it is, and for which model."""

    request_id: str
    card: ModelCard
    team: str = ""
    weight: float = 1.0
    priority: int = 0
    toll: Toll | None = None
    """Who admits it and pays for it; None: nobody counts."""


class _Sampled(_Owned, frozen=True, kw_only=True):
    """How `n` answers are to be drawn."""

    sampling: SamplingParams
    n: int = 1
    cache_salt: str = ""


class Job(_Sampled, frozen=True, kw_only=True):
    """A prompt in token ids, to be continued."""

    prompt: list[int]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def demand(self) -> Demand:
        return Demand(self.toll, self.prompt_tokens, self.n * self.sampling.max_tokens, self.n)


class TextJob(_Sampled, frozen=True, kw_only=True):
    """A request as text; `given` names what of `sampling` the client set."""

    asked: Asked
    given: tuple[str, ...] = ()

    @property
    def prompt(self) -> list[int]:
        """Its ids, which only the engine knows."""
        return []

    @property
    def prompt_tokens(self) -> int:
        """As estimated, until the engine tells."""
        return self.asked.estimated_tokens

    @property
    def demand(self) -> Demand:
        """By the prompt's bytes; what it took is settled by what the engine tells."""
        output = min(self.sampling.max_tokens, self.card.max_model_len)
        return Demand(self.toll, self.prompt_tokens, self.n * output, self.n, estimated=True)


class EncodeJob(_Owned, frozen=True, kw_only=True):
    """Inputs to make vectors of, no more than one message may hold; see `wire.Encode`."""

    inputs: Sequence[Input]
    dimensions: int = 0
    normalize: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Of all inputs; of texts, as estimated."""
        return sum(map(input_tokens, self.inputs))

    @property
    def demand(self) -> Demand:
        return Demand(self.toll, self.num_tokens, 0, 1, estimated=self.card.speaks_text)

    @property
    def vector_bytes(self) -> int:
        """How long each vector of the answer must be."""
        whole = self.card.embedding.size if self.card.embedding is not None else 0
        return (self.dimensions or whole) * FLOAT_BYTES
