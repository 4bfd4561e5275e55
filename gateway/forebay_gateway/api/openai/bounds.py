"""What the name that a request asks for makes of its parameters: defaults fill, caps lower.

Pure: it knows no routing, only the alias and the model that answers. The answer says what was
lowered, in a header.
"""

from typing import TypeVar

from forebay_shared.models import ModelCard
from msgspec.structs import replace

from forebay_gateway.api.openai.params import COMPLETION_MAX_TOKENS
from forebay_gateway.api.openai.schema import ChatRequest, GenerationRequest
from forebay_gateway.teams.aliases import warning
from forebay_gateway.teams.caller import Headers
from forebay_gateway.teams.records import Alias, Caps, Defaults

R = TypeVar("R", bound=GenerationRequest)

_UNSAID = {"temperature": 1.0, "top_p": 1.0}
"""What an absent field means where neither the alias nor the model says anything."""


def bounded(request: R, alias: Alias, card: ModelCard, notices: Headers) -> R:
    """The request with the alias's defaults in place of what is absent, and nothing above its caps.

    A client that asked for more learns it from a warning among `notices`; one that asked for
    nothing gets the cap where its default would be higher.
    """
    fields: dict[str, float | None] = {}
    for name in Defaults.__struct_fields__:
        default = getattr(alias.defaults, name)
        if default is not None and _asked(request, name) is None:
            fields[name] = default
    for name in Caps.__struct_fields__:
        cap, asked = getattr(alias.caps, name), _asked(request, name)
        if cap is None:
            continue
        value = fields.get(name, asked)
        unsaid = _unsaid(request, name, card) if value is None else value
        if unsaid is None or unsaid > cap:
            fields[name] = cap
        if asked is not None and asked > cap:
            _tell(notices, f"{name} was lowered to {cap:g}, the most for this model.")
    if "max_tokens" in fields and isinstance(request, ChatRequest):
        fields["max_completion_tokens"] = None
    return replace(request, **fields) if fields else request


def _asked(request: GenerationRequest, name: str) -> float | None:
    """What the client sent; of a chat's two limits the newer one."""
    if name == "max_tokens" and isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens
    return getattr(request, name)


def _unsaid(request: GenerationRequest, name: str, card: ModelCard) -> float | None:
    """What the field would be without any word of client or alias; None: as much as fits."""
    if name == "max_tokens" and not isinstance(request, ChatRequest):
        return COMPLETION_MAX_TOKENS
    value = card.generation_defaults.get(name, _UNSAID.get(name))
    return value if isinstance(value, int | float) else None


def _tell(notices: Headers, text: str) -> None:
    header = warning(text)
    if header not in notices:
        notices.append(header)
