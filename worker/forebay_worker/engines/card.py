"""The ModelCard of a Hugging Face directory, and the files that gateways need, by content hash.

It reads JSON and the edges of weight files; it loads no tensor and knows no engine.
"""

from hashlib import sha256
from pathlib import Path

import msgspec
from forebay_shared.models import (
    CAP_GENERATE,
    CAP_LOGIT_BIAS,
    CAP_LOGPROBS,
    CAP_PENALTIES,
    CAP_RESUME,
    CAP_RESUME_SAMPLED,
    ModelCard,
    content_hash,
)
from forebay_shared.settings import WorkerSettings

from forebay_worker.checkpoint import CheckpointError
from forebay_worker.checkpoint.directory import weight_files
from forebay_worker.engines.generation import (
    FILE,
    GenerationConfig,
    OneOrMore,
    generation_defaults,
    read_json,
)
from forebay_worker.engines.naming import names_of

CAPABILITIES = frozenset(
    {
        CAP_GENERATE,
        CAP_LOGPROBS,
        CAP_PENALTIES,
        CAP_LOGIT_BIAS,
        CAP_RESUME,
        CAP_RESUME_SAMPLED,
    }
)
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    bos_token_id: OneOrMore = None
    eos_token_id: OneOrMore = None


class _AddedToken(msgspec.Struct, frozen=True):
    content: str = ""


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Tokenizer(msgspec.Struct, frozen=True):
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    sep_token: str | _AddedToken | None = None
    cls_token: str | _AddedToken | None = None
    mask_token: str | _AddedToken | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class ModelFiles:
    """What a model directory says of the model. Raises CheckpointError for what cannot be read."""

    def __init__(self, directory: Path, settings: WorkerSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._config = read_json(directory / "config.json", _Config)
        self._generation = read_json(directory / FILE, GenerationConfig)
        self._tokenizer = read_json(directory / "tokenizer_config.json", _Tokenizer)
        self._defaults = generation_defaults(self._generation, settings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence; those of the generation config come first."""
        ids = [*_listed(self._generation.eos_token_id), *_listed(self._config.eos_token_id)]
        return tuple(dict.fromkeys(ids))

    @property
    def template_tokens(self) -> dict[str, str]:
        """Special tokens that templates read by name."""
        tokens = {
            name: getattr(self._tokenizer, name)
            for name in self._tokenizer.__struct_fields__
            if name.endswith("_token")
        }
        return {
            name: token.content if isinstance(token, _AddedToken) else token
            for name, token in tokens.items()
            if token is not None
        }

    def tokenizer(self) -> bytes:
        return (self._directory / "tokenizer.json").read_bytes()

    def chat_template(self) -> str | None:
        """The Jinja source: the settings' file, the model's own file, or the tokenizer config's."""
        if self._settings.chat_template:
            return template_text(Path(self._settings.chat_template))
        own = self._directory / "chat_template.jinja"
        if own.is_file():
            return template_text(own)
        template = self._tokenizer.chat_template
        if isinstance(template, list):
            return next((each.template for each in template if each.name == "default"), None)
        return template

    def revision(self, dtype: str) -> str:
        """A hash that differs when answers may: config, types, and each weight file's name, size,
        header and 64 samples of 4 KiB (finetunes share all but the last)."""
        settings = self._settings
        digest = sha256(f"{dtype}\n{settings.load_format}\n".encode())
        for name in ("quantization", "kv_cache_dtype"):
            asked = getattr(settings, name)
            digest.update(b"" if asked == "auto" else f"{name} {asked}\n".encode())
        digest.update((self._directory / "config.json").read_bytes())
        if self._settings.load_format == "dummy":
            digest.update(str(self._settings.seed).encode())
            return digest.hexdigest()[:32]
        for name in weight_files(self._directory):
            digest.update(name.encode() + _fingerprint(self._directory / name))
        return digest.hexdigest()[:32]

    def card(
        self, *, engine: str, revision: str, vocab_size: int, max_model_len: int, block_size: int
    ) -> tuple[ModelCard, dict[str, bytes]]:
        """The card, and the blobs that it names."""
        tokenizer, template = self.tokenizer(), self.chat_template()
        blobs = {content_hash(tokenizer): tokenizer}
        if template is not None:
            blobs[content_hash(template.encode())] = template.encode()
        card = ModelCard(
            names=names_of(self._settings),
            revision=revision,
            family=self._config.model_type,
            engine=engine,
            tokenizer=content_hash(tokenizer),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=block_size,
            created=int((self._directory / "config.json").stat().st_mtime),
            eos_token_ids=self.eos_token_ids,
            bos_token_id=next(iter(_listed(self._config.bos_token_id)), None),
            chat_template=None if template is None else content_hash(template.encode()),
            template_tokens=self.template_tokens,
            generation_defaults=dict(self._defaults),
            capabilities=CAPABILITIES,
        )
        return card, blobs


def template_text(path: Path) -> str:
    """A chat template's source. Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"chat template {path} cannot be read: {error}") from error


def _listed(ids: OneOrMore) -> list[int]:
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def _fingerprint(path: Path) -> bytes:
    """Size, header and spread samples of a safetensors file."""
    size = path.stat().st_size
    digest = sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        digest.update(file.read(header))
        for at in range(_SAMPLES):
            file.seek(header + (size - header) * at // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
