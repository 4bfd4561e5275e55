"""A real `forebay serve` on the small random model: the whole product, ready in seconds."""

import math
from pathlib import Path

import httpx
from patience import PATIENCE_S
from serve_house import Serve
from tiny_checkpoint import MODEL, TOKENIZER


class Tiny:
    """A client of the server, and what the tests ask of the model itself."""

    def __init__(self, server: Serve, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.http = httpx.Client(
            base_url=server.url,
            headers={"authorization": f"Bearer {server.key}"},
            timeout=PATIENCE_S,
        )

    def chat(self, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
        return self.http.post("/chat/completions", json=body | fields)

    def complete(self, **fields: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": "The quick", "max_tokens": 8, "temperature": 0}
        return self.http.post("/completions", json=body | fields)

    def encode(self, text: str) -> list[int]:
        return TOKENIZER.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        return TOKENIZER.decode(token_ids, skip_special_tokens=False)


def mean(logprobs: list[float]) -> float:
    """As a contest of answers counts it."""
    return math.fsum(logprobs) / len(logprobs)
