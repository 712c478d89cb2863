"""Quantized weights: filled through the main parameters that this rank owns, or quantized from what is loaded."""

import torch

from mcore_ckpt.load.quantized_weights import quantized_targets
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.shards import LocalShard, ParameterState

WHOLE = Region.whole((6,))


def weight(name: str, trains: bool = True) -> LocalShard:
    return LocalShard(ShardKey(name, MODEL), WHOLE, torch.nn.Parameter(torch.zeros(6), requires_grad=trains))


def state(name: str, first: int, last: int) -> ParameterState:
    main = torch.zeros(last - first)
    return ParameterState(name, WHOLE.with_flat(first, last), main, main, False, False, False, 0, moments={})


def test_a_weight_that_trains_is_filled_through_what_this_rank_owns_of_its_main_parameter() -> None:
    shard, owned = weight("a"), state("a", 2, 5)
    (target,) = quantized_targets([shard], [owned, state("of a plain weight", 0, 6)])
    assert target.shard is shard
    assert target.region == owned.region
    assert target.tensor is owned.main
    assert target.encode is None


def test_a_weight_of_which_this_rank_owns_nothing_is_not_filled() -> None:
    """Its owner fills it, and the weights are gathered."""
    assert list(quantized_targets([weight("a")], [])) == []


def test_a_frozen_weight_is_quantized_from_what_is_loaded() -> None:
    frozen, trained = weight("a", trains=False), weight("b")
    found = list(quantized_targets([frozen, trained], [state("b", 0, 6)]))
    assert [target.shard for target in found] == [trained, frozen]
    target = found[1]
    assert target.tensor is frozen.tensor
    assert target.region == WHOLE
    assert target.encode is not None
    target.encode(torch.arange(6.0))
    assert frozen.tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_without_an_optimizer_all_weights_are_quantized() -> None:
    shards = [weight("a"), weight("b", trains=False)]
    found = list(quantized_targets(shards, None))
    assert [target.shard for target in found] == shards
    assert all(target.encode is not None for target in found)
