"""The routes of the Anthropic dialect: read, one call, answer."""

from litestar.types import ASGIApp

from forebay_gateway.api.anthropic.service import MessagesService
from forebay_gateway.api.calls import posted


def messages_apps(service: MessagesService, max_body_bytes: int) -> dict[str, ASGIApp]:
    """What answers a POST, by path."""
    return {
        "/v1/messages": posted(service.create, max_body_bytes),
        "/v1/messages/count_tokens": posted(service.count, max_body_bytes),
    }
