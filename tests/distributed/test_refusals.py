"""A checkpoint that does not fit, or is not whole, is refused on all ranks alike, before anything changes."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from msgspec import structs

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.checkpoint.plain_files import pickle_plain, read_plain, write_plain
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CommitError,
    UnsupportedError,
)
from mcore_ckpt.state.model import unwrap
from mcore_ckpt.steps.commit import write_manifest
from tests.distributed.agreement import error_of, everywhere, gather, raised_everywhere
from tests.distributed.checkpointing import TIMEOUT_S, manager_of, save
from tests.distributed.layouts import HAS_HYBRID, LAYOUTS, REDUCES_EXPERTS_APART
from tests.distributed.refusals import assert_names, refused_load
from tests.distributed.tiers import pairs
from tests.distributed.training import Layout, build, build_chunks, parallel, train

DP2 = LAYOUTS["dp2-bf16"]
MODEL = "model/mp_rank_00_000/model_states.pt"
OPTIMIZER = "optim/distrib_optim_pp0_tp0_cp0_dp1.pt"
COMMON = "optim/common.pt"
RNG = "rng_states/rng_states_pp0_tp0_cp0_dp1.pt"


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("loading", "patterns"),
    [
        pytest.param(replace(DP2, hidden_size=48), (MODEL, r"\.weight.* wanted .*48.* found .*40"), id="hidden-size"),
        pytest.param(
            replace(DP2, num_layers=3), (MODEL, r"decoder\.layers\.2\..* wanted .* found no such"), id="more-layers"
        ),
        pytest.param(
            replace(DP2, num_layers=1), (MODEL, r"decoder\.layers\.1\..* wanted no such .* found"), id="fewer-layers"
        ),
        pytest.param(LAYOUTS["ep2"], ("float32|experts",), id="experts"),
    ],
)
def test_another_model(loading: Layout, patterns: tuple[str, ...], shared_path: Path) -> None:
    with parallel(DP2):
        saved = build(DP2, seed=1)
        train(saved, 0, 1)
        save(saved, shared_path, 1)
    with parallel(loading):
        training = build(loading, seed=2)
        train(training, 0, 1)
        assert_names(refused_load(training, shared_path, CheckpointMismatchError), *patterns)
        # Refused alike, so the ranks are still in step.
        train(training, 1, 2)


def missing(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def foreign(path: Path) -> None:
    torch.save({"state": torch.zeros(7)}, path)


def foreign_of_the_same_size(path: Path) -> None:
    size = path.stat().st_size
    foreign(path)
    with path.open("r+b") as file:
        file.truncate(size)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("damage", "file"),
    pairs(
        (missing, cut, foreign, foreign_of_the_same_size),
        (MODEL, OPTIMIZER, COMMON, RNG),
        also=[(cut, MODEL), (foreign_of_the_same_size, OPTIMIZER), (foreign, COMMON)],
    ),
)
def test_damaged_file(damage: Callable[[Path], None], file: str, shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        save(training, shared_path, 1)
        train(training, 1, 2)
        with everywhere():
            if dist.get_rank() == 0:
                damage(shared_path / "global_steps_1" / "actor" / file)
        assert_names(refused_load(training, shared_path, CheckpointCorruptError), re.escape(file))


def without_device(role: Path) -> None:
    """Takes the device's state out of the random states of rank 1, as a program that writes such files might."""
    manifest = read_manifest(role)
    record = next(file for file in manifest.files if file.path == RNG)
    states = {name: state for name, state in read_plain(role, record).items() if name != "device"}
    for name in (RNG, "manifest.json"):
        (role / name).unlink()
    written = write_plain(role, RNG, record.kind, pickle_plain(states))
    changed = structs.replace(record, size=written.size, crc32=written.crc32)
    files = tuple(changed if file is record else file for file in manifest.files)
    write_manifest(role, replace(manifest, files=files))


@pytest.mark.world(2)
def test_random_states_that_lack_a_field(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        save(training, shared_path, 1)
        train(training, 1, 2)
        with everywhere():
            if dist.get_rank() == 0:
                without_device(shared_path / "global_steps_1" / "actor")
        assert_names(refused_load(training, shared_path, CheckpointCorruptError), re.escape(RNG), "device")


@pytest.mark.world(2)
def test_folder_without_manifest_is_not_a_checkpoint(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        save(training, shared_path, 1)
        role = shared_path / "global_steps_1" / "actor"
        with everywhere():
            if dist.get_rank() == 0:
                (role / "manifest.json").unlink()
        choices: list[dict[str, Any]] = [{}, {"step": 1}, {"step": 9}, {"path": role}]
        for choice in choices:
            refused_load(training, shared_path, CheckpointNotFoundError, **choice)


@pytest.mark.world(2)
def test_empty_root(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        messages = refused_load(training, shared_path, CheckpointNotFoundError)
        assert_names(messages, re.escape(str(shared_path)))


@pytest.mark.world(2)
def test_what_was_not_saved_cannot_be_loaded(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        save(training, shared_path, 1, save_contents=("model", "extra"))
        messages = refused_load(training, shared_path, CheckpointMismatchError)
        assert_names(messages, "optimizer")


@pytest.mark.world(2)
def test_older_checkpoint_is_found_when_the_newest_has_lost_its_folder(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        for step in (1, 2):
            train(training, step - 1, step)
            save(training, shared_path, step)
        with everywhere():
            if dist.get_rank() == 0:
                shutil.rmtree(shared_path / "global_steps_2")
        manager = manager_of(training, shared_path)
        result = manager.load()
        manager.close()
        with everywhere():
            assert result.step == 1


@pytest.mark.skipif(REDUCES_EXPERTS_APART, reason="this megatron-core keeps them alike; test_resume.py saves them")
@pytest.mark.world(2)
def test_experts_whose_replicas_drift_apart(shared_path: Path) -> None:
    layout = Layout(2, tp=2, experts=4, etp=1)
    with parallel(layout):
        training = build(layout, seed=1)
        error = error_of(lambda: manager_of(training, shared_path))
        assert_names(raised_everywhere(UnsupportedError, error), "EP=1", "ETP=1", "TP=2")


@pytest.mark.skipif(
    not hasattr(parallel_state, "get_gtp_weight_remat_world_size"),
    reason="this megatron-core has no generalized tensor parallelism",
)
@pytest.mark.world(2)
def test_generalized_tensor_parallelism(shared_path: Path) -> None:
    """Its shards of a weight would pass for replicas. Only transformer-engine's layers cut weights so; these do not."""
    with parallel(Layout(2), gtp_remat_size=2):
        _, chunks = build_chunks(Layout(2), seed=1)
        error = error_of(lambda: CheckpointManager(shared_path, chunks))
        assert_names(raised_everywhere(UnsupportedError, error), "generalized tensor parallelism")
        with everywhere():
            assert not list(shared_path.iterdir())


@pytest.mark.world(2)
def test_one_name_for_two_tensors_on_two_stages(shared_path: Path) -> None:
    layout = Layout(2, pp=2)
    with parallel(layout):
        _, (chunk,) = build_chunks(layout, seed=1)
        chunk.extra = torch.nn.Linear(2, 2)
        config = CheckpointConfig(save_contents=("model",), load_contents=("model",), timeout_s=TIMEOUT_S)
        error = error_of(lambda: CheckpointManager(shared_path, [chunk], config=config))
        assert_names(raised_everywhere(UnsupportedError, error), r"tensor extra\.bias is on two pipeline stages")


@pytest.mark.skipif(not HAS_HYBRID, reason="this megatron-core has no HybridModel")
@pytest.mark.world(1)
def test_a_load_drops_what_was_computed_from_the_old_weights(shared_path: Path) -> None:
    layout = Layout(1, pattern="M")
    with parallel(layout):
        training = build(layout, seed=1)
        save(training, shared_path, 1)
        mixer: Any = unwrap(training.model[0]).decoder.layers[0].mixer
        mixer._A_neg_exp_cache_stale = False
        manager = manager_of(training, shared_path)
        manager.load()
        manager.close()
        assert mixer._A_neg_exp_cache_stale


@pytest.mark.world(2)
def test_ranks_that_disagree(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        error = error_of(lambda: manager.save(dist.get_rank()))
        assert_names(raised_everywhere(CommitError, error), "rank 1", "global_steps_0", "global_steps_1")
        manager.save(5).wait()
        assert manager.load().step == 5
        manager.close()


@pytest.mark.world(2)
def test_a_rank_that_fails_alone_keeps_step(shared_path: Path) -> None:
    """What one rank's arguments make impossible fails on all, and the next save works."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path)
        for bad in (["not a dict"], {"f": print}):
            for culprit in (0, 1):
                error: Exception | None = None
                try:
                    manager.save(1, extra_state=bad if dist.get_rank() == culprit else {})
                except (CheckpointError, TypeError) as raised:
                    error = raised
                assert gather(error is not None) == [True, True]
                assert "extra_state" in str(error)
        manager.save(2).wait()
        assert manager.load().step == 2
        with everywhere():
            assert [path.name for path in shared_path.iterdir() if path.is_dir()] == ["global_steps_2"]
        manager.close()


@pytest.mark.world(2)
@pytest.mark.parametrize(("precision", "frozen_then"), pairs(("fp32", "bf16"), (True, False)))
def test_another_frozen_layer(frozen_then: bool, precision: Any, shared_path: Path) -> None:
    """A parameter without state must not pass for one that was not stepped yet, nor its state be dropped."""
    trainable = replace(DP2, precision=precision)
    frozen = replace(trainable, frozen=r"decoder\.layers\.1\.")
    saving, loading = (frozen, trainable) if frozen_then else (trainable, frozen)
    with parallel(saving):
        saved = build(saving, seed=1)
        train(saved, 0, 1)
        save(saved, shared_path, 1)
    with parallel(loading):
        training = build(loading, seed=2)
        train(training, 0, 1)
        messages = refused_load(training, shared_path, CheckpointMismatchError)
        assert_names(messages, r"distrib_optim_", r"decoder\.layers\.1\.", "frozen")


@pytest.mark.world(2)
def test_a_checkpoint_without_the_schedule(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        save(replace(training, scheduler=None), shared_path, 1)
        assert_names(refused_load(training, shared_path, CheckpointMismatchError), "LR scheduler")
