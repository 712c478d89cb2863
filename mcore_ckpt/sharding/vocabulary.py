"""Vocabularies padded for different tensor-parallel sizes: which differences are padding and no more."""

from __future__ import annotations

# Megatron pads to a multiple of make_vocab_size_divisible_by (128 by default) times the tensor-parallel size.
_LARGEST_DIVISOR = 128
# Sizes that somebody may have trained with: up to 64, and multiples of 2, 3 and 5 alone.
_SOME_TP = tuple(tp for tp in range(1, 65) if 30**6 % tp == 0)
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
    return may_be_padded(min(rows), larger, its_tp)


def may_be_padded(tokens: int, rows: int, tp: int) -> bool:
    """Whether a vocabulary of so many tokens may have so many rows under a tensor-parallel size.

    Example:
        >>> may_be_padded(131, 136, 2), may_be_padded(131, 264, 2), may_be_padded(131, 131, 1)
        (True, False, True)
    """
    if rows < tokens or rows % tp:
        return False
    divisor = 1
    while divisor < _LARGEST_DIVISOR and rows % (2 * divisor * tp) == 0:
        divisor *= 2
    return rows - tokens < divisor * tp


def may_be_padding(tokens: int, rows: int) -> bool:
    """As `may_be_padded`, where nobody says for which tensor-parallel size there is padding.

    Example:
        >>> may_be_padding(131, 136), may_be_padding(131, 384), may_be_padding(100, 136)
        (True, True, False)
    """
    return any(may_be_padded(tokens, rows, tp) for tp in _SOME_TP)


def padded_rows(saved: int, tp: int, vocab_size: int | None, divisor: int | None) -> int:
    """How many rows a vocabulary has under a tensor-parallel size: as saved if they divide and nobody asks for more.

    Args:
        saved: how many there are.
        tp: the size to cut them for.
        vocab_size: without padding; None if nobody said.
        divisor: megatron's make_vocab_size_divisible_by; None: its 128 if the vocabulary's size is known, else 1.

    Raises:
        ValueError: there are fewer rows than the vocabulary has tokens.

    Example:
        >>> padded_rows(131, 1, None, None), padded_rows(131, 2, None, None), padded_rows(131, 2, 131, 4)
        (131, 132, 136)
    """
    if vocab_size is not None and vocab_size > saved:
        raise ValueError(f"the vocabulary cannot have {vocab_size} tokens: there are {saved} rows")
    if divisor is None:
        divisor = 1 if vocab_size is None else _LARGEST_DIVISOR
    multiple = divisor * tp
    tokens = saved if vocab_size is None else vocab_size
    return -(-tokens // multiple) * multiple
