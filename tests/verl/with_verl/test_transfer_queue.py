"""verl's asynchronous trainer with its real TransferQueue: what the driver writes beside a step is a part of it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CommitError, HungDiskError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.verl import DriverRole
from mcore_ckpt.ranks import single_process_agreement
from mcore_ckpt.steps import commit_role
from mcore_ckpt.steps import listing as steps
from tests.verl.async_run import BATCH, PROMPTS, STEPS, AsyncRun

ROLES = ("actor", "driver")
KEEP_ALL = ("trainer.max_actor_ckpt_to_keep=null",)


def complete(root: Path) -> dict[int, tuple[str, ...]]:
    return {status.step: tuple(sorted(status.committed)) for status in steps.complete_steps(root)}


def points(changes: int, sample: int | None) -> Sequence[int]:
    """All points at which a save can be killed, or the last one and so many others."""
    return range(changes) if sample is None else [changes - 1 - k * changes // (sample + 1) for k in range(sample + 1)]


def check_goes_on(run: AsyncRun, *steps: int) -> None:
    """The run goes on from one of these steps, and each prompt has been trained once when it ends."""
    assert run.start() == 0, run.log
    assert run.resumed_from in steps, run.log
    assert run.counts == [1] * PROMPTS, (run.resumed_from, run.counts)


@pytest.mark.shows("verl", "save", "resume", "parts")
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(
    ("watched", "sample"),
    [
        pytest.param(3, 2, id="sample"),
        pytest.param(3, None, id="all", marks=pytest.mark.full),
        pytest.param(1, 12, id="the first save", marks=pytest.mark.full),
    ],
)
def test_prompts_in_flight_survive_a_kill(tmp_path: Path, async_save: bool, watched: int, sample: int | None) -> None:
    whole = AsyncRun(tmp_path / "whole", tmp_path / "root", async_save=async_save, watched=watched, more=KEEP_ALL)
    assert whole.start() == 0, whole.log
    assert whole.counts == [1] * PROMPTS
    for point in points(whole.changes, sample):
        killed = replace(whole, folder=tmp_path / f"killed{point}", root=tmp_path / f"root{point}", killed_at=point)
        # Other threads change the disk, too, so one save has a few changes more than another.
        assert killed.start() == -9 or killed.changes <= point, (point, killed.log)
        resumed = replace(killed, folder=tmp_path / f"resumed{point}", killed_at=None)
        ended = [] if not (killed.folder / "counts").exists() else [STEPS]
        check_goes_on(resumed, watched - 1, watched, *ended)
        if resumed.resumed_from not in (0, STEPS):
            queued = range(resumed.resumed_from * BATCH, min(PROMPTS, resumed.resumed_from * BATCH + 2 * BATCH))
            assert resumed.reissued == list(queued)
        assert complete(resumed.root) == dict.fromkeys(range(1, STEPS + 1), ROLES)


@pytest.mark.shows("verl", "resume", "parts")
@pytest.mark.parametrize(
    ("async_save", "sample"),
    [
        pytest.param(True, 0, id="async"),
        pytest.param(False, 12, id="more", marks=pytest.mark.full),
        pytest.param(True, 12, id="more async", marks=pytest.mark.full),
    ],
)
def test_a_step_that_is_saved_again_after_a_rollback(tmp_path: Path, async_save: bool, sample: int | None) -> None:
    """The driver's role of the branch that was given up does not complete the new step, nor the other way round."""

    def begun(name: str) -> AsyncRun:
        first = AsyncRun(tmp_path / name, tmp_path / f"{name}_root", async_save=async_save, stops_at=4, more=KEEP_ALL)
        assert first.start() == 0, first.log
        back = ("resume_path", str(first.root / "global_step_2"))
        return replace(first, folder=tmp_path / f"{name}_back", resume=back, stops_at=3)

    whole = begun("whole")
    assert whole.start() == 0, whole.log
    assert find_latest_ckpt_path(str(whole.root)) == str(whole.root / "global_step_3")
    for point in points(whole.changes, sample):
        killed = replace(begun(f"killed{point}"), killed_at=point)
        assert killed.start() == -9 or async_save, (point, killed.log)
        resumed = replace(
            killed, folder=tmp_path / f"resumed{point}", killed_at=None, resume=("auto", None), stops_at=STEPS
        )
        check_goes_on(resumed, 2, 3, 4)
        # If the tracker still names step 4, the half of step 3 that was saved again stays a half.
        half = {3} if resumed.resumed_from == 4 else set()
        assert {1, 2, *range(3, STEPS + 1)} - half <= complete(resumed.root).keys()


@pytest.mark.shows("verl", "moving over", "parts")
def test_steps_without_the_role_go_on_with_it_and_back(tmp_path: Path) -> None:
    before = AsyncRun(tmp_path / "before", tmp_path / "root", stops_at=3, callback=None)
    assert before.start() == 0, before.log
    assert complete(before.root) == {2: ("actor",), 3: ("actor",)}
    with_role = replace(before, folder=tmp_path / "with", callback=AsyncRun.callback, stops_at=5)
    assert with_role.start() == 0, with_role.log
    assert with_role.resumed_from == 3
    assert complete(before.root) == {4: ROLES, 5: ROLES}
    check_goes_on(replace(before, folder=tmp_path / "after", stops_at=STEPS), 5)


def test_what_is_committed_is_put_back(tmp_path: Path) -> None:
    first = AsyncRun(tmp_path / "first", tmp_path / "root", stops_at=3)
    assert first.start() == 0, first.log
    step = first.root / "global_step_3"
    # As after a power loss, or a save of the same step that got no further.
    (step / "data.pt").write_bytes(b"")
    controller = step / "transfer_queue/controller_state.pkl"
    assert controller.samefile(step / "driver/transfer_queue/controller_state.pkl")
    controller.unlink()
    check_goes_on(replace(first, folder=tmp_path / "resumed", stops_at=STEPS), 3)


def test_damage_sends_the_run_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = AsyncRun(tmp_path / "first", tmp_path / "root", stops_at=3)
    assert first.start() == 0, first.log
    queued = first.root / "global_step_3/driver/transfer_queue/controller_state.pkl"
    with queued.open("r+b") as file:
        file.write(b"\xff")
    assert main(["verify", str(first.root)]) == 1
    assert "transfer_queue/controller_state.pkl" in capsys.readouterr().out
    damaged = replace(first, folder=tmp_path / "damaged")
    assert damaged.start() == 1
    assert "controller_state.pkl" in damaged.log
    assert "the newest complete step is 2" in damaged.log
    check_goes_on(replace(first, folder=tmp_path / "resumed", stops_at=STEPS), 2)


def test_the_workers_learn_the_roles(tmp_path: Path) -> None:
    config = AsyncRun(tmp_path, tmp_path / "root").config()
    options = config.actor_rollout_ref.actor.checkpoint
    DriverRole(config)
    assert options.roles == ["actor", "driver"]
    config.critic.enable = True
    config.critic.checkpoint = {"_target_": options._target_}
    options.roles = ["actor", "critic", "reference"]
    DriverRole(config)
    assert options.roles == config.critic.checkpoint.roles == ["actor", "critic", "reference", "driver"]


def test_engines_that_the_environment_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "mcore_ckpt")
    stock = "actor_rollout_ref.actor.checkpoint._target_=verl.workers.config.McoreCheckpointConfig"
    config = AsyncRun(tmp_path, tmp_path / "root", more=(stock,)).config()
    DriverRole(config)
    assert config.actor_rollout_ref.actor.checkpoint._target_ == "mcore_ckpt.integrations.verl.McoreCkptConfig"


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("trainer.default_hdfs_dir=/copies", UnsupportedError, "default_hdfs_dir out"),
        ("actor_rollout_ref.actor.checkpoint.remote=file:///copies", UnsupportedError, "leave remote"),
        ("actor_rollout_ref.actor.checkpoint.fast.folder=/dev/shm", UnsupportedError, "leave fast out"),
        (
            "actor_rollout_ref.actor.checkpoint._target_=verl.workers.config.McoreCheckpointConfig",
            InvalidArgumentError,
            "is not saved by mcore_ckpt",
        ),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, error: type[Exception], message: str
) -> None:
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    with pytest.raises(error, match=message):
        DriverRole(AsyncRun(tmp_path, tmp_path / "root", more=(option,)).config())


@pytest.mark.parametrize("async_save", [False, True])
def test_the_driver_is_last_and_deletes_old_steps(tmp_path: Path, async_save: bool) -> None:
    run = AsyncRun(tmp_path / "run", tmp_path / "root", stops_at=4, async_save=async_save)
    assert run.start() == 0, run.log
    assert complete(run.root) == {3: ROLES, 4: ROLES}
    assert {path.name for path in run.root.glob("global*")} == {"global_step_3", "global_step_4"}
    actor, driver = (read_manifest(run.root / "global_step_4" / role) for role in ROLES)
    assert (actor.run, actor.commit) == (driver.run, driver.commit)
    if not async_save:
        assert main(["branch", str(run.root), "4", str(tmp_path / "fork")]) == 0
        check_goes_on(replace(run, folder=tmp_path / "forked", root=tmp_path / "fork", stops_at=STEPS), 4)


@pytest.mark.parametrize("async_save", [False, True])
def test_workers_that_do_not_commit(tmp_path: Path, async_save: bool) -> None:
    """The driver gives up when the next save has begun, or after `timeout_s`. Then the step is not complete."""
    config = AsyncRun(tmp_path, tmp_path / "root", more=("actor_rollout_ref.actor.checkpoint.timeout_s=0.5",)).config()
    callback, step_path = DriverRole(config), tmp_path / "root/global_step_1"
    step_path.mkdir(parents=True)
    trainer = SimpleNamespace(total_training_steps=9)
    save = partial(callback.on_save, trainer=trainer, checkpoint_dir=str(step_path), async_save=async_save)
    if async_save:
        save(global_step=1)
    with pytest.raises(CommitError, match="not committed by actor: look at the workers' log"):
        save(global_step=1)
    assert complete(tmp_path / "root") == {}


def test_workers_that_commit_while_the_driver_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They commit, and begin the next save, after the driver has listed the step and before it has judged the list."""
    callback, step_path = DriverRole(AsyncRun(tmp_path, tmp_path / "root").config()), tmp_path / "root/global_step_1"
    step_path.mkdir(parents=True)

    def look_early(path: Path) -> steps.StepStatus:
        before = steps.step_status(path)
        if not callback._next_save.is_set():
            agreement = single_process_agreement("actor", 20.0)
            commit_role(agreement, path / "actor", 1, ROLES, lambda files: files.write("weights", b"w"))
            callback._next_save.set()
        return before

    monkeypatch.setattr("mcore_ckpt.integrations.verl.driver_role.step_status", look_early)
    assert callback._await_workers(step_path).role == "actor"


def test_a_disk_that_hangs_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    config = AsyncRun(tmp_path, tmp_path / "root", more=("actor_rollout_ref.actor.checkpoint.timeout_s=0.5",)).config()
    callback, trainer = DriverRole(config), SimpleNamespace(total_training_steps=9)
    monkeypatch.setattr("mcore_ckpt.integrations.verl.driver_role.step_status", lambda path: pipe.read_bytes())
    with pytest.raises(HungDiskError, match="pipe"):
        callback.on_save(trainer, 1, str(tmp_path / "root/global_step_1"))
    pipe.open("wb").close()  # the disk answers again
