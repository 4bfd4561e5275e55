"""A real `forebay serve` on a small random model: the whole product, ready in seconds.

The model has a byte-level tokenizer, a chat template that reads tools and documents, and 600 ids or
so, some of which the tokenizer does not know.
"""

import math
from pathlib import Path

import httpx
import torch
import transformers
from gateway_fakes import SPECIALS, byte_level_tokenizer
from patience import PATIENCE_S
from serve_house import Serve

TOKENIZER = byte_level_tokenizer()
VOCAB = TOKENIZER.get_vocab_size() + 8
MODEL = "tiny"
MAX_LEN = 2048
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for document in documents or [] %}doc: {{ document.text }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_directory(home: Path) -> Path:
    """Writes the model's files."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.2,
        eos_token_id=TOKENIZER.token_to_id(SPECIALS[2]),
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(home)
    TOKENIZER.save(str(home / "tokenizer.json"))
    (home / "chat_template.jinja").write_text(TEMPLATE)
    return home


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
