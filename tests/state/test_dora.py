"""Which part of a global tensor DoRA's magnitudes are."""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Piece, Region
from mcore_ckpt.state.model import _with_rows_of_weight
from mcore_ckpt.state.shards import LocalShard

WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"


def test_a_magnitude_has_the_rows_of_its_rank_of_the_weight() -> None:
    weight = ShardedTensor.from_rank_offsets(WEIGHT, torch.empty(4, 3), (0, 1, 2))
    magnitude = LocalShard(ShardKey("magnitude", "model"), Region.whole((4,)), torch.empty(4))
    found = _with_rows_of_weight(magnitude, {WEIGHT: weight}, WEIGHT)
    assert found.region == Region((8,), (4,), (Piece((0,), (4,), (4,)),), (0, 4))
    assert found.tensor is magnitude.tensor
