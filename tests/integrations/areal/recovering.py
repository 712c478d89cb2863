"""A training with AReaL's loop comes back from its units, or says why not. Run by tests/integrations/test_areal.py."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from areal.utils import logging as areal_logging

from mcore_ckpt import CheckpointConfig
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    HungDiskError,
    UnsupportedError,
)
from mcore_ckpt.integrations.areal import Checkpointer, Evaluator, RecoverHandler, recover, recover_info, recovery_steps
from mcore_ckpt.integrations.areal.recover_info import STEP_FIELDS, Place, Progress
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from tests.distributed.adapters import FROZEN, with_adapters
from tests.distributed.snapshot import assert_same
from tests.distributed.training import Layout
from tests.integrations.areal import simulated
from tests.integrations.areal.children import in_child
from tests.integrations.areal.simulated import STEPS_PER_EPOCH, Engine, Trainer
from tests.support.bridge_peft import BRIDGE
from tests.support.commits import branch_in

# As little as there can be to train: nearly all of these tests train.
LAYOUT = Layout(1, num_layers=1, precision="bf16", global_batch=2)


def trainer_of(
    root: Path,
    seed: int = 1,
    roles: tuple[str, ...] = ("default", "critic"),
    async_save: bool = False,
    saver: dict[str, Any] | None = None,
    keep: int = 1,
    layout: Layout = LAYOUT,
    **recover: Any,
) -> Trainer:
    class Keeping(Trainer):
        steps_to_keep = keep

    engines = {role: Engine(layout, seed + number, async_save) for number, role in enumerate(roles)}
    return Keeping(engines, root, saver or {}, {"mode": "on", "freq_steps": 2, "retries": 0, **recover})


def trained(root: Path, last: int, **config: Any) -> dict[str, Any]:
    """The state after a run up to step `last`, which begins with what is there."""
    trainer = trainer_of(root, **config)
    start = trainer.start_step
    trainer.train(last)
    state = trainer.state()
    trainer.close()
    return {"start": start, "state": state}


def units_of(root: Path) -> Path:
    (folder,) = root.glob("checkpoints/*/exp/trial/recover_info")
    return folder


def complete(root: Path) -> list[int]:
    return [status.step for status in steps.complete_steps(units_of(root))]


def error_of(root: Path, **config: Any) -> CheckpointError:
    """What a start raises."""

    def start() -> CheckpointError:
        with pytest.raises(CheckpointError) as raised:
            trainer_of(root, seed=7, **config)
        return raised.value

    found = in_child(start)
    assert isinstance(found, CheckpointError)
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


_made: dict[str, Any] = {}


def uninterrupted(tmp_path: Path) -> dict[str, Any]:
    """A run of five steps that nothing stopped, made once."""
    if "uninterrupted" not in _made:
        _made["uninterrupted"] = in_child(trained, tmp_path / "reference", 5)
    return _made["uninterrupted"]


@pytest.mark.shows("AReaL", "save", "resume", "async")
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_training_resumes_bit_for_bit(tmp_path: Path, async_save: bool) -> None:
    """Actor and critic, though PPOTrainer hands only its actor to `load`."""
    wanted = uninterrupted(tmp_path)
    in_child(trained, tmp_path / "run", 3, async_save=async_save)
    before = branch_in(units_of(tmp_path / "run") / "global_steps_1" / "critic")
    found = in_child(trained, tmp_path / "run", 5, seed=7, async_save=async_save)
    assert found["start"] == 2
    assert_same(found["state"], wanted["state"])
    # The one before goes when the next is begun: until then nobody asks whether the newest has become complete.
    assert complete(tmp_path / "run") == ([1, 3] if async_save else [3])
    ((first, _),) = branch_in(units_of(tmp_path / "run") / "global_steps_3" / "critic")
    assert first == before[0][0]


@pytest.mark.shows("AReaL", "LoRA")
@pytest.mark.skipif(not BRIDGE.is_dir(), reason=f"no Megatron-Bridge in {BRIDGE}")
def test_adapters_resume_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AReaL itself refuses to save a training with `use_lora`. The base is the same at each start, as if it were filled
    from the model's files."""
    with_adapters(monkeypatch)
    config: dict[str, Any] = {
        "roles": ("default",),
        "layout": replace(LAYOUT, frozen=FROZEN, distributed_optimizer=False),
    }
    wanted = in_child(trained, tmp_path / "reference", 5, **config)
    in_child(trained, tmp_path / "run", 3, **config)
    found = in_child(trained, tmp_path / "run", 5, **config)
    assert found["start"] == 2
    assert_same(found["state"], wanted["state"])
    (file,) = units_of(tmp_path / "run").glob("global_steps_3/default/model/*/model_states.pt")
    assert all(".adapter." in name for name in torch.load(file, weights_only=True))


@pytest.mark.shows("AReaL", "precision-aware")
@pytest.mark.full
def test_areals_switch_for_moments_of_16_bits(tmp_path: Path) -> None:
    """AReaL sets it after OptimizerConfig has decided who keeps the main parameters, so megatron does."""
    layout = replace(LAYOUT, precision_aware=True, moment_dtypes=("bf16", "fp16"))
    wanted = in_child(trained, tmp_path / "reference", 5, layout=layout)
    in_child(trained, tmp_path / "run", 3, layout=layout)
    found = in_child(trained, tmp_path / "run", 5, seed=7, layout=layout)
    assert found["start"] == 2
    assert_same(found["state"], wanted["state"])


def test_what_is_on_disk_after_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_child(trained, tmp_path, 4)
    root = units_of(tmp_path)
    step = root / "global_steps_3"
    assert {path.name for path in step.iterdir()} == {"default", "critic", "recover_info"}
    assert {path.name for path in (step / "recover_info").iterdir()} == {
        "manifest.json",
        "step_info.json",
        "saver_info.json",
        "evaluator_info.json",
        "stats_logger_info.json",
        "checkpoint_info.json",
        "dataloader_info.pt",
    }
    # Where AReaL's documents say to look for the step that was saved last.
    wanted = {"epoch": 0, "epoch_step": 3, "global_step": 3, "steps_per_epoch": STEPS_PER_EPOCH}
    assert json.loads((root / "step_info.json").read_bytes()) == wanted
    assert tracker.read_tracker(root) == 3
    assert main(["verify", str(root), "--deep"]) == 0
    assert main(["prune", str(root), "--max-to-keep", "1"]) == 0
    assert complete(tmp_path) == [3]
    capsys.readouterr()


@pytest.mark.shows("AReaL", "retention")
@pytest.mark.parametrize(
    ("keep", "freq", "last", "wanted"),
    [pytest.param(1, 1, 5, [4], marks=pytest.mark.full, id="one"), pytest.param(2, 2, 7, [3, 5], id="two")],
)
def test_how_many_units_stay(tmp_path: Path, keep: int, freq: int, last: int, wanted: list[int]) -> None:
    in_child(trained, tmp_path, last, keep=keep, freq_steps=freq, roles=("default",))
    assert complete(tmp_path) == wanted


# -- never from the beginning in silence -------------------------------------------------------------------


@pytest.mark.shows("AReaL", "parts")
@pytest.mark.parametrize(
    "name",
    [
        "step_info",
        "saver_info",
        "evaluator_info",
        "stats_logger_info",
        "checkpoint_info",
        "dataloader_info",
        "manifest",
    ],
)
def test_a_bad_recover_info_is_an_error(tmp_path: Path, name: str) -> None:
    """AReaL starts from step 0, and at its next save overwrites the good weights."""
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)
    (path,) = (units_of(base) / "global_steps_1" / "recover_info").glob(f"{name}.*")
    flip(path)
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    error = error_of(base, roles=("default",))
    assert isinstance(error, (CheckpointCorruptError, CheckpointNotFoundError))
    assert str(path) in str(error)
    for file, data in before.items():
        assert file.read_bytes() == data


def test_a_missing_part_is_an_error(tmp_path: Path) -> None:
    for part in ("recover_info", "default"):
        base = tmp_path / part
        shutil.copytree(two_steps(tmp_path), base)
        shutil.rmtree(units_of(base) / "global_steps_1" / part)
        error = error_of(base, roles=("default",))
        assert isinstance(error, CheckpointNotFoundError)
        assert str(units_of(base) / "global_steps_1") in str(error)
        assert part in str(error)


def said_by(module: Any) -> list[str]:
    """What a module of ours logs from now on, though AReaL disables all loggers when it makes another."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    module.logger.addHandler(handler)
    areal_logging.getLogger("of somebody else")
    module.logger.disabled = True
    return told


def two_steps(tmp_path: Path) -> Path:
    """A run of one engine that has saved step 1, made once."""
    if "two_steps" not in _made:
        _made["two_steps"] = tmp_path.parent / "two_steps"
        in_child(trained, _made["two_steps"], 2, roles=("default",))
    return _made["two_steps"]


@pytest.mark.parametrize("damage", ["recover_info", "weights"])
def test_a_damaged_unit_is_passed_over_where_another_is_kept(tmp_path: Path, damage: str) -> None:
    reference = in_child(trained, tmp_path / "reference", 6, keep=2, roles=("default",))
    in_child(trained, tmp_path / "run", 4, keep=2, roles=("default",))
    newest = units_of(tmp_path / "run") / "global_steps_3"
    flip(newest / "recover_info" / "saver_info.json" if damage == "recover_info" else _largest(newest / "default"))
    found = in_child(trained, tmp_path / "run", 6, seed=7, keep=2, roles=("default",))
    assert found["start"] == 2
    assert_same(found["state"], reference["state"])
    # Step 3 was saved again, and nothing is left of the damaged one.
    assert complete(tmp_path / "run") == [3, 5]
    assert main(["verify", str(units_of(tmp_path / "run"))]) == 0


def _largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*.pt")), key=lambda path: path.stat().st_size)


def test_deleting_recover_info_starts_afresh(tmp_path: Path) -> None:
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)
    shutil.rmtree(units_of(base))
    found = in_child(trained, base, 2, roles=("default",))
    assert found["start"] == 0
    assert complete(base) == [1]


def test_a_trainer_that_does_not_load_cannot_save_over_what_is_there(tmp_path: Path) -> None:
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)

    def work() -> str:
        trainer = trainer_of(base, roles=("default",), mode="off")
        assert trainer.recover_info is None
        trainer.recover_handler.config.mode = "on"
        with pytest.raises(CheckpointError, match="call load first") as raised:
            trainer.train(2)
        return str(raised.value)

    assert "step 1" in in_child(work)
    assert complete(base) == [1]


@pytest.mark.parametrize("mode", ["off", "disabled"])
def test_off_neither_loads_nor_saves(tmp_path: Path, mode: str) -> None:
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)
    before = sorted(base.rglob("*"))

    def work() -> tuple[int, list[str]]:
        told = said_by(recover)
        trainer = trainer_of(base, roles=("default",), mode=mode)
        trainer.train(2)
        return trainer.start_step, told

    start, told = in_child(work)
    assert start == 0
    assert any("has step 1, but recover.mode is off" in text for text in told)
    assert sorted(base.rglob("*")) == before


def test_auto_is_on(tmp_path: Path) -> None:
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)
    assert in_child(lambda: trainer_of(base, roles=("default",), mode="auto").start_step) == 2


# -- the optimizer, or not ---------------------------------------------------------------------------------


def test_without_the_optimizer(tmp_path: Path) -> None:
    in_child(trained, tmp_path / "run", 2, roles=("default",), no_save_optim=True)
    unit = units_of(tmp_path / "run") / "global_steps_1" / "default"
    assert read_manifest(unit).contents == ("model", "extra")

    def weights(**config: Any) -> dict[str, Any]:
        trainer = trainer_of(tmp_path / "run", seed=7, roles=("default",), no_save_optim=True, **config)
        return {name: value for name, value in trainer.state().items() if ".chunk" in name}

    wanted = in_child(trained, tmp_path / "reference", 2, roles=("default",))["state"]
    found = in_child(weights, no_load_optim=True)
    assert_same(found, {name: wanted[name] for name in found})
    assert len(found) > 5
    # What is asked for and not there is not left out in silence.
    assert "optimizer" in str(error_of(tmp_path / "run", roles=("default",)))


def test_the_optimizer_is_left_out_of_a_load(tmp_path: Path) -> None:
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)

    def work() -> tuple[int, int]:
        trainer = trainer_of(base, seed=7, roles=("default",), no_load_optim=True)
        return trainer.start_step, trainer.actor.lr_scheduler.num_steps

    assert in_child(work) == (2, 0)


# -- when ----------------------------------------------------------------------------------------------------


def saved_steps(root: Path, last: int, **config: Any) -> list[int]:
    """At which steps a run saves a unit. What it trains has no part in that."""
    simulated.train = lambda *_: []
    trainer = trainer_of(root, roles=("default",), **config)
    found = []
    for step in range(trainer.start_step, last):
        before = trainer.recover_handler.last_step_info.global_step
        trainer.train_step(step)
        after = trainer.recover_handler.last_step_info.global_step
        found += [after] if after != before else []
    return found


def test_any_frequency_fires(tmp_path: Path) -> None:
    assert in_child(saved_steps, tmp_path / "steps", 7, freq_steps=3) == [2, 5]
    assert in_child(saved_steps, tmp_path / "epochs", 7, freq_steps=None, freq_epochs=1) == [STEPS_PER_EPOCH - 1]
    assert in_child(saved_steps, tmp_path / "secs", 2, freq_steps=None, freq_secs=1e-9) == [0, 1]
    assert in_child(saved_steps, tmp_path / "both", 7, freq_steps=3, freq_epochs=1) == [2, 3, 5]


def test_a_changed_frequency_counts_after_a_restart(tmp_path: Path) -> None:
    """AReaL goes on with the frequency that was saved."""
    assert in_child(saved_steps, tmp_path, 4, freq_steps=2) == [1, 3]
    assert in_child(saved_steps, tmp_path, 6, freq_steps=1) == [4, 5]


def test_seconds_in_the_single_controller(tmp_path: Path) -> None:
    """Outside torch.distributed AReaL's timer fails (`FrequencyControl.check`, an unbound local)."""
    from areal.utils.timeutil import EpochStepTimeFreqCtl

    from tests.integrations.areal.contract import recover_config, spec

    with pytest.raises(UnboundLocalError):
        EpochStepTimeFreqCtl(None, None, 100).check(0, 1)
    handler = RecoverHandler(recover_config(tmp_path, mode="on", freq_secs=100), spec())
    assert not handler._schedule.due()


# -- what else there is to AReaL -----------------------------------------------------------------------------


class Recorded:
    """An engine or an inference engine: what is called, in order."""

    def __init__(self, calls: list[tuple[str, ...]]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._calls.append((name, *map(str, args)))


class Meta:
    def __init__(self, version: int = 0) -> None:
        self._version = version

    def with_version(self, version: int) -> Meta:
        return Meta(version)

    def __str__(self) -> str:
        return f"version {self._version}"


def test_rollouts_go_on_with_the_loaded_weights(tmp_path: Path) -> None:
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)

    def work() -> list[tuple[str, ...]]:
        trainer = trainer_of(base, roles=("default",), mode="off")
        trainer.recover_handler.config.mode = "on"
        calls: list[tuple[str, ...]] = []
        for name in ("connect_engine", "update_weights", "set_version"):
            setattr(trainer.actor, name, getattr(Recorded(calls), name))
        parts = (trainer.actor, trainer.saver, trainer.evaluator, trainer.stats_logger, trainer.train_dataloader)
        with pytest.raises(ValueError, match="weight_update_meta"):
            trainer.recover_handler.load(*parts, inference_engine=Recorded(calls))
        trainer.recover_handler.load(*parts, inference_engine=Recorded(calls), weight_update_meta=Meta())
        return [call if call[0] != "connect_engine" else call[::2] for call in calls]

    # Step 1 was saved, and the weights after it are the second version.
    assert in_child(work) == [
        ("connect_engine", "version 2"),
        ("pause",),
        ("update_weights", "version 2"),
        ("resume",),
        ("set_version", "2"),
        ("set_version", "2"),
    ]


def test_an_engine_in_another_process_has_only_a_text_to_tell(tmp_path: Path) -> None:
    """AReaL's controllers raise one type for all errors of workers (EngineCallError)."""
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)

    def work() -> str:
        trainer = trainer_of(base, roles=("default",), mode="off")
        trainer.recover_handler.config.mode = "on"

        def load(meta: Any) -> None:
            raise RuntimeError("worker 3: has a wrong CRC")

        trainer.actor.load = load
        parts = (trainer.actor, trainer.saver, trainer.evaluator, trainer.stats_logger, trainer.train_dataloader)
        with pytest.raises(CheckpointError, match="worker 3: has a wrong CRC") as raised:
            trainer.recover_handler.load(*parts)
        return str(raised.value)

    assert "move global_steps_1 out of" in in_child(work)


def test_the_launchers_of_areal_find_nothing_of_their_own(tmp_path: Path) -> None:
    """They start a run that has failed again whatever this says; it decides on a file of metadata alone."""
    from areal.utils.recover import check_if_recover

    from tests.integrations.areal.contract import recover_config

    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)
    before = sorted(base.rglob("*"))
    assert check_if_recover(recover_config(base, mode="on"), 0) is False
    assert sorted(base.rglob("*")) == before


def saver_counts(root: Path, last: int) -> dict[str, tuple[int, int]]:
    """The epochs and steps that the saver has counted after a run up to step `last`."""
    trainer = trainer_of(root, roles=("default",), saver={"freq_steps": 100})
    trainer.train(last)
    counts = trainer.saver.state_dict()
    trainer.close()
    return {role: (count["epochs"], count["steps"]) for role, count in counts.items()}


def test_a_saver_counts_on(tmp_path: Path) -> None:
    wanted = in_child(saver_counts, tmp_path / "reference", 4)
    assert wanted == {"default": (1, 4)}
    in_child(saver_counts, tmp_path / "run", 2)
    assert in_child(saver_counts, tmp_path / "run", 4) == wanted


def test_an_evaluator_counts_like_the_others(tmp_path: Path) -> None:
    from areal.api.cli_args import EvaluatorConfig

    from tests.integrations.areal.contract import spec

    def evaluated(evaluator: Evaluator, steps: range) -> list[int]:
        found: list[int] = []
        for step in steps:
            evaluator.evaluate(lambda step=step: found.append(step), 0, step % STEPS_PER_EPOCH, step)  # type: ignore[misc]
        return found

    def made(**config: Any) -> Evaluator:
        names = {"experiment_name": "exp", "trial_name": "trial", "fileroot": str(tmp_path)}
        return Evaluator(EvaluatorConfig(**names, **config), spec())

    first = made(freq_steps=3, eval_before_train=True)
    assert evaluated(first, range(3)) == [0, 2]
    resumed = made(freq_steps=2, eval_before_train=True)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    # At the frequency of now, and not before training once more.
    assert evaluated(resumed, range(3, 8)) == [4, 6]


@pytest.mark.parametrize(
    "field", [{"max_to_keep": 1}, {"optimizer_for_last": 1}, {"remote": "memory://x"}, {"roles": ("a",)}]
)
def test_what_is_the_handler_s_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        Checkpointer([], config=CheckpointConfig(**field))


def test_what_may_pass_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)
    read = recover_info.read
    failures = [OSError(5, "Input/output error", "step_info.json")] * 2

    def flaky(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return read(*args)

    monkeypatch.setattr(recover_info, "read", flaky)
    monkeypatch.setattr("mcore_ckpt.recover.RETRY_FIRST_S", 0.001)
    assert in_child(lambda: trainer_of(base, roles=("default",), retries=3).start_step) == 2
    assert "Input/output error" in str(error_of(base, roles=("default",), retries=1))


def progress_at(step: int, dataloader: Any) -> Progress:
    return Progress(dict(zip(STEP_FIELDS, (0, step, step, STEPS_PER_EPOCH), strict=True)), {}, {}, {}, {}, dataloader)


def test_a_position_belongs_to_one_data_parallel_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AReaL's loader counts the samples of its own rank, so other ranks would skip some and repeat others."""
    recovery = recovery_steps.RecoverySteps(tmp_path / "run", 1, 10.0)
    within, ended = {"position": 3}, {"position": 4, "_iterator_finished": True}
    roles = []
    for step, state in ((1, within), (2, ended)):
        progress = progress_at(step, state)
        opened = recovery.open(step, lambda progress=progress: progress, ["default"])
        roles.append(opened.role_dir(recover_info.INFO_ROLE))
        recovery.current = step
    recovery._lock.release()
    own, slices, replicas = Place(0, 1, 0, 1), Place(1, 2, 0, 1), Place(1, 2, 1, 2)
    for place in (own, slices):  # tensor-parallel ranks read the same samples
        assert recover_info.read(roles[0], place).dataloader == within
    assert recover_info.read(roles[1], replicas).dataloader is None  # each loader begins the next epoch
    with pytest.raises(CheckpointMismatchError, match="this training has 2, which would skip"):
        recover_info.read(roles[0], replace(replicas, rank=0))  # it tells the others, which open no more files
    assert recover_info.read(roles[0], replace(replicas, rank=0), begins_anew=True).dataloader is None
    assert "the epoch begins anew" in capsys.readouterr().err


@dataclass(frozen=True)
class Seen:
    """A step of several ranks, as `recover_info` reads it, and the data loaders' files that were opened."""

    role_dir: Path
    values: dict[str, dict[str, Any]]
    opened: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return len(self.values)

    @property
    def manifest(self) -> Any:
        return SimpleNamespace(files=[SimpleNamespace(path=name) for name in self.values])

    def read_values(self, name: str) -> dict[str, Any]:
        self.opened.append(name)
        return self.values[name]


@pytest.mark.parametrize("named", [True, False], ids=["now", "older"])
def test_a_rank_opens_only_the_data_loader_that_is_its_own(tmp_path: Path, named: bool) -> None:
    """Else 1,024 ranks would open up to a million files. Saved by 4 x 2 ranks, the tensor-parallel rank first."""
    places = [(rank, rank // 2) for rank in range(8)]
    values = {
        recover_info.dataloader_file(rank, 8, dp, 4) if named else f"dataloader_info_{rank:05d}.pt": {
            "dataloader": {"position": dp},
            "dp": dp,
            "size": 4,
        }
        for rank, dp in places
    }
    for rank in range(4):  # as many data-parallel ranks
        seen = Seen(tmp_path, values)
        assert recover_info._dataloader(seen, Place(rank, 4, rank, 4), False) == {"position": rank}  # type: ignore[arg-type]
        assert len(seen.opened) == 1 or not named
    seen = Seen(tmp_path, values)
    assert recover_info._dataloader(seen, Place(7, 8, 7, 8), False) is None  # type: ignore[arg-type]
    assert len(seen.opened) <= 1
    with pytest.raises(CheckpointMismatchError, match="saved by other data-parallel ranks"):
        recover_info._dataloader(seen, Place(0, 8, 0, 8), False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shared", "mode"), [(None, 0o700), (True, 0o750)])
def test_whose_the_root_is(tmp_path: Path, shared: bool | None, mode: int) -> None:
    before = os.umask(0o022)
    recovery = recovery_steps.RecoverySteps(tmp_path / "run", 1, 10.0, shared)
    recovery._lock.take(1)
    os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == mode
    recovery._lock.release()


def test_a_disk_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    recovery = recovery_steps.RecoverySteps(tmp_path / "run", 1, timeout_s=1.0)
    monkeypatch.setattr(recovery_steps, "_resumable", lambda *_: (tmp_path / "pipe").read_text())
    with pytest.raises(HungDiskError, match=r"^rank 0: .*pipe: .* has not returned for 1 s"):
        recovery.find(["default"])
    recovery.current = 2
    recovery.delete_old()  # the disk still hangs, which fails no training
    os.close(os.open(tmp_path / "pipe", os.O_RDWR))


def test_a_data_loader_whose_state_is_not_plain_is_told(tmp_path: Path) -> None:
    """AReaL pickles whatever it is."""

    def work() -> str:
        trainer = trainer_of(tmp_path, roles=("default",))
        trainer.train(2)
        state = trainer.train_dataloader.state_dict()
        trainer.train_dataloader.state_dict = lambda: {**state, "sampler": object()}  # type: ignore[method-assign]
        trainer.train_step(2)
        with pytest.raises(UnsupportedError) as raised:
            trainer.train_step(3)
        return str(raised.value)

    assert "dataloader.state_dict()['sampler'] is a builtins.object" in in_child(work)
    assert complete(tmp_path) == [1]


def test_a_first_save_that_never_ended_is_told(tmp_path: Path) -> None:
    """Then alone training starts from the beginning by itself."""
    base = tmp_path / "run"
    shutil.copytree(two_steps(tmp_path), base)
    shutil.rmtree(units_of(base) / "global_steps_1" / "default")
    # Neither is there before a unit is complete.
    for name in ("latest_checkpointed_iteration.txt", "step_info.json"):
        (units_of(base) / name).unlink()

    def work() -> tuple[int, list[str]]:
        told = said_by(recovery_steps)
        return trainer_of(base, roles=("default",)).start_step, told

    start, told = in_child(work)
    assert start == 0
    assert any("no save was ever completed" in text and "not committed by default" in text for text in told)
