"""ModelCard: what a worker says of the model that it serves, enough for any gateway to speak for
it.

The tokenizer and the chat template travel by content hash (`keys.blob`), so that a gateway on
another host needs no model files.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Self

import msgspec

CAP_LOGPROBS = "logprobs"
CAP_PENALTIES = "penalties"
CAP_LOGIT_BIAS = "logit_bias"
CAP_GRAMMAR = "grammar"
CAP_PROMPT_LOGPROBS = "prompt_logprobs"
CAP_GENERATE = "generate"
CAP_EMBED = "embed"
CAP_RESUME = "resume"
"""A sequence that another worker began goes on here; a greedy one as if it had been here always."""
CAP_RESUME_SAMPLED = "resume_sampled"
"""So does a sampled one: its noise is a function of seed and position, in any company."""
CAP_DIGESTS = "digests"
"""The engine tells what its prefix cache holds."""
CAP_TEXT = "text"
"""The engine takes and gives text: its card has no tokenizer, and its work is SubmitText."""
CAP_ADAPTERS = "adapters"
"""The engine has the adapters that its card names: a Submit may ask for one."""

_OF_THE_MODEL_ALONE = frozenset({CAP_ADAPTERS, CAP_EMBED})


class EmbeddingCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """The vectors that a model makes.

    Attributes:
        size: values of a whole vector.
        pooling: how tokens become one vector: cls, mean, max, last.
        normalized: vectors have length 1 unless a request asks for raw ones.
        matryoshka: a vector may be cut to its first values, for the model was trained so.
        sizes: the only sizes to cut to; empty: any.
    """

    size: int
    pooling: str = "mean"
    normalized: bool = True
    matryoshka: bool = False
    sizes: tuple[int, ...] = ()


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: small matrices that are added to a model's; to clients a model of its own.

    Attributes:
        name: its public name.
        revision: hash over its weights and config; a part of the root of its block hashes.
        root: what its directory is called, without the path to it, which is nobody's business.
    """

    name: str
    revision: str
    root: str = ""


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A served model. Two workers with equal `revision` give equal answers and share a prefix
    index.

    Attributes:
        names: public names, the first is the main one.
        revision: hash over weights, config and dtype; the root of every block hash.
        tokenizer: blob hash of tokenizer.json; empty with CAP_TEXT.
        chat_template: blob hash of the Jinja source, None for a model without a chat template.
        template_tokens: special tokens that templates read by name (bos_token, eos_token, …).
        eos_token_ids: ids that end a sequence.
        generation_defaults: sampling values of the model's generation_config.
        max_model_len: prompt plus output, in tokens.
        capabilities: what the engine can do (the CAP_ constants); the gateway refuses the rest.
        embedding: the vectors that it makes, where it has CAP_EMBED.
        parameters: of CAP_TEXT: the fields of a request that whatever is behind the engine takes.
        adapters: those over the model, where it has CAP_ADAPTERS.
        adapter, parent: of a card of `served` for an adapter: which one, and the model's main name.
            Never sent.
    """

    names: tuple[str, ...]
    revision: str
    family: str
    engine: str
    tokenizer: str
    vocab_size: int
    max_model_len: int
    block_size: int
    created: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    chat_template: str | None = None
    template_tokens: dict[str, str] = {}
    generation_defaults: dict[str, Any] = {}
    capabilities: frozenset[str] = frozenset({CAP_GENERATE, CAP_RESUME})
    embedding: EmbeddingCard | None = None
    parameters: frozenset[str] = frozenset()
    adapters: tuple[Adapter, ...] = ()
    adapter: Adapter | None = None
    parent: str = ""

    @property
    def speaks_text(self) -> bool:
        return CAP_TEXT in self.capabilities

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def adapter_revision(self) -> str:
        """Empty for the model itself."""
        return self.adapter.revision if self.adapter is not None else ""

    def served(self) -> Iterator[Self]:
        """What a worker of this card serves: the model, then the model with each adapter."""
        yield self
        for adapter in self.adapters:
            yield msgspec.structs.replace(
                self,
                names=(adapter.name,),
                capabilities=self.capabilities - _OF_THE_MODEL_ALONE,
                embedding=None,
                adapters=(),
                adapter=adapter,
                parent=self.name,
            )

    def answers(self, card: "ModelCard") -> bool:
        """Whether a worker of this card gives the answers of `card`, which is one of `served`."""
        if self.revision != card.revision:
            return False
        if card.adapter is None:
            return card.name in self.names
        wanted = (card.adapter.name, card.adapter.revision)
        return any((adapter.name, adapter.revision) == wanted for adapter in self.adapters)


def content_hash(data: bytes) -> str:
    """SHA-256 in hex: the name of a blob and of a packed ModelCard."""
    return hashlib.sha256(data).hexdigest()
