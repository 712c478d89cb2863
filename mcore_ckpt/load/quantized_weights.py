"""Plans how a load fills quantized weights: through this rank's main parameters, or by quantizing loaded values.

A load fills main parameters. Then megatron does the same as in a step: it quantizes
(`_copy_main_params_to_model_params` on all ranks, because the ranks agree on the scales), gathers the weights, and
processes the gathered weights (`post_all_gather_processing`). Where megatron gathers weights in the memory of gradients
(MXFP8), this package gathers them in separate memory, and then copies them into the quantized tensors, as megatron does
after its own gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mcore_ckpt.load.fill import Encode
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.shards import LocalShard, ParameterState


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor to fill with values of a weight.

    Attributes:
        shard: the weight.
        region: the elements of the weight that are needed.
        tensor: the fp32 main parameter of these elements, or the weight itself.
        encode: quantizes the values into the weight; None if the values are copied into the tensor.
    """

    shard: LocalShard
    region: Region
    tensor: torch.Tensor
    encode: Encode | None = None


def quantized_targets(quantized: Sequence[LocalShard], states: Iterable[ParameterState] | None) -> Iterator[Target]:
    """Yields, for quantized weights, the tensors to fill.

    A weight that trains is filled through its main parameter, which keeps the precision that quantizing loses. This
    rank fills the main parameters that it owns. Afterwards, the caller must call `write_weights`. A weight without a
    main parameter is quantized from the loaded values.

    `states` has the main parameters to fill; None without an optimizer.
    """
    by_name = {shard.key.name: shard for shard in quantized}
    for state in states or ():
        if state.name in by_name:
            yield Target(by_name[state.name], state.region, state.main)
    for shard in quantized:
        if states is None or shard.is_frozen:
            yield Target(shard, shard.region, shard.tensor, shard.tensor.data.copy_)
