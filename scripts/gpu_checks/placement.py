"""Looks where things are: GPUs and pinned pages on NUMA nodes, and contexts on GPUs."""

from __future__ import annotations

import os
from typing import Any

from gpu_checks import machine
from gpu_checks.needs import has_module, need_gpus, need_module
from gpu_checks.outcome import Failed, NotPossible
from gpu_checks.ranks import on_ranks, process_group

# The part of the pages that may be elsewhere: the kernel takes what the node has.
ELSEWHERE = 0.05
LIMIT_S = 600.0
GIGABYTES = 1.0


def numa() -> str:
    """Compares, for all GPUs of the node at once, the GPU's NUMA node with that of the pages its state is copied to."""
    world = need_gpus()
    need_module("megatron.core", "megatron-core")
    by_rank = on_ranks("gpu_checks.placement:pinned_pages", world=world, limit_s=LIMIT_S)
    by_uuid = {gpu.uuid: gpu.pci for gpu in machine.gpus()}
    wrong, texts = [], []
    for rank, found in enumerate(by_rank):
        pci = by_uuid.get(found["gpu"])
        own = None if pci is None else machine.numa_node(pci)
        pages = {int(node): nbytes for node, nbytes in found["nodes"].items()}
        texts.append(placed(rank, pci, own, pages))
        if own is not None and pages.get(own, 0) < (1 - ELSEWHERE) * sum(pages.values()):
            wrong.append(rank)
    if wrong:
        raise Failed(f"pinned pages of ranks {wrong} are not on the node of their GPU: {'; '.join(texts)}")
    return "; ".join(texts)


def placed(rank: int, pci: str | None, own: int | None, pages: dict[int, int]) -> str:
    """Returns in words where a rank's GPU and its pages are."""
    total = sum(pages.values())
    shares = ", ".join(f"node {node}: {nbytes / total:.0%}" for node, nbytes in sorted(pages.items()))
    return f"GPU {rank} ({pci or 'unknown address'}) on node {'unknown' if own is None else own}, pages {shares}"


def pinned_pages() -> dict[str, Any]:
    """Returns this rank's GPU, and on which nodes the memory is that a save has copied the state to."""
    from gpu_checks import trainer

    with process_group():
        state = trainer.build(trainer.shape(trainer.fitting(GIGABYTES)))
        before = machine.numa_maps()
        with trainer.saved_by(trainer.shared_folder(), state, async_mode="lazy") as manager:
            manager.save(1).wait()
            nodes = machine.grown(before, machine.numa_maps())
    if not nodes:
        raise NotPossible("no range of memory has grown by a save, as /proc/self/numa_maps tells")
    return {"gpu": _own_gpu(), "nodes": nodes}


def _own_gpu() -> str:
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def own_contexts() -> str:
    """Saves with an export in line on all GPUs, and looks which processes have contexts on which GPUs."""
    world = need_gpus(2)
    need_module("megatron.core", "megatron-core")
    by_rank = on_ranks("gpu_checks.placement:contexts_of_rank", world=world, limit_s=LIMIT_S)
    own = {each["pid"]: each["gpu"] for each in by_rank}
    wrong = [
        f"rank {rank} has contexts on GPUs {each['active']}"
        for rank, each in enumerate(by_rank)
        if each["active"] != [each["device"]]
    ]
    listed = [machine.Context(gpu, pid) for gpu, pid in by_rank[0]["listed"]]
    wrong += machine.foreign(listed, own)
    if wrong:
        raise Failed("; ".join(wrong))
    seen = sum(each.pid in own for each in listed)
    how = f"nvidia-smi lists {seen} contexts of {world} ranks" if seen else "nvidia-smi does not list our processes"
    export = "" if by_rank[0]["exported"] else "; without an export, because there is no transformers"
    return f"{how}, the driver {world}{export}"


def contexts_of_rank() -> dict[str, Any]:
    """Saves in both modes, and returns this rank's contexts as the driver tells; on rank 0 all, as nvidia-smi does."""
    import torch
    import torch.distributed as dist

    from gpu_checks import trainer

    with process_group() as rank:
        root, exported = trainer.shared_folder(), has_module("transformers")
        for mode in ("snapshot", "lazy"):
            if exported:
                with trainer.exporting_trainer(root / mode, async_mode=mode) as (manager, _):
                    manager.save(1).wait()
            else:
                with trainer.saved_by(root / mode, trainer.build(trainer.shape(0.2)), async_mode=mode) as manager:
                    manager.save(1).wait()
            _forget_parallel_state()
        # All ranks are alive while nvidia-smi looks.
        dist.barrier()
        listed = _listed() if rank == 0 else []
        dist.barrier()
        return {
            "pid": os.getpid(),
            "gpu": _own_gpu(),
            "device": torch.cuda.current_device(),
            "active": machine.active_devices(),
            "listed": listed,
            "exported": exported,
        }


def _listed() -> list[tuple[str, int]]:
    try:
        return [(each.gpu, each.pid) for each in machine.contexts()]
    except NotPossible:
        return []


def _forget_parallel_state() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
