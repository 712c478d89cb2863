"""Places tensors on pipeline ranks by name (megatron-core 0.16.1), and divides tensors and work evenly by size.

Tools use this module, because they have no live model that could tell the places of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mcore_ckpt.sharding.pipeline import StageLayers
from mcore_ckpt.sharding.towers import in_tower, split_language_model

Stages = Mapping[tuple[int, int], StageLayers]

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\..+")
_FIRST = ("embedding.",)
_LAST = ("output_layer.", "decoder.final_layernorm.", "decoder.final_norm.")


class PipelineAssignment:
    """Places tensors on pipeline ranks, by their global names and the layers of each (rank, virtual stage)."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._last = max(pp for pp, _ in stages)
        self._decoder = {layer: pp for (pp, _), held in stages.items() for layer in held.decoder}
        self._mtp = {layer: pp for (pp, _), held in stages.items() for layer in held.mtp}

    def rank_of(self, name: str) -> int | None:
        """Returns the pipeline rank that has a tensor, or None if the rank does not follow from the name."""
        if self._last == 0:
            return 0
        if in_tower(name):
            return 0
        name = split_language_model(name)[1]
        if match := _LAYER.fullmatch(name):
            return (self._decoder if match[1] == "decoder" else self._mtp).get(int(match[2]))
        if name.startswith(_FIRST):
            return 0
        if name.startswith("decoder.final_layernorm.") and self._mtp:
            # With MTP the norm is on the stage of the last decoder layer (`has_final_layernorm_in_this_stage`). Without
            # MTP the norm is on the stage with the loss.
            return self._decoder[max(self._decoder)]
        return self._last if name.startswith(_LAST) else None


def even_ranges(sizes: Sequence[int], parts: int) -> list[list[tuple[int, int, int]]]:
    """Lays tensors end to end, and cuts the resulting sequence of elements into equal parts.

    Returns, for each part, triples (index of the tensor, start, stop). `start` and `stop` are in elements.

    Example:
        >>> even_ranges([3, 0, 5], 2)
        [[(0, 0, 3), (2, 0, 1)], [(2, 1, 5)]]
    """
    total = sum(sizes)
    ends = [total * (part + 1) // parts for part in range(parts)]
    result: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    part = position = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            while ends[part] <= position + start:
                part += 1
            stop = min(size, ends[part] - position)
            result[part].append((number, start, stop))
            start = stop
        position += size
    return result


def share_of(sizes: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Returns the indices of the work items that process `rank` does. `sizes` are the sizes of all work items.

    The items are assigned from the largest to the smallest, each to the process with the least work so far. All
    processes compute the same assignment.
    """
    loads = [0] * world_size
    mine = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = loads.index(min(loads))
        loads[least] += sizes[number]
        if least == rank:
            mine.append(number)
    return sorted(mine)
