"""Renderers by model, and where their work is done: a small one inline, a large one in a thread.

So the event loop never stalls. It knows no HTTP dialect and no bus; blobs come from whoever builds
it.
"""

import asyncio
import ctypes
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forebay_shared.errors import BusError, UnsupportedError
from forebay_shared.models import ModelCard

from forebay_gateway.prompt import Renderer

log = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_CHARS = 4_096
"""Longer texts go to the thread pool: the tokenizer takes up to 1 us a character on a busy core."""
THREADS = 2
MAX_RENDERERS = 8
MAX_BORROWED = 2
"""Templates of requests that are run at once."""
_PREPARE_ATTEMPTS, _PREPARE_AGAIN_S = 5, 1.0


class Renderers:
    """Renderers by model, loaded on first use and kept in a small LRU; owns the thread pool."""

    def __init__(self, blob: Callable[[str], Awaitable[bytes]]) -> None:
        self._blob = blob
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prompt")
        self._patient = ThreadPoolExecutor(MAX_BORROWED, thread_name_prefix="template")
        self._borrowing = asyncio.Semaphore(MAX_BORROWED)
        self._ready: OrderedDict[tuple[object, ...], Renderer] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, card: ModelCard) -> Renderer:
        """The renderer of a card. Raises BusError when its tokenizer cannot be fetched, and
        UnsupportedError where the model's tokens are known to its engine alone."""
        if card.speaks_text:
            raise UnsupportedError(
                f"Tokens of the model '{card.name}' are not known here: it is served elsewhere.",
                param="model",
            )
        key = _renderer_key(card)
        renderer = self._ready.get(key)
        if renderer is None:
            async with self._lock:
                renderer = self._ready.get(key) or await self._load(card)
                self._ready[key] = renderer
                while len(self._ready) > MAX_RENDERERS:
                    self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return renderer

    async def warm(self, cards: Sequence[ModelCard]) -> None:
        """Loads the renderers of these models, as many as are kept."""
        for card in [card for card in cards if not card.speaks_text][:MAX_RENDERERS]:
            await self.get(card)

    async def prepare(self, card: ModelCard) -> None:
        """Loads a renderer before anybody waits for it, if there is room; gives up in the end."""
        for _ in range(_PREPARE_ATTEMPTS):
            if card.speaks_text or len(self._ready) >= MAX_RENDERERS:
                return
            try:
                await self.get(card)
            except BusError:
                await asyncio.sleep(_PREPARE_AGAIN_S)
            except Exception:  # whoever asks for this model will be told
                log.exception("the tokenizer of %s cannot be used", card.name)
                return
            else:
                return

    async def _load(self, card: ModelCard) -> Renderer:
        tokenizer = await self._blob(card.tokenizer)
        template = None if card.chat_template is None else await self._blob(card.chat_template)
        renderer = await self.in_thread(lambda: Renderer(card, tokenizer, template))
        _give_memory_back()
        return renderer

    async def run(self, work: Callable[[], T], chars: int) -> T:
        """`work` inline when it is about few characters, else in a thread."""
        return work() if chars <= INLINE_CHARS else await self.in_thread(work)

    async def patiently(self, work: Callable[[], T]) -> T:
        """`work` that waits for another process, in a thread that nobody else needs.

        Who waits for a thread may leave, so none is left to be done when this process ends.
        """

        def over(done: asyncio.Future[T]) -> None:
            self._borrowing.release()
            if not done.cancelled():
                done.exception()  # seen, though who asked may have left

        await self._borrowing.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._patient, work)
        working.add_done_callback(over)
        return await asyncio.shield(working)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _give_memory_back() -> None:
    """Parsing a tokenizer leaves holes: 34 of 112 MB with 49,152 tokens. glibc can close them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _renderer_key(card: ModelCard) -> tuple[object, ...]:
    """Everything of a card that a Renderer depends on."""
    tokens = tuple(sorted(card.template_tokens.items()))
    return (
        card.tokenizer,
        card.chat_template,
        tokens,
        card.vocab_size,
        card.max_model_len,
        card.bos_token_id,
    )
