"""Vocabularies padded for different tensor-parallel sizes: which differences are padding and no more."""

from __future__ import annotations

# Megatron pads to a multiple of make_vocab_size_divisible_by (128 by default) times the tensor-parallel size.
_LARGEST_DIVISOR = 128
_TENSORS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def has_vocabulary_rows(name: str) -> bool:
    """Whether a tensor has one row per token of the vocabulary."""
    return name.endswith(_TENSORS)


def only_padding_differs(rows: tuple[int, int], tp: tuple[int, int], vocab_size: int | None) -> bool:
    """Whether two numbers of rows can be one vocabulary, padded twice.

    Where the vocabulary's size is not known, they must differ by less than the larger one's padding can be: less than a
    power of two, at most 128, times its tensor-parallel size, that divides it. With equal sizes there is one padding.

    Args:
        rows: of the saved and of the wanted tensor.
        tp: the tensor-parallel sizes, in the same order.
        vocab_size: without padding; None if nobody said.

    Example:
        >>> only_padding_differs((131, 136), (1, 2), None), only_padding_differs((131, 264), (1, 2), None)
        (True, False)
    """
    if rows[0] == rows[1]:
        return True
    if vocab_size is not None:
        return vocab_size <= min(rows)
    if tp[0] == tp[1]:
        return False
    larger, its_tp = max(zip(rows, tp, strict=True))
    if larger % its_tp:
        return False
    divisor = 1
    while divisor < _LARGEST_DIVISOR and larger % (2 * divisor * its_tp) == 0:
        divisor *= 2
    return larger - min(rows) < divisor * its_tp
