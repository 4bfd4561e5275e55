"""GGUF metadata -> tokenizer.json, tokenizer_config.json and the chat template.

Byte-level BPE with the text splitting that the vocabulary was trained with. Knows the `tokenizers`
library; does not know the model.
"""

from collections.abc import Mapping

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from forebay_worker.checkpoint.errors import CheckpointError
from forebay_worker.checkpoint.gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4
"""Token types of llama.cpp: never in a text of its own accord; matched whole before the merges."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r"})
GPT2 = frozenset({"gpt-2", "gpt2"})


def tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the file describes. Raises CheckpointError for a kind not known."""
    kind = file.need("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise CheckpointError(
            f"model file {file.path} has a tokenizer of the type {kind!r}, not of"
            " 'gpt2' (byte-level BPE): give the Hugging Face directory of this model"
        )
    split = file.get("tokenizer.ggml.pre", str, "")
    tokens = _tokens(file)
    built = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(str(merge)) for merge in file.array("tokenizer.ggml.merges")],
            ignore_merges=split in LLAMA3,
        )
    )
    built.pre_tokenizer = _pre_tokenizer(file, split)
    if split in QWEN2:
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    built.post_processor = _post_processor(file, tokens)
    _add_special(built, file, tokens)
    return built


def tokenizer_config(file: GgufFile) -> Mapping[str, object]:
    """tokenizer_config.json: special tokens by name."""
    tokens = _tokens(file)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.need(f"{file.architecture}.context_length", int),
        "add_bos_token": _adds_bos(file),
    }
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (token := file.token_id(key)) is not None:
            config[f"{name}_token"] = tokens[token]
    return config


def _tokens(file: GgufFile) -> list[str]:
    return [str(token) for token in file.array("tokenizer.ggml.tokens")]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(file: GgufFile, split: str) -> pre_tokenizers.PreTokenizer:
    if split in DIGITS_FIRST:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if split in GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split not in LLAMA3 | QWEN2:
        known = ", ".join(sorted(LLAMA3 | QWEN2 | DIGITS_FIRST | GPT2))
        raise CheckpointError(
            f"model file {file.path} splits text by {split!r}, not by one of {known}: "
            "give the Hugging Face directory of this model"
        )
    pattern = LLAMA3_SPLIT if split in LLAMA3 else QWEN2_SPLIT
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _adds_bos(file: GgufFile) -> bool:
    """A file that does not say is read as llama.cpp reads it: BOS for llama3, none for others."""
    split = file.get("tokenizer.ggml.pre", str, "")
    return file.get("tokenizer.ggml.add_bos_token", bool, split in LLAMA3)


def _post_processor(file: GgufFile, tokens: list[str]) -> processors.PostProcessor:
    bos = file.token_id("bos")
    if bos is None or not _adds_bos(file):
        return processors.ByteLevel(trim_offsets=False)
    start = tokens[bos]
    return processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start}:1 $B:1", special_tokens=[(start, bos)]
    )


def _add_special(built: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    kinds = file.array("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    built.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    built.add_tokens([AddedToken(token, normalized=False) for token in whole])
