"""The mapping carried out with whole tensors in memory: slow and plain, what streaming is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import HfTensor, Slab, check_names, hf_tensors, hf_tensors_in
from mcore_ckpt.sharding.regions import Region


def to_mcore(model: HfModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """mcore's global tensors from HuggingFace's. Each element must come from exactly one place."""
    found = hf_tensors_in(model, tensors)
    check_names(model, found, tensors, "in memory")
    made: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for tensor in found:
        values = tensors[tensor.name]
        assert tuple(values.shape) == tensor.shape, tensor.name
        for slab in tensor.slabs:
            part = values.reshape(-1)[slab.start : slab.start + slab.numel]
            if not slab.mcore:
                assert not part.any(), tensor.name
                continue
            if slab.mcore not in made:
                made[slab.mcore] = torch.full(slab.region.global_shape, float("nan"), dtype=values.dtype)
                filled[slab.mcore] = torch.zeros(slab.region.global_shape, dtype=torch.int8)
            _put(made[slab.mcore], slab.region, _changed(slab, part))
            _put(filled[slab.mcore], slab.region, torch.ones(slab.numel, dtype=torch.int8), add=True)
    for name, count in filled.items():
        assert (count == 1).all(), f"{name} is not covered exactly once"
    return made


def to_hf(model: HfModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """HuggingFace's tensors, copies included, from mcore's global ones."""
    return {tensor.name: _hf_tensor(tensor, tensors) for tensor in hf_tensors(model)}


def _hf_tensor(tensor: HfTensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    dtype = next((tensors[slab.mcore].dtype for slab in tensor.slabs if slab.mcore), torch.float32)
    values = torch.full((prod(tensor.shape),), float("nan"), dtype=dtype)
    end = 0
    for slab in tensor.slabs:
        assert slab.start == end, tensor.name
        end = slab.start + slab.numel
        part = torch.zeros(slab.numel, dtype=dtype)
        if slab.mcore:
            part = _get(tensors[slab.mcore], slab.region)
            if slab.change is not None:
                part = slab.change.to_hf(part.view(slab.region.local_shape)).reshape(-1)
        values[slab.start : end] = part
    assert end == tensor.numel, tensor.name
    return values.view(tensor.shape)


def _changed(slab: Slab, part: torch.Tensor) -> torch.Tensor:
    if slab.change is None:
        return part
    shape = slab.change.to_hf(torch.empty(slab.region.local_shape, device="meta")).shape
    return slab.change.to_mcore(part.view(shape)).reshape(-1)


def _put(target: torch.Tensor, region: Region, flat: torch.Tensor, add: bool = False) -> None:
    local = flat.view(region.local_shape)
    for box, place in region.boxes():
        where = tuple(slice(o, o + n) for o, n in zip(place.offset, place.shape, strict=True))
        value = local[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        target[where] = target[where] + value if add else value


def _get(source: torch.Tensor, region: Region) -> torch.Tensor:
    assert tuple(source.shape) == region.global_shape
    local = torch.full(region.local_shape, float("nan"), dtype=source.dtype)
    for box, place in region.boxes():
        where = tuple(slice(o, o + n) for o, n in zip(place.offset, place.shape, strict=True))
        local[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] = source[where]
    return local.reshape(-1)
