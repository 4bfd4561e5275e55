"""The routes of the OpenAI dialect: read, one call, answer."""

from litestar.types import ASGIApp

from forebay_gateway.api.calls import posted
from forebay_gateway.api.openai.embeddings import EmbeddingService
from forebay_gateway.api.openai.scoring import ScoringService
from forebay_gateway.api.openai.service import OpenAIService


def generation_apps(service: OpenAIService, max_body_bytes: int) -> dict[str, ASGIApp]:
    """What answers a POST, by path."""
    return {
        "/v1/chat/completions": posted(service.chat, max_body_bytes),
        "/v1/completions": posted(service.complete, max_body_bytes),
    }


def embedding_apps(
    embeddings: EmbeddingService, scoring: ScoringService, max_body_bytes: int
) -> dict[str, ASGIApp]:
    """What answers a POST, by path."""
    calls = {
        "/v1/embeddings": embeddings.embed,
        "/score": scoring.score,
        "/v1/score": scoring.score,
        "/rerank": scoring.rerank,
        "/v1/rerank": scoring.rerank,
        "/v2/rerank": scoring.rerank_2,
    }
    return {path: posted(call, max_body_bytes) for path, call in calls.items()}
