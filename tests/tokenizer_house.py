"""Small tokenizers of the two shapes that models have, trained or spelled out on the spot."""

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

ANSWER = "The quick brown fox says: 你好, мир, café 😀👩‍👩‍👧 — jumps over the lazy dog. "
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_tokenizer() -> Tokenizer:
    """A small byte-level BPE tokenizer, trained on the spot; it can spell any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ANSWER, "What is the capital of France? Paris."] * 5, trainer)
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """The shape of Llama 2's tokenizer: a leading space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", *"abcdefgh", "\u2581a", "\u2581b", "ab", "你"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("\u2581", "b"), ("a", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in pieces[:3]])
    return tokenizer
