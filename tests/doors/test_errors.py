"""What public calls raise derives from CheckpointError, and `~` means the home folder."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import CheckpointConfig, CheckpointManager, errors
from mcore_ckpt.errors import (
    AgreementError,
    CheckpointCorruptError,
    CheckpointError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
)
from mcore_ckpt.recover import recover, resumable_steps, retried
from mcore_ckpt.schedule import Frequency, RoleSchedules, Schedule


class Model(torch.nn.Module):
    """As much of a megatron model as saving looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.rand(4, 4))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        value = self.weight
        place = {"prepend_axis_num": 0, "global_offset": (0, 0), "replica_id": (0, 0, 0)}
        shapes = {"local_shape": value.shape, "global_shape": value.shape}
        return {"weight": SimpleNamespace(data=value, key="weight", **place, **shapes)}


def manager_of(root: Any, **choices: Any) -> CheckpointManager:
    config = CheckpointConfig(save_contents=("model",), load_contents=("model",), **choices)
    return CheckpointManager(root, Model(), config=config)


def closed(root: Path) -> CheckpointManager:
    manager = manager_of(root)
    manager.close()
    return manager


CALLS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "config": (lambda root: CheckpointConfig(max_to_keep=0), ValueError),
    "listeners": (lambda root: CheckpointConfig(listeners=("tensorboard",)), TypeError),  # type: ignore[arg-type]
    "model": (lambda root: CheckpointManager(root, object()), TypeError),
    "no model": (lambda root: CheckpointManager(root, []), TypeError),
    "role": (lambda root: CheckpointManager(root, Model(), role="a/b"), ValueError),
    "hf_config": (
        lambda root: CheckpointManager(root, Model(), config=CheckpointConfig(save_contents=("hf_model",))),
        ValueError,
    ),
    "no optimizer": (lambda root: CheckpointManager(root, Model()).save(1), ValueError),
    "remote": (lambda root: manager_of(root, remote="no-url"), ValueError),
    "step": (lambda root: manager_of(root).save(-1), ValueError),
    "extra_state": (lambda root: manager_of(root).save(1, extra_state=[1]), TypeError),  # type: ignore[arg-type]
    "save path": (lambda root: manager_of(root).save(1, path=root), ValueError),
    "max_to_keep": (lambda root: manager_of(root).save(1, max_to_keep=0), ValueError),
    "roles": (lambda root: manager_of(root).save(1, roles=["a/b"]), ValueError),
    "step and path": (lambda root: manager_of(root).load(step=1, path=root), ValueError),
    "verify": (lambda root: manager_of(root).load(verify="perhaps"), ValueError),
    "no checkpoint": (lambda root: manager_of(root).load(), CheckpointError),
    "closed, save": (lambda root: closed(root).save(1), ValueError),
    "closed, load": (lambda root: closed(root).load(), ValueError),
    "closed, wait": (lambda root: closed(root).wait(), ValueError),
    "recover nothing": (lambda root: recover([]), ValueError),
    "recover twice": (lambda root: recover([manager_of(root), manager_of(root)]), ValueError),
    "resume": (lambda root: recover(manager_of(root), True), ValueError),
    "resume path": (lambda root: recover(manager_of(root), root / "none"), CheckpointError),
    "resumable_steps": (lambda root: resumable_steps(root, ["actor"], step=3), CheckpointError),
    "frequency": (lambda root: Frequency(steps=0), ValueError),
    "seconds": (lambda root: Frequency(secs=-1.0), ValueError),
    "schedule": (lambda root: Schedule(Frequency()).load_state_dict({}), ValueError),
    "role schedules": (lambda root: RoleSchedules(Frequency()).load_state_dict({"actor": 1}), ValueError),
    "pin": (lambda root: mcore_ckpt.pin(root, 1), CheckpointError),
    "unpin": (lambda root: mcore_ckpt.unpin(root, 1), CheckpointError),
    "pin nothing": (lambda root: mcore_ckpt.pin("", 1), ValueError),
    "pin a path": (lambda root: mcore_ckpt.pin(root, None), ValueError),  # type: ignore[arg-type]
    "no home": (lambda root: CheckpointManager("~no such user/x", Model()), ValueError),
    "a save to no home": (lambda root: manager_of(root).save(1, path="~no such user/x"), ValueError),
    "a huge step": (lambda root: manager_of(root).save(10**400), ValueError),
    "roles as text": (lambda root: resumable_steps(root, "actor"), ValueError),
    "a config that is a dict": (lambda root: CheckpointManager(root, Model(), config={}), TypeError),  # type: ignore[arg-type]
    "lr_scheduler": (lambda root: CheckpointManager(root, Model(), lr_scheduler=3), TypeError),
    "an hf_config that is a path": (lambda root: CheckpointManager(root, Model(), hf_config="/model"), TypeError),
    "processing_class": (lambda root: CheckpointManager(root, Model(), processing_class="/model"), TypeError),
    "load_hf": (lambda root: mcore_ckpt.load_hf(Model(), root, source="both"), ValueError),
    "load_hf strict_model": (lambda root: mcore_ckpt.load_hf(Model(), root, strict_model="False"), ValueError),  # type: ignore[arg-type]
    "load_hf timeout_s": (lambda root: mcore_ckpt.load_hf(Model(), root, timeout_s="60"), ValueError),  # type: ignore[arg-type]
    "load_hf ignore": (lambda root: mcore_ckpt.load_hf(Model(), root, ignore=None), ValueError),  # type: ignore[arg-type]
    "load_hf path": (lambda root: mcore_ckpt.load_hf(Model(), None), TypeError),  # type: ignore[arg-type]
    "load_hf base": (lambda root: mcore_ckpt.load_hf(Model(), root, base=3), TypeError),  # type: ignore[arg-type]
    "load_hf URL": (lambda root: mcore_ckpt.load_hf(Model(), "s3://bucket/x"), ValueError),
    "load_hf optimizer": (lambda root: mcore_ckpt.load_hf(Model(), root, optimizer=3), CheckpointError),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_error_of_a_public_call_is_a_checkpoint_error(name: str, tmp_path: Path) -> None:
    call, built_in = CALLS[name]
    with pytest.raises(built_in) as caught:
        call(tmp_path)
    assert isinstance(caught.value, CheckpointError), repr(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1 << 2039, r"extra_state\['seen'\] is an int of 2040 bits"),
        ([{tuple(range(64)): 1}], r"a key of extra_state\['seen'\]\[0\] is a .*tuple, which readers do not accept"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), r"extra_state\['seen'\] is a .*torch\.bits8"),
    ],
    ids=["int", "key", "bits"],
)
def test_what_readers_refuse_is_refused_by_field_before_a_save_returns(value: Any, words: str, tmp_path: Path) -> None:
    """Later, in the background, nobody would know the field any more, and the save would be lost."""
    config = CheckpointConfig(save_contents=("model", "extra"), load_contents=("model", "extra"), async_save=True)
    manager = CheckpointManager(tmp_path, Model(), config=config)
    with pytest.raises(UnsupportedError, match=words):
        manager.save(1, extra_state={"seen": value})
    assert not list(tmp_path.glob("global_steps_*"))
    manager.save(1, extra_state={"seen": 3}).wait()
    assert manager.load().extra_state == {"seen": 3}
    manager.close()


def test_every_error_is_documented_and_travels_between_ranks() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CheckpointError)]
    for kind in kinds:
        assert kind is CheckpointError or kind.__name__ in (errors.__doc__ or "")
        assert type(errors.from_record(errors.to_record(kind("x"), 3), CheckpointError)) is kind


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (AgreementError("rank 1 is late"), True),
        (OSError(5, "Input/output error"), True),
        (PermissionError(13, "Permission denied"), False),
        (RuntimeError("unsupported operation: more than one element of the written-to tensor"), False),
        (CheckpointCorruptError("x"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_ckpt.recover.RETRY_FIRST_S", 0.0)
    told = errors.from_record(errors.to_record(error, 3), AgreementError)
    assert (errors.may_pass(error), told.may_pass) == (passes, passes)
    assert errors.reworded(told, "y").may_pass is passes
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise told

    with nullcontext() if passes else pytest.raises(type(told)):
        retried(work, 1)
    assert len(calls) == (2 if passes else 1)


def test_the_built_in_counterparts() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(InvalidTypeError, TypeError)
    assert issubclass(errors.InvalidStateError, RuntimeError)


# -- the home folder ----------------------------------------------------------------------------------------------


def test_a_load_by_path_says_what_is_there_instead(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "root")
    manager.save(1).wait()
    for name, file in (("hf", "model.safetensors"), ("old/mp_rank_00", "model_optim_rng.pt")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).touch()
    (tmp_path / "hf" / "config.json").touch()
    (tmp_path / "dangling").symlink_to("/not/mounted")
    for path, words in {
        "root": "is a folder of steps",
        "root/global_steps_1": "is the folder of a step: name the folder of a role in it",
        "hf": "is a HuggingFace model: load it with load_hf",
        "hf/config.json": "is a file",
        "old": "legacy format",
        "nowhere": "this folder does not exist",
        "dangling": "a link to /not/mounted, which does not exist",
    }.items():
        with pytest.raises(errors.CheckpointNotFoundError, match=words):
            manager.load(path=tmp_path / path)
    (tmp_path / "root" / "global_steps_1").rename(tmp_path / "best")
    assert manager.load(path=tmp_path / "best" / "actor").step == 1
    assert recover(manager, tmp_path / "best").step == 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    return home


def test_a_tilde_is_the_home_folder(home: Path) -> None:
    manager = manager_of("~/steps", remote="file://~/remote", async_save=True)
    handle = manager.save(1)
    assert handle.wait().path == home / "steps/global_steps_1/actor"
    assert manager.save(2, path="~/apart/actor").wait().path == home / "apart/actor"
    assert manager.load(path="~/apart/actor").step == 2
    assert recover(manager, "~/steps/global_steps_1").step == 1
    assert [status.step for status in resumable_steps("~/steps", ["actor"])] == [1]
    manager.close()
    assert (home / "remote").is_dir()
    assert not list(Path.cwd().iterdir()), "nothing is called ~"
