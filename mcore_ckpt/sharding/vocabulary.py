"""Computes the padding of vocabularies, and decides whether two numbers of rows differ only by padding."""

from __future__ import annotations

# Megatron pads to a multiple of make_vocab_size_divisible_by (128 by default) times the tensor-parallel size.
_LARGEST_DIVISOR = 128
# The plausible tensor-parallel sizes: powers of two, and three or five times a power of two, up to 64.
_SOME_TP = tuple(sorted(odd << power for odd in (1, 3, 5) for power in range(7) if odd << power <= 64))
_TENSORS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def has_vocabulary_rows(name: str) -> bool:
    """Returns True if a tensor has one row per token of the vocabulary."""
    return name.endswith(_TENSORS)


def may_be_same_vocabulary(rows: tuple[int, int], tp: tuple[int, int], vocab_size: int | None) -> bool:
    """Returns True if two numbers of rows can belong to one vocabulary with different padding.

    If the vocabulary's size is known, both numbers must be at least that size. If the size is unknown, the numbers must
    differ by less than the largest padding that the larger number can include (see `padding_is_plausible`). If the size
    is unknown and the tensor-parallel sizes are equal, the numbers must be equal, because the padding is equal.

    `rows` and `tp` have the numbers of rows and the tensor-parallel sizes of the saved and of the wanted tensor.

    Example:
        >>> may_be_same_vocabulary((131, 136), (1, 2), None), may_be_same_vocabulary((131, 264), (1, 2), None)
        (True, False)
    """
    if rows[0] == rows[1]:
        return True
    if vocab_size is not None:
        return vocab_size <= min(rows)
    if tp[0] == tp[1]:
        return False
    larger, its_tp = max(zip(rows, tp, strict=True))
    return padding_is_plausible(min(rows), larger, its_tp)


def padding_is_plausible(tokens: int, rows: int, tp: int | None = None) -> bool:
    """Returns True if megatron can have padded a vocabulary of `tokens` tokens to `rows` rows.

    Megatron pads to a multiple of `divisor * tp`. The divisor is unknown here. It is assumed to be the largest power of
    two, up to 128, for which `rows` is a multiple of `divisor * tp`. If the tensor-parallel size is unknown, the
    padding must be possible under one of the plausible sizes.

    Example:
        >>> padding_is_plausible(131, 136, 2), padding_is_plausible(131, 264, 2), padding_is_plausible(131, 131, 1)
        (True, False, True)
        >>> padding_is_plausible(131, 136), padding_is_plausible(131, 384), padding_is_plausible(131, 200)
        (True, True, False)
    """
    if tp is None:
        return any(padding_is_plausible(tokens, rows, each) for each in _SOME_TP)
    if rows < tokens or rows % tp:
        return False
    divisor = 1
    while divisor < _LARGEST_DIVISOR and rows % (2 * divisor * tp) == 0:
        divisor *= 2
    return rows - tokens < divisor * tp


def padded_rows(saved: int, tp: int, vocab_size: int | None, divisor: int | None) -> int:
    """Returns how many rows a vocabulary of `saved` rows has under the tensor-parallel size `tp`.

    Without `vocab_size` and `divisor`, the number of rows stays the same if it is a multiple of `tp`. `divisor` is
    megatron's make_vocab_size_divisible_by. None means 128 (megatron's default) if `vocab_size` is known, and 1
    otherwise.

    Raises ValueError if the checkpoint has fewer rows than the vocabulary has tokens.

    Example:
        >>> padded_rows(131, 1, None, None), padded_rows(131, 2, None, None), padded_rows(131, 2, 131, 4)
        (131, 132, 136)
    """
    if vocab_size is not None and vocab_size > saved:
        raise ValueError(f"the vocabulary cannot have {vocab_size} tokens: the checkpoint has {saved} rows")
    if divisor is None:
        divisor = 1 if vocab_size is None else _LARGEST_DIVISOR
    multiple = divisor * tp
    tokens = saved if vocab_size is None else vocab_size
    return -(-tokens // multiple) * multiple
