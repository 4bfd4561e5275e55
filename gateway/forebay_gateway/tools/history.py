"""Earlier tool calls in the forms that some chat templates insist on. It knows no dialect."""

import json
import string
from collections.abc import Mapping, Sequence
from hashlib import sha256

from forebay_shared.template import Json

_ALPHABET = string.ascii_letters + string.digits


def with_short_ids(messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """The messages with every call's id as nine letters or digits, which Mistral's ask for."""
    changed: list[dict[str, Json]] = []
    for message in messages:
        renamed = dict(message)
        if isinstance(known := message.get("tool_call_id"), str):
            renamed["tool_call_id"] = _short(known)
        if isinstance(calls := message.get("tool_calls"), list):
            renamed["tool_calls"] = [
                call | {"id": _short(str(call.get("id", "")))} if isinstance(call, dict) else call
                for call in calls
            ]
        changed.append(renamed)
    return changed


def with_text_arguments(messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """The messages with the arguments of calls as JSON texts, for templates that join strings."""
    changed: list[dict[str, Json]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            changed.append({**message, "tool_calls": [_as_text(call) for call in calls]})
        else:
            changed.append(dict(message))
    return changed


def _short(known: str) -> str:
    if len(known) == 9 and known.isascii() and known.isalnum():
        return known
    digest = sha256(known.encode("utf-8", "surrogatepass")).digest()
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:9])


def _as_text(call: Json) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return call
    as_text: dict[str, Json] = {**function, "arguments": _dump(arguments)}
    return {**call, "function": as_text}


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
