"""Tests which lengths of a vocabulary differ by padding alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows, may_be_same_vocabulary

sizes = st.sampled_from([1, 2, 4, 8])


def padded(tokens: int, divisor: int, tp: int) -> int:
    """Pads as megatron's `_vocab_size_with_padding` does."""
    multiple = divisor * tp
    return -(-tokens // multiple) * multiple


@given(st.integers(1, 5000), st.sampled_from([1, 2, 64, 128]), sizes, sizes, st.booleans())
def test_paddings_of_one_vocabulary_pass(tokens: int, divisor: int, saved: int, mine: int, known: bool) -> None:
    rows = (padded(tokens, divisor, saved), padded(tokens, divisor, mine))
    assert may_be_same_vocabulary(rows, (saved, mine), tokens if known else None)


@pytest.mark.parametrize(
    ("rows", "tp", "vocab_size", "passes"),
    [
        # With a known size, both lengths must hold all tokens, whatever the tensor-parallel sizes.
        ((1000, 1024), (2, 2), 999, True),
        ((1000, 1024), (2, 4), 1000, True),
        ((1000, 1024), (2, 4), 1001, False),
        # With an unknown size and equal tensor-parallel sizes, the padding must be equal.
        ((1000, 1024), (2, 2), None, False),
        ((1000, 1000), (2, 2), None, True),
        # The padding of 1024 rows on four ranks is limited by the largest power of two times 4 that divides 1024.
        ((1000, 1024), (2, 4), None, True),
        ((500, 1024), (2, 4), None, False),
        ((1000, 1028), (2, 4), None, False),
        ((1025, 1028), (2, 4), None, True),
        ((1024, 1028), (2, 4), None, False),
        ((767, 1024), (1, 2), None, False),
        ((769, 1024), (1, 2), None, True),
        # The larger length cannot be divided among the ranks.
        ((1000, 1026), (1, 4), None, False),
        # The same, with saved and wanted exchanged.
        ((1024, 1000), (4, 2), None, True),
        # The divisor may differ, too.
        ((1024, 1000), (2, 4), None, True),
    ],
)
def test_lengths(rows: tuple[int, int], tp: tuple[int, int], vocab_size: int | None, passes: bool) -> None:
    assert may_be_same_vocabulary(rows, tp, vocab_size) == passes


def test_which_tensors_have_rows_of_tokens() -> None:
    for name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
        assert has_vocabulary_rows(name)
    for name in ("embedding.position_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight"):
        assert not has_vocabulary_rows(name)
