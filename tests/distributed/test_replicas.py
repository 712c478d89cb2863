"""Each save compares replicas: what has drifted is named, and no tensor is stored as a mixture."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.optimizer import read_optimizer
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.tools.examine.doctor.stored_replicas import stored_replicas
from tests.distributed.agreement import everywhere, gather
from tests.distributed.checkpointing import manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.training import Layout, Training, build, parallel, train


def parameter(training: Training, end: str) -> torch.Tensor:
    found = [p for chunk in training.model for name, p in chunk.named_parameters() if name.endswith(end)]
    return found[-1].data


def moment(training: Training) -> torch.Tensor:
    *_, last = optimizer_parts(training.optimizer)[0].inner.state.values()
    return last["exp_avg"]


def state(training: Training, end: str, kind: str) -> torch.Tensor:
    """The main parameter, or a moment, of the last parameter with this end."""
    model = model_shards(training.model)
    every = [s for part in read_optimizer(training.optimizer, model, first_instance=True) for s in part]
    found = [each for each in every if each.name.endswith(end)][-1]
    return found.main if kind == "main" else found.moments[kind]


Find = Callable[[Training], torch.Tensor]
NORM, WORDS, FC2 = "final_layernorm.weight", "embedding.word_embeddings.weight", "linear_fc2.weight"
TP2 = replace(LAYOUTS["tp2"], precision="bf16")
ETP1 = Layout(2, tp=2, experts=4, etp=1, precision="bf16", distributed_optimizer=False)
# The layout, the rank that drifts, its tensor, and words of the warning.
DRIFTS: dict[str, tuple[Layout, int, Find, str]] = {
    "data": (
        LAYOUTS["dp2-bf16"],
        1,
        lambda t: parameter(t, "linear_fc1.weight"),
        "linear_fc1.weight: rank 0 and rank 1",
    ),
    "tensor": (
        LAYOUTS["tp2"],
        1,
        lambda t: parameter(t, "final_layernorm.weight"),
        "final_layernorm.weight: rank 0 and rank 1",
    ),
    "tied": (
        LAYOUTS["pp2-tied-bf16"],
        1,
        lambda t: parameter(t, "output_layer.weight"),
        "word_embeddings.weight: rank 0 and",
    ),
    "mtp": (
        LAYOUTS["pp2-mtp"],
        1,
        lambda t: parameter(t, "word_embeddings.weight"),
        "word_embeddings.weight: rank 0 and",
    ),
    "context": (
        LAYOUTS["cp2"],
        1,
        lambda t: parameter(t, "linear_proj.weight"),
        "linear_proj.weight: rank 0 and rank 1",
    ),
    "bias": (
        LAYOUTS["dp2-expert-bias"],
        1,
        lambda t: parameter(t, "router.weight"),
        "router.weight: rank 0 and rank 1",
    ),
}
# Optimizer states, of which each rank has its own.
STATES: dict[str, tuple[Layout, int, Find, str]] = {
    "tensor-moment": (LAYOUTS["tp2"], 1, lambda t: state(t, NORM, "exp_avg"), f"{NORM} (exp_avg): rank 0 and rank 1"),
    "tied-main": (
        LAYOUTS["pp2-tied-bf16"],
        1,
        lambda t: state(t, WORDS, "main"),
        f"{WORDS} (param): rank 0 and rank 1",
    ),
    "experts-moment": (ETP1, 1, lambda t: state(t, FC2, "exp_avg"), f"{FC2} (exp_avg): rank 0 and rank 1"),
}
MORE_STATES: dict[str, tuple[Layout, int, Find, str]] = {
    "tensor-main": (TP2, 1, lambda t: state(t, NORM, "main"), f"{NORM} (param): rank 0 and rank 1"),
    "tied-moment": (
        LAYOUTS["pp2-tied-bf16"],
        1,
        lambda t: state(t, WORDS, "exp_avg"),
        f"{WORDS} (exp_avg): rank 0 and",
    ),
    "mtp-moment": (LAYOUTS["pp2-mtp"], 1, lambda t: state(t, WORDS, "exp_avg"), f"{WORDS} (exp_avg): rank 0 and"),
    "experts-main": (ETP1, 1, lambda t: state(t, FC2, "main"), f"{FC2} (param): rank 0 and rank 1"),
}
FOUR: dict[str, tuple[Layout, int, Find, str]] = {
    "experts": (
        LAYOUTS["ep2-dp4"],
        3,
        lambda t: parameter(t, "linear_fc2.weight"),
        "linear_fc2.weight: rank 1 and rank 3",
    ),
    "three": (LAYOUTS["dp4-buckets"], 2, lambda t: parameter(t, "linear_fc1.weight"), "ranks 0, 1, 3 and rank 2"),
}


def cases(drifts: dict[str, Any], world: int, *more: pytest.MarkDecorator) -> list[Any]:
    marks = [pytest.mark.world(world), *more]
    return [pytest.param(*drift, marks=marks, id=name) for name, drift in drifts.items()]


@pytest.mark.parametrize(
    ("layout", "rank", "find", "words"),
    [*cases(DRIFTS, 2), *cases(STATES, 2), *cases(MORE_STATES, 2, pytest.mark.full), *cases(FOUR, 4, pytest.mark.full)],
)
def test_a_replica_that_has_drifted_is_named_once(
    layout: Layout, rank: int, find: Find, words: str, shared_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        manager = manager_of(training, shared_path, verify_replicas=True)
        sound = manager.save(1)
        if dist.get_rank() == rank:
            find(training).view(-1)[-1] += 1
        with caplog.at_level(logging.WARNING, "mcore_ckpt.save.replica_check"):
            drifted, again = manager.save(2), manager.save(3)
        manager.close()
        reports = [gather(handle.report) for handle in (sound, drifted, again)]
        with everywhere():
            texts = [report[0].different_replicas for report in reports]
            assert texts[0] == ()
            assert len(texts[1]) == 1
            assert words in texts[1][0]
            assert texts[2] == texts[1]
            if NORM in words:
                # What tensor parallelism replicates is stored by each rank.
                (finding,) = stored_replicas(shared_path)
                assert "1 of" in finding.fact
                assert words.partition(":")[0] in finding.fact
            assert caplog.text.count("although they are replicas") == (1 if dist.get_rank() == 0 else 0)


@pytest.mark.world(2)
def test_samples_find_replicas_that_have_drifted_everywhere(shared_path: Path) -> None:
    """As a lost all-reduce leaves them. Whatever tensors a save looks at, it sees that they differ."""
    with parallel(LAYOUTS["dp2-bf16-replicated"]):
        training = build(LAYOUTS["dp2-bf16-replicated"], seed=1)
        train(training, 0, 2)
        manager = manager_of(training, shared_path, async_save=True)
        sound = manager.save(1)
        sound.wait()
        for chunk in training.model if dist.get_rank() == 1 else ():
            for parameter_ in chunk.parameters():
                parameter_.data += 1
        drifted = manager.save(2)
        drifted.wait()
        if dist.get_rank() == 1:
            moment(training).add_(1)
        checked = manager_of(training, shared_path, role="critic", verify_replicas=True)
        everything = checked.save(3)
        for each in (manager, checked):
            each.close()
        reports = [gather(handle.report)[0] for handle in (sound, drifted, everything)]
        with everywhere():
            assert reports[0].different_replicas == ()
            assert 1 <= len(reports[1].different_replicas) <= 8
            assert any("(exp_avg" in text for text in reports[2].different_replicas)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.world(layout.world)) for name, layout in LAYOUTS.items() if layout.world > 1],
)
def test_sound_replicas_are_equal_in_every_layout(layout: str, shared_path: Path) -> None:
    with parallel(LAYOUTS[layout]):
        training = build(LAYOUTS[layout], seed=1)
        train(training, 0, 2)
        manager = manager_of(training, shared_path, verify_replicas=True)
        handle = manager.save(1)
        manager.close()
        report = gather(handle.report)[0]
        with everywhere():
            assert report.different_replicas == ()
