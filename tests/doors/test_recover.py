"""Coming back: which step all roles go on from together, and what is said when there is none."""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import (
    AgreementError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    RemoteError,
)
from mcore_ckpt.load.report import LoadReport, LoadResult
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.recover import Recovery, recover, resumable_steps
from mcore_ckpt.steps.node_steps import NodeStep
from mcore_ckpt.steps.remote_steps import RemoteRole, RemoteStep
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from tests.support.checkpoints import alone_in_the_world, make, stage
from tests.support.small_steps import save_small

BOTH = ("actor", "critic")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_ckpt.recover.RETRY_FIRST_S", 0.0)


def make_steps(root: Path, numbers: Iterable[int], roles: Iterable[str] = BOTH) -> None:
    for step in numbers:
        for role in roles:
            make(file_names.step_dir(root, step) / role, step, BOTH)


def cut_manifest(root: Path, step: int, role: str) -> None:
    path = file_names.step_dir(root, step) / role / file_names.MANIFEST_FILE
    path.write_bytes(path.read_bytes()[:-30])


@dataclass
class FakeManager:
    """Loads what `errors` does not name; each of a step's errors is raised once."""

    root: Path
    role: str
    errors: dict[int, list[Exception]] = field(default_factory=dict)
    loaded: list[int | Path] = field(default_factory=list)
    while_loading: Callable[[int], None] | None = None
    agreement: Agreement = field(default_factory=alone_in_the_world)
    load_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    stored: list[int] | RemoteError = field(default_factory=list)
    on_nodes: list[int] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)

    def remote_steps(self, step: int | None, required: bool) -> list[RemoteStep]:
        if isinstance(self.stored, RemoteError):
            if required:
                raise self.stored
            return []
        there = {role: RemoteRole(0, role, BOTH, "0" * 32, "") for role in BOTH}
        return [RemoteStep(number, there) for number in self.stored if step in (None, number)]

    def fast_steps_found(self, roles: Sequence[str], step: int | None) -> tuple[list[NodeStep], list[NodeStep]]:
        def on_nodes(number: int, reason: str | None = None) -> NodeStep:
            return NodeStep.of([number, [[role, None] for role in BOTH], reason])

        whole = [on_nodes(number) for number in self.on_nodes if step in (None, number)]
        return whole, [on_nodes(number, reason) for number, reason in self.lost]

    def _call(self, topic: str) -> AbstractContextManager[None]:
        return self.agreement.call(topic)

    def agree(self, topic: str, request: Record, answer: Callable[[], Record]) -> Record:
        def combine(records: Any) -> Record:
            same_everywhere(records, topic)
            return answer()

        return decide(self.agreement, topic, lambda: request, combine)

    def load(self, *, step: int | None = None, path: Path | None = None) -> LoadResult:
        if path is not None:
            self.loaded.append(path)
            step = int(path.parent.name.rpartition("_")[2]) if path.name == self.role else 0
        else:
            assert step is not None
            self.loaded.append(step)
        if self.while_loading is not None:
            self.while_loading(step)
        if self.errors.get(step):
            raise self.errors[step].pop(0)
        return LoadResult(step, {"of": self.role}, LoadReport(self.root, 0, 0.0, ()))


def managers(root: Path, **errors: dict[int, list[Exception]]) -> tuple[Any, Any]:
    return FakeManager(root, "actor", errors.get("actor", {})), FakeManager(root, "critic", errors.get("critic", {}))


def corrupt(times: int = 9) -> list[Exception]:
    return [CheckpointCorruptError("rank 1: x.pt: wrong CRC") for _ in range(times)]


# -- which steps ------------------------------------------------------------------------------------------------


def test_a_step_counts_if_all_its_parts_and_all_roles_are_there(tmp_path: Path) -> None:
    make_steps(tmp_path, [1, 2, 3])
    make_steps(tmp_path, [4], ["actor"])
    make(file_names.step_dir(tmp_path, 5) / "actor", 5, ["actor"])
    cut_manifest(tmp_path, 2, "critic")
    assert [status.step for status in resumable_steps(tmp_path, BOTH)] == [3, 1]
    assert [status.step for status in resumable_steps(tmp_path, ["actor"])] == [5, 3, 1]
    assert [status.step for status in resumable_steps(tmp_path, BOTH, step=1)] == [1]


@pytest.mark.parametrize("there", ["nothing", "no root", "a save that never ended", "an empty step", "other files"])
def test_where_there_never_was_a_checkpoint_training_begins(tmp_path: Path, there: str) -> None:
    root = tmp_path / "root"
    if there != "no root":
        root.mkdir()
    if there == "a save that never ended":
        stage(file_names.step_dir(root, 1) / "actor", 1)
    elif there == "an empty step":
        file_names.step_dir(root, 1).mkdir()
    elif there == "other files":
        (root / "log.txt").touch()
        (root / "tensorboard").mkdir()
    assert resumable_steps(root, BOTH) == []
    assert recover(managers(root)) == Recovery()


def a_role_is_missing(root: Path) -> str:
    make_steps(root, [1], ["actor"])
    return "global_steps_1: not committed by critic"


def a_manifest_is_damaged(root: Path) -> str:
    make_steps(root, [1])
    cut_manifest(root, 1, "critic")
    return r"global_steps_1/critic/manifest.json: not JSON"


def a_role_was_never_declared(root: Path) -> str:
    make(file_names.step_dir(root, 1) / "actor", 1, ["actor"])
    return "global_steps_1: complete, but without critic"


def they_are_of_another_program(root: Path) -> str:
    (root / "global_step_1" / "actor").mkdir(parents=True)
    return "global_step_1: no manifest of mcore_ckpt in it"


def the_step_is_a_link_to_nothing(root: Path) -> str:
    """As a run has that was forked off another one, which has pruned the step since."""
    file_names.step_dir(root, 1000).symlink_to("../before/global_steps_1000")
    return r"global_steps_1000 \(a link to ../before/global_steps_1000\): cannot be read"


def only_the_tracker_is_there(root: Path) -> str:
    (root / file_names.TRACKER_FILE).write_text("100")
    return "latest_checkpointed_iteration.txt: exists, but there is no step"


@pytest.mark.parametrize(
    "what",
    [
        a_role_is_missing,
        a_manifest_is_damaged,
        a_role_was_never_declared,
        they_are_of_another_program,
        the_step_is_a_link_to_nothing,
        only_the_tracker_is_there,
    ],
)
def test_checkpoints_that_cannot_be_used_never_mean_the_beginning(tmp_path: Path, what: Callable[[Path], str]) -> None:
    reason = what(tmp_path)
    both = managers(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=reason) as raised:
        recover(both)
    assert "resume='off'" in str(raised.value)
    assert both[0].loaded == both[1].loaded == []
    assert recover(both, "off") == Recovery()


def test_a_root_that_is_not_mounted_is_not_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    with pytest.raises(CheckpointNotFoundError, match=r"a link to .*disk, which does not exist"):
        resumable_steps(tmp_path / "root", BOTH)
    (tmp_path / "disk").mkdir()
    assert resumable_steps(tmp_path / "root", BOTH) == []


def test_all_steps_are_listed_with_their_reasons(tmp_path: Path) -> None:
    make_steps(tmp_path, [1, 2], ["actor"])
    make_steps(tmp_path, [3], ["critic"])
    with pytest.raises(CheckpointNotFoundError) as raised:
        resumable_steps(tmp_path, BOTH)
    assert [line.rpartition("/")[2] for line in str(raised.value).splitlines()[1:]] == [
        "global_steps_3: not committed by actor",
        "global_steps_2: not committed by critic",
        "global_steps_1: not committed by critic",
    ]


def test_a_step_of_the_root_is_not_said_to_be_loaded_if_the_store_has_a_newer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_steps(tmp_path, [1, 2])
    (tmp_path / file_names.TRACKER_FILE).write_text("3")
    assert recover([FakeManager(tmp_path, "actor", stored=[3])]).step == 3  # type: ignore[list-item]
    assert not caplog.text


def test_a_tracker_that_lies_does_not_lead_astray(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_steps(tmp_path, [1, 2])
    (tmp_path / file_names.TRACKER_FILE).write_text("1")
    assert recover(managers(tmp_path)).step == 2
    assert "names step 1, but the newest complete step is 2" in caplog.text


def test_steps_without_an_optimizer_come_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_small(tmp_path, step)
    strip = PreservationPolicy(optimizer_for_last=1)
    delete_old_steps(tmp_path, strip)
    assert [status.step for status in resumable_steps(tmp_path, ["actor"])] == [3]
    shutil.rmtree(file_names.step_dir(tmp_path, 3))
    assert [status.step for status in resumable_steps(tmp_path, ["actor"])] == [2, 1]
    assert [status.step for status in resumable_steps(tmp_path, ["actor"], 1)] == [1]
    save_small(tmp_path, 1)
    actor: Any = FakeManager(tmp_path, "actor")
    recovery = recover([actor])
    assert recovery.step == 1
    (skipped,) = recovery.skipped
    assert "global_steps_2: complete, but retention has removed its optimizer, which only the newest" in skipped
    actor.load_contents = ("model", "extra")
    assert recover([actor]).step == 2


# -- together ---------------------------------------------------------------------------------------------------


def test_all_roles_load_the_newest(tmp_path: Path) -> None:
    make_steps(tmp_path, [1, 2])
    actor, critic = managers(tmp_path)
    recovery = recover([actor, critic])
    assert (recovery.step, recovery.skipped) == (2, ())
    assert {role: result.extra_state for role, result in recovery.results.items()} == {
        role: {"of": role} for role in BOTH
    }
    assert actor.loaded == critic.loaded == [2]


@pytest.mark.parametrize("error", [CheckpointCorruptError("x.pt: bad"), CheckpointNotFoundError("gone")])
@pytest.mark.parametrize("role", BOTH)
def test_if_one_role_s_part_is_bad_all_go_back_together(tmp_path: Path, role: str, error: CheckpointError) -> None:
    make_steps(tmp_path, [1, 2, 3])
    actor, critic = managers(tmp_path, **{role: {3: [error], 2: [error]}})
    recovery = recover([actor, critic])
    assert recovery.step == 1
    assert actor.loaded == [3, 2, 1]
    assert critic.loaded == ([1] if role == "actor" else [3, 2, 1])
    assert [result.step for result in recovery.results.values()] == [1, 1]
    assert len(recovery.skipped) == 2
    assert recovery.skipped[0].startswith(f"{role}: {error}")


def test_nothing_can_be_loaded(tmp_path: Path) -> None:
    make_steps(tmp_path, [1, 2])
    with pytest.raises(CheckpointCorruptError) as raised:
        recover(managers(tmp_path, actor={1: corrupt()}, critic={2: corrupt()}))
    assert "may now be of several steps" in str(raised.value)
    assert "tried: critic: rank 1: x.pt: wrong CRC. Already loaded: actor" in str(raised.value)
    assert "tried: actor: rank 1: x.pt: wrong CRC" in str(raised.value)


def test_one_that_does_not_fit_ends_it(tmp_path: Path) -> None:
    """The older ones are of the same model: going back would lose steps, and then fail all the same."""
    make_steps(tmp_path, [1, 2])
    actor, critic = managers(tmp_path, critic={2: [CheckpointMismatchError("other heads")]})
    with pytest.raises(CheckpointMismatchError, match=r"critic: other heads\. Already loaded: actor"):
        recover([actor, critic])
    assert (actor.loaded, critic.loaded) == ([2], [2])


def test_what_passes_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_steps(tmp_path, [1, 2])
    actor, critic = managers(
        tmp_path, actor={2: [AgreementError("rank 1 is late")]}, critic={2: [OSError("stale file handle")]}
    )
    assert recover([actor, critic]).step == 2
    assert (actor.loaded, critic.loaded) == ([2, 2], [2, 2])
    assert caplog.text.count("trying again") == 2


def test_what_does_not_pass_is_raised_and_no_older_step_is_taken(tmp_path: Path) -> None:
    """A rank that is dead is not a reason to lose steps."""
    make_steps(tmp_path, [1, 2])
    actor, critic = managers(tmp_path, actor={2: [AgreementError("rank 1 is dead")] * 9})
    with pytest.raises(AgreementError, match="actor: rank 1 is dead"):
        recover([actor, critic], retries=2)
    assert actor.loaded == [2, 2, 2]


def test_a_root_that_cannot_be_read_is_tried_again_and_never_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_steps(tmp_path, [1])
    failures = [OSError("Input/output error")] * 2
    step_dirs_among = file_names.step_dirs_among

    def failing(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return step_dirs_among(*arguments)

    monkeypatch.setattr(file_names, "step_dirs_among", failing)
    with pytest.raises(AgreementError, match="Input/output error"):
        recover(managers(tmp_path))
    assert recover(managers(tmp_path)).step == 1


def test_retention_leaves_the_step_until_all_roles_have_it(tmp_path: Path) -> None:
    make_steps(tmp_path, [1])
    actor, critic = managers(tmp_path)

    def others_save(step: int) -> None:
        make_steps(tmp_path, [2])
        assert delete_old_steps(tmp_path, PreservationPolicy(1)) == []

    actor.while_loading = others_save
    assert recover([actor, critic]).step == 1
    assert delete_old_steps(tmp_path, PreservationPolicy(1)) == [1]


# -- what is asked for ------------------------------------------------------------------------------------------


def test_a_step_that_is_asked_for_and_no_other(tmp_path: Path) -> None:
    make_steps(tmp_path, [1, 2, 3])
    assert recover(managers(tmp_path), 2).step == 2
    with pytest.raises(CheckpointCorruptError, match="wrong CRC"):
        recover(managers(tmp_path, critic={2: corrupt()}), 2)
    with pytest.raises(CheckpointNotFoundError, match="there is no step 7"):
        recover(managers(tmp_path), 7)
    make_steps(tmp_path, [8], ["actor"])
    with pytest.raises(CheckpointNotFoundError, match="not committed by critic"):
        recover(managers(tmp_path), 8)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_that_is_asked_for(tmp_path: Path, kind: type) -> None:
    make_steps(tmp_path / "old", [1, 2])
    folder = file_names.step_dir(tmp_path / "old", 1)
    actor, critic = managers(tmp_path / "new")
    assert recover([actor, critic], kind(folder)).step == 1
    assert (actor.loaded, critic.loaded) == ([folder / "actor"], [folder / "critic"])
    for path in (folder, folder / "critic"):
        _, critic = managers(tmp_path / "new")
        assert recover([critic], kind(path)).step == 1
        assert critic.loaded == [folder / "critic"]


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    actor, critic = managers(tmp_path)
    elsewhere = FakeManager(tmp_path / "other", "critic")
    for wrong in ([], [actor, actor], [actor, elsewhere]):
        with pytest.raises(ValueError, match="managers"):
            recover(wrong)
    with pytest.raises(ValueError, match="resume is True"):
        recover([actor, critic], True)


def test_a_restart_is_told_what_it_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    make_steps(tmp_path, [1, 2])
    recover(managers(tmp_path, actor={2: corrupt()}))
    assert "step 2 cannot be loaded, taking the next older one: actor: rank 1: x.pt: wrong CRC" in caplog.text
    caplog.clear()
    with pytest.raises(CheckpointCorruptError, match=r"(?s)tried: .*\n  tried: "):
        recover(managers(tmp_path, actor={1: corrupt(), 2: corrupt()}))
    assert caplog.text.count("taking the next older one") == 1


# -- a remote store -------------------------------------------------------------------------------------------


def test_steps_that_only_the_store_has_are_resumed_from(tmp_path: Path) -> None:
    """A new machine, with an empty disk."""
    both = managers(tmp_path)
    both[0].stored = [10, 20]
    assert recover(both).step == 20
    assert [manager.loaded for manager in both] == [[20], [20]]
    assert recover(both, 10).step == 10


def test_the_newest_is_taken_wherever_it_is(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        make(file_names.step_dir(tmp_path, 15) / role, 1, ("actor", "critic"))
    both = managers(tmp_path, actor={20: corrupt()})
    both[0].stored = [10, 20]
    recovery = recover(both)
    assert recovery.step == 15
    assert both[0].loaded == [20, 15]


def test_a_store_that_does_not_answer_is_never_the_beginning(tmp_path: Path) -> None:
    both = managers(tmp_path)
    both[0].stored = RemoteError("s3://bucket: does not answer")
    with pytest.raises(RemoteError, match="does not answer"):
        recover(both)
    for role in ("actor", "critic"):
        make(file_names.step_dir(tmp_path, 15) / role, 1, ("actor", "critic"))
    assert recover(both).step == 15
