"""A small random model on disk, written in no time.

It has a byte-level tokenizer, a chat template that reads tools and documents, and 600 ids or
so, some of which the tokenizer does not know.
"""

from pathlib import Path

import torch
import transformers
from tokenizer_house import SPECIALS, byte_level_tokenizer

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
