"""The echo engine's tokenizer and chat template: one id per UTF-8 byte, made in code, a few KiB."""

from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END = 256
"""Id of the first special token: it ends a message, and an answer."""

_IDS = {symbol: place for place, symbol in enumerate(sorted(ByteLevel.alphabet()))}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_json() -> bytes:
    """A byte-level tokenizer without merges: ids 0..255 are bytes in the alphabet's order."""
    tokenizer = Tokenizer(BPE(dict(_IDS), []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer.to_str().encode()


SPACE = _IDS["\u0120"]
CAPITALS = {_IDS[letter]: _IDS[letter.upper()] for letter in ascii_lowercase}
"""The id of each small letter's capital."""
