"""Intake: an Encode from the wire becomes inputs, or an error that names what is wrong with it.

The gateway has checked all this before; here is the last wall in front of the model.
"""

import math

import numpy as np
from forebay_shared.errors import ContextLengthError, InvalidRequestError
from forebay_shared.models import EmbeddingCard
from forebay_shared.wire import MAX_ENCODE_INPUTS, MAX_ENCODE_TOKENS, Encode

from forebay_worker.pooling.ports import TokenIds, VectorRunner

_ID_BYTES = 4


def inputs_of(encode: Encode, runner: VectorRunner) -> list[TokenIds]:
    """The inputs as arrays of ids. Raises InvalidRequestError or one of its leaves."""
    if not 1 <= len(encode.inputs) <= MAX_ENCODE_INPUTS:
        raise InvalidRequestError(
            f"One message must hold 1 to {MAX_ENCODE_INPUTS} inputs.", param="input"
        )
    inputs = [_ids(packed, runner) for packed in encode.inputs]
    if len(inputs) > 1 and sum(map(len, inputs)) > MAX_ENCODE_TOKENS:
        raise InvalidRequestError(
            f"The inputs of one message may have {MAX_ENCODE_TOKENS} tokens at most.", param="input"
        )
    if not (math.isfinite(encode.weight) and encode.weight > 0):
        raise InvalidRequestError("weight must be a number above 0.", param="weight")
    return inputs


def check_dimensions(dimensions: int, card: EmbeddingCard) -> None:
    """Raises InvalidRequestError when vectors cannot have so many values; 0: all that there are."""
    if dimensions in (0, card.size):
        return
    if not card.matryoshka:
        raise InvalidRequestError(
            f"This model's vectors have {card.size} values and cannot be cut.", param="dimensions"
        )
    if card.sizes and dimensions not in card.sizes:
        sizes = ", ".join(map(str, card.sizes))
        raise InvalidRequestError(f"dimensions must be one of {sizes}.", param="dimensions")
    if not 1 <= dimensions <= card.size:
        raise InvalidRequestError(
            f"dimensions must be between 1 and {card.size}.", param="dimensions"
        )


def _ids(packed: bytes, runner: VectorRunner) -> TokenIds:
    if not packed or len(packed) % _ID_BYTES:
        raise InvalidRequestError("An input must hold whole 32-bit ids.", param="input")
    ids = np.frombuffer(packed, "<u4")
    if len(ids) > runner.max_model_len:
        raise ContextLengthError(
            f"An input may have {runner.max_model_len} tokens at most; one has {len(ids)}.",
            param="input",
        )
    if int(ids.max()) >= runner.vocab_size:
        raise InvalidRequestError(
            f"input must hold token ids between 0 and {runner.vocab_size - 1}.", param="input"
        )
    return ids
