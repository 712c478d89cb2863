"""The staging buffer is the file: tensors are copied to the offsets they have on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.staging.arena import Arena
from mcore_ckpt.staging.copy import copy_out
from mcore_ckpt.storage.pt_image import PtImage, build_image
from mcore_ckpt.storage.requests import WriteRequest


@dataclass(frozen=True, eq=False)
class HostImage:
    """A file's bytes up to its index, in host memory; CRCs are not filled in yet."""

    request: WriteRequest
    image: PtImage
    buffer: torch.Tensor


class ImageCache:
    """File images by structure: they are made once and serve every save of the same tensors."""

    def __init__(self) -> None:
        self._images: dict[str, tuple[object, PtImage]] = {}

    def get(self, request: WriteRequest) -> PtImage:
        structure = [(t.path, t.shape, t.tensor.dtype) for t in request.tensors]
        cached = self._images.get(request.path)
        if cached is None or cached[0] != structure:
            cached = (structure, _new_image(request))
            self._images[request.path] = cached
        return cached[1]


def _new_image(request: WriteRequest) -> PtImage:
    # Empty copies, each with a storage of its own: a live parameter is a view of its bucket, and torch would store
    # that.
    copies = [torch.empty(write.shape, dtype=write.tensor.dtype) for write in request.tensors]
    tree: dict[str, Any] = {}
    for name in request.tree:
        tree[name] = {}
    for write, copy in zip(request.tensors, copies, strict=True):
        branch = tree
        for part in write.path[:-1]:
            branch = branch.setdefault(part, {})
        branch[write.path[-1]] = copy
    if [id(leaf) for leaf in _leaves(tree)] != [id(copy) for copy in copies]:
        # torch numbers its records in the order of the tree: slots would go to other tensors.
        raise ValueError(f"{request.path}: tensors are not listed in the order of the tree they are in")
    return build_image(tree, copies)


def _leaves(tree: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


def fill_image(request: WriteRequest, images: ImageCache, arena: Arena) -> HostImage:
    """Copies a request's tensors out.

    When this returns, the training state may change; the arena must not be taken again.
    """
    image = images.get(request)
    buffer = arena.take(image.records_end)
    data = memoryview(buffer.numpy())
    for offset, gap in image.gaps:
        data[offset : offset + len(gap)] = gap
    copy_out([write.tensor for write in request.tensors], buffer, [slot.offset for slot in image.slots])
    return HostImage(request, image, buffer)
