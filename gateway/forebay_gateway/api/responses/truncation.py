"""truncation: auto. The oldest items of a conversation go until the rest and an answer fit.

It knows no Redis and no HTTP.
"""

from collections.abc import Sequence

from forebay_shared.errors import ContextLengthError

from forebay_gateway.api.openai.schema import ChatRequest
from forebay_gateway.api.openai.turns import Turns
from forebay_gateway.api.responses.items import CALLS, OUTPUTS, chat_messages
from forebay_gateway.api.responses.schema import Item, ResponsesRequest
from forebay_gateway.api.responses.translate import chat_request
from forebay_gateway.teams.caller import Caller

ROOM = 4
"""Without a limit, this part of the context is left for the answer; never more than half of it."""


async def fitting(
    turns: Turns, request: ResponsesRequest, items: Sequence[Item], caller: Caller, size: int
) -> ChatRequest:
    """The chat request with as many of the latest items as fit, found in log2(items) renderings.

    Raises ContextLengthError when not even the last item fits.
    """

    async def chat_from(first: int) -> ChatRequest | None:
        """The request without the items before `first`; None when it is too long."""

        def work() -> ChatRequest:
            return chat_request(request, chat_messages(_from(items, first), request.instructions))

        chat = await turns.renderers.run(work, size)
        try:
            rendered = await turns.render(chat, caller, size)
        except ContextLengthError:
            return None
        limit = rendered.card.max_model_len
        room = min(request.max_output_tokens or limit // ROOM, limit // 2)
        return chat if len(rendered.token_ids) + room <= limit else None

    low, high = 1, max(len(items) - 1, 0)
    best = await chat_from(high)
    if best is None:
        raise ContextLengthError(
            "Even the last item of the input is too long for this model's context.", param="input"
        )
    while low < high:
        middle = (low + high) // 2
        chat = await chat_from(middle)
        if chat is None:
            low = middle + 1
        else:
            best, high = chat, middle
    return best


def _from(items: Sequence[Item], first: int) -> list[Item]:
    """The items from `first` on, but no output whose call is gone."""
    called = {item.call_id for item in items[first:] if item.type in CALLS}
    return [item for item in items[first:] if item.type not in OUTPUTS or item.call_id in called]
