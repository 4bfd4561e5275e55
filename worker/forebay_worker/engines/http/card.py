"""What an upstream says of itself, once, when the worker starts: the model's name, kind and card.

It waits for an upstream that is not up yet: the worker's card appears when the upstream does. It
knows no stream.
"""

import asyncio
import logging
import time
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
from forebay_shared.models import CAP_EMBED, CAP_TEXT, EmbeddingCard, ModelCard
from forebay_shared.settings import Secret, StartError, WorkerSettings

from forebay_worker.engines.http.bodies import embedding_body
from forebay_worker.engines.http.kinds import Kind, capabilities, kind_of, parameters
from forebay_worker.engines.http.upstream import MAX_ANSWER_BYTES, PROBE_TIMEOUT_S, headers_of
from forebay_worker.engines.http.vectors import vectors_of

log = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 131_072
VOCAB_SIZE = 2**31 - 1
"""Ids are the upstream's to check."""
BLOCK_SIZE = 16
AGAIN_S = 1.0
EMBED_TIMEOUT_S = 60.0


class Meta(msgspec.Struct):
    n_ctx: int | None = None
    n_ctx_train: int | None = None


class Listed(msgspec.Struct):
    """A model as /v1/models lists it, with what some servers add."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    meta: Meta | None = None
    capabilities: list[str] | None = None
    """Of another forebay, or of one that says as much."""

    @property
    def context(self) -> int:
        """Its context in tokens; 0 where nothing is said of it."""
        meta = self.meta or Meta()
        return self.max_model_len or meta.n_ctx or meta.n_ctx_train or 0


class _Models(msgspec.Struct):
    data: list[Listed] = []


class Found(NamedTuple):
    """What a worker needs to know of its upstream."""

    model: str
    kind: Kind
    card: ModelCard


def urls_of(settings: WorkerSettings) -> list[str]:
    """The base URLs, each with its /v1. Raises StartError that names the flag."""
    if not settings.upstream_url:
        raise StartError("--upstream-url: the http engine needs one, as http://host:8000/v1")
    return [_url(url) for url in settings.upstream_url]


def key_of(settings: WorkerSettings) -> Secret:
    """The upstream's key. Raises StartError when its file cannot be read."""
    path = settings.upstream_key_file
    if not path:
        return Secret("")
    try:
        key = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise StartError(f"--upstream-key-file: cannot read {path}: {reason}") from None
    if not key.isascii() or any(char.isspace() for char in key):
        raise StartError("--upstream-key-file: a key is one word of ASCII")
    return Secret(key)


async def find(settings: WorkerSettings, urls: list[str], key: Secret) -> Found:
    """Asks the upstream, for as long as it is not up. Raises StartError when it refuses."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers_of(key), timeout=timeout) as session:
        known = bool(settings.upstream_model) and settings.upstream_kind != "auto"
        listed = await _listed(session, urls, empty_will_do=known)
        model, entry = _model(settings, listed)
        kind: Kind = (
            settings.upstream_kind if settings.upstream_kind != "auto" else kind_of(entry.owned_by)
        )
        embedding = None
        if settings.runner == "pooling":
            embedding = await _embedding(session, urls[0], model, settings)
    return Found(model, kind, _card(settings, model, kind, entry, embedding))


def _url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError("--upstream-url: give a URL as http://host:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise StartError("--upstream-url: no key, query or fragment; see --upstream-key-file")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


async def _listed(
    session: aiohttp.ClientSession, urls: list[str], *, empty_will_do: bool
) -> list[Listed]:
    """The models of the first replica that lists some; none where there is no such route."""
    said = False
    while True:
        for url in urls:
            try:
                async with session.get(f"{url}/models", allow_redirects=False) as response:
                    body = await response.content.read(MAX_ANSWER_BYTES)
                    if response.status < 500:
                        listed = _read(response.status, body)
                        if listed or empty_will_do or response.status != 200:
                            return listed
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
        if not said:
            said = True
            log.warning("waiting for the upstream to list a model")
        await asyncio.sleep(AGAIN_S)


def _read(status: int, body: bytes) -> list[Listed]:
    if status in (401, 403):
        raise StartError("--upstream-key-file: the upstream refuses this key")
    if status != 200:
        return []
    try:
        return msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise StartError("--upstream-url: what is there is no OpenAI API") from None


def _model(settings: WorkerSettings, listed: list[Listed]) -> tuple[str, Listed]:
    """The model to ask for. A list need not be complete: hosts leave out what they serve."""
    name = settings.upstream_model
    if name:
        return name, next((each for each in listed if each.id == name), Listed(name))
    if len(listed) != 1:
        known = ", ".join(each.id for each in listed[:8]) or "nothing"
        raise StartError(f"--upstream-model: which one? The upstream lists {known}")
    return listed[0].id, listed[0]


async def _embedding(
    session: aiohttp.ClientSession, url: str, model: str, settings: WorkerSettings
) -> EmbeddingCard:
    """How large its vectors are: nothing tells but a vector."""
    try:
        async with session.post(
            f"{url}/embeddings",
            data=embedding_body(("a",), model, 0),
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=EMBED_TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            status, body = response.status, await response.content.read(MAX_ANSWER_BYTES)
    except (aiohttp.ClientError, TimeoutError, OSError):
        raise StartError("--upstream-url: the upstream makes no embeddings") from None
    if status != 200:
        raise StartError(f"--runner pooling: the upstream answers with status {status}")
    (vector,), _ = vectors_of(body, 1)
    return EmbeddingCard(
        size=len(vector) // 4, pooling="upstream", normalized=False, matryoshka=settings.matryoshka
    )


def _card(
    settings: WorkerSettings,
    model: str,
    kind: Kind,
    listed: Listed,
    embedding: EmbeddingCard | None,
) -> ModelCard:
    takes = parameters(kind, listed.capabilities)
    able = frozenset({CAP_EMBED, CAP_TEXT}) if embedding is not None else capabilities(takes)
    return ModelCard(
        names=settings.served_model_name or (model,),
        revision=f"http-{sha256(f'{kind} {model}'.encode()).hexdigest()[:24]}",
        family=kind,
        engine="http",
        tokenizer="",
        vocab_size=VOCAB_SIZE,
        max_model_len=settings.max_model_len or listed.context or DEFAULT_MODEL_LEN,
        block_size=BLOCK_SIZE,
        created=int(time.time()),
        capabilities=able,
        embedding=embedding,
        parameters=takes,
    )
