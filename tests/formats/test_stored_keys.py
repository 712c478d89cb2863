"""Tests under which keys a torch_dist checkpoint has the layers of another model."""

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.formats.torch_dist.keys import Place
from mcore_ckpt.formats.torch_dist.stored_keys import StoredKeys
from mcore_ckpt.sharding.counterparts import layers_of

HYBRID = layers_of(
    f"decoder.layers.{number}.{name}.weight"
    for number, name in enumerate(("self_attention.linear_qkv", "mlp.linear_fc1") * 2)
)
QKV, FC1 = "decoder.layers.2.self_attention.linear_qkv.weight", "decoder.layers.3.mlp.linear_fc1.weight"


def keys_of(**sizes: tuple[int, ...]) -> StoredKeys:
    """Of a checkpoint that has keys of these sizes; "__" stands for a dot."""
    stored = {name.replace("__", "."): size for name, size in sizes.items()}
    files: Any = SimpleNamespace(names=tuple(stored), has_tensor=stored.__contains__, size_of=stored.__getitem__)
    return StoredKeys(files, HYBRID)


def test_layers_that_are_alike_share_a_tensor() -> None:
    keys = keys_of(
        decoder__layers__self_attention__linear_qkv__weight=(2, 3, 4),
        decoder__layers__mlp__linear_fc1__weight=(2, 8, 4),
        chained_0__optimizer__state__exp_avg__decoder__layers__mlp__linear_fc1__weight=(2, 8, 4),
        embedding__word_embeddings__weight=(9, 4),
    )
    assert (keys.layer_mismatch, keys.are_other_layers) == (None, True)
    assert keys.place(QKV) == Place("decoder.layers.self_attention.linear_qkv.weight", (1,), (2,))
    state = "chained_0.optimizer.state.exp_avg."
    assert keys.place(state + FC1) == Place(state + "decoder.layers.mlp.linear_fc1.weight", (1,), (2,))
    assert keys.place("embedding.word_embeddings.weight") == Place("embedding.word_embeddings.weight", (), ())
    assert not keys.has("decoder.layers.2.mlp.linear_fc2.weight")


def test_layers_that_differ_have_numbers() -> None:
    keys = keys_of(
        decoder__layers__0__self_attention__linear_qkv__weight=(3, 4),
        decoder__layers__0__mlp__linear_fc1__weight=(8, 4),
        decoder__layers__1__self_attention__linear_qkv__weight=(3, 4),
        decoder__layers__1__mlp__linear_fc1__weight=(8, 4),
    )
    assert keys.place(QKV) == Place("decoder.layers.1.self_attention.linear_qkv.weight", (), ())
    assert keys.place(FC1) == Place("decoder.layers.1.mlp.linear_fc1.weight", (), ())


@pytest.mark.parametrize("size", [(), (10**12, 1), (0, 1)])
def test_a_size_that_no_model_has_is_taken_for_no_layers(size: tuple[int, ...]) -> None:
    keys = keys_of(decoder__layers__mlp__linear_fc1__weight=size)
    assert not keys.are_other_layers
    assert not keys.has(FC1)
