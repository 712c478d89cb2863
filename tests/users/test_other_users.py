"""What other users of the machine can read, put in the way, or share."""

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointConfig, CheckpointManager, HandOver
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.config import FastTier
from mcore_ckpt.errors import CommitError, InvalidArgumentError, LockedError
from mcore_ckpt.io.access import mode_below, top_mode
from mcore_ckpt.steps import leftovers
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.steps.trainer_lock import ToolLocks, TrainerLock
from tests.support.other_users import ALICE, BOB, MALLORY, STRANGERS, TEAM, common_place, run_as
from tests.support.unsharded_model import sharded_state_dict

ROLE = "actor"
DEAD = b'{"host": "gone", "pid": 1, "start": 1}'

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Model(torch.nn.Module):
    """As much of a megatron model as saving looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.ones(3))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return sharded_state_dict(self)


def manager_in(root: Path, **config: Any) -> CheckpointManager:
    words = CheckpointConfig(save_contents=("model", "extra"), load_contents=("model",), **config)
    return CheckpointManager(root, Model(), role=ROLE, config=words)


def save(root: Path, step: int, **config: Any) -> None:
    with closing(manager_in(root, **config)) as manager:
        manager.save(step).wait()
        manager.wait()


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Everything is imported by one save here, because another user may not read the packages."""
    with common_place() as place:
        fast = FastTier(place / "fast", replicas=0, durable_every=1)
        save(place / "root", 1, fast=fast, remote=f"file://{place}/remote", max_to_keep=1)
        with closing(manager_in(place / "root", fast=fast)) as manager:
            manager.load()


@pytest.fixture
def place() -> Iterator[Path]:
    with common_place() as place:
        yield place


def files_read(below: Path) -> list[Path]:
    """The files that this process can read, of which root knows the paths."""
    return [path for path in known[below] if is_readable(path)]


known: dict[Path, list[Path]] = {}


def note(below: Path) -> None:
    """Lets other users know all paths, as if they had guessed them."""
    known[below] = [path for path in below.rglob("*") if path.is_file()]
    assert known[below]


def is_readable(path: Path) -> bool:
    try:
        path.open("rb").close()
    except PermissionError:
        return False
    return True


def modes(below: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in (below, *below.rglob("*"))}


def warnings_told() -> list[str]:
    """A list that gets every message that this process logs from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_ckpt").addHandler(handler)
    return told


# -- who can read ------------------------------------------------------------------------------------------


def test_what_is_saved_under_the_usual_umask_is_the_user_s_alone(place: Path) -> None:
    fast = FastTier(place / "fast", replicas=0, durable_every=1)
    run_as(ALICE, lambda: save(place / "root", 1, fast=fast, remote=f"file://{place}/remote"))
    for folder in ("root", "fast", "remote"):
        note(place / folder)
        assert modes(place / folder) == {0o700, 0o600}
        assert run_as(MALLORY, lambda folder=folder: files_read(place / folder)) == []


@pytest.mark.parametrize(
    ("existing", "shared", "umask", "in_group", "outside"),
    [
        (None, True, 0o022, True, False),
        (None, None, 0o002, True, False),
        (None, False, 0o002, False, False),
        (0o755, None, 0o022, True, True),  # as before: nobody's evaluations end
        pytest.param(0o750, None, 0o022, True, False, marks=pytest.mark.full),
        pytest.param(0o755, None, 0o077, False, False, marks=pytest.mark.full),
        (0o755, False, 0o022, False, False),
    ],
)
def test_who_else_can_read_the_weights(
    place: Path, existing: int | None, shared: bool | None, umask: int, in_group: bool, outside: bool
) -> None:
    root = place / "root"

    def train() -> None:
        if existing is not None:
            root.mkdir()
            root.chmod(existing)
        save(root, 1, shared_with_group=shared)

    run_as(ALICE, train, umask, TEAM)
    model = next(root.rglob("model_states.pt"))
    assert run_as(BOB, lambda: is_readable(model), group=TEAM) == in_group
    assert run_as(MALLORY, lambda: is_readable(model), group=STRANGERS) == outside
    if existing is not None:
        assert stat.S_IMODE(root.stat().st_mode) == existing


@pytest.mark.parametrize(("shared", "in_group"), [(True, True), (False, False)])
def test_who_else_can_read_parts(place: Path, shared: bool, in_group: bool) -> None:
    """Temporary files and folders are made for their owner alone."""

    def write(folder: Path) -> None:
        made = Path(tempfile.mkdtemp(dir=folder))
        os.close(tempfile.mkstemp(dir=made)[0])

    def train() -> None:
        rollouts = place / "rollouts"
        rollouts.mkdir(mode=0o700)
        write(rollouts)
        with closing(manager_in(place / "root", shared_with_group=shared)) as manager:
            manager.attach("written", save=write)
            manager.attach("bytes", save=b"1")
            manager.attach("copied", save=lambda folder: rollouts / os.listdir(rollouts)[0])
            manager.attach("given", save=lambda folder: HandOver(rollouts))
            manager.save(1).wait()

    run_as(ALICE, train, 0o022, TEAM)
    parts = place / "root" / "global_steps_1" / ROLE / "parts"
    note(parts)
    assert len(known[parts]) == 4
    assert len(run_as(BOB, lambda: files_read(parts), group=TEAM)) == (4 if in_group else 0)
    there = list(parts.rglob("*"))
    listed = run_as(BOB, lambda: list(parts.rglob("*")) if os.access(parts, os.X_OK) else [], group=TEAM)
    assert len(listed) == (len(there) if in_group else 0)
    assert run_as(MALLORY, lambda: files_read(parts), group=STRANGERS) == []
    assert not {path for path in there if path.stat().st_mode & stat.S_IWOTH}


def test_an_open_folder_of_an_older_version_gets_closed_steps(place: Path) -> None:
    fast = place / "fast"

    def train() -> None:
        fast.mkdir(mode=0o755)
        save(place / "root", 1, fast=FastTier(fast, replicas=0, durable_every=None))

    run_as(ALICE, train)
    assert modes(file_names.step_dir(fast, 1)) == {0o700, 0o600}


def test_a_checkpoint_beside_the_steps_is_as_open_as_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert mode_below(root, root / "best", None) == top_mode(None)
    root.mkdir()
    root.chmod(0o755)
    assert mode_below(root, root / "best", None) == 0o755
    assert mode_below(root, tmp_path / "best", None) == top_mode(None)
    assert mode_below(root, root / "best", False) == 0o700


def test_what_a_tool_makes_is_not_more_open_than_its_source(tmp_path: Path) -> None:
    role_dir = tmp_path / "global_steps_1" / ROLE
    role_dir.mkdir(parents=True)
    for folder in (tmp_path, role_dir.parent, role_dir):
        folder.chmod(0o755)
    assert mode_as(role_dir) == 0o755
    tmp_path.chmod(0o750)
    assert mode_as(role_dir) == 0o750
    assert mode_as(role_dir, tmp_path / "global_steps_1") == 0o750


# -- what another user has made first ----------------------------------------------------------------------


def _folder(place: Path) -> None:
    (place / "run").mkdir()


def _link(place: Path) -> None:
    (place / "alices").mkdir(mode=0o777)
    (place / "alices").chmod(0o777)
    (place / "run").symlink_to(place / "alices")


def _above(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run").chmod(0o777)


@pytest.mark.parametrize(("make", "below"), [(_folder, "run"), (_link, "run"), (_above, "run/mine")])
def test_a_folder_of_the_fast_tier_that_another_user_has_made_is_refused(
    place: Path, make: Callable[[Path], None], below: str
) -> None:
    run_as(MALLORY, lambda: make(place))
    fast = FastTier(place / below, replicas=0, durable_every=None)
    with pytest.raises(InvalidArgumentError, match=f"belongs to user {MALLORY}.* use a folder with another name"):
        run_as(ALICE, lambda: save(place / "root", 1, fast=fast))


@pytest.mark.parametrize(
    ("mode", "shared", "is_refused"), [(0o777, True, True), (0o770, None, True), (0o770, True, False)]
)
def test_a_folder_of_the_fast_tier_in_which_others_may_write(
    place: Path, mode: int, shared: bool | None, is_refused: bool
) -> None:
    folder = place / "run"

    def train() -> None:
        folder.mkdir()
        folder.chmod(mode)
        save(place / "root", 1, fast=FastTier(folder, replicas=0, durable_every=None), shared_with_group=shared)

    if is_refused:
        with pytest.raises(InvalidArgumentError, match="can be written by other users"):
            run_as(ALICE, train)
    else:
        run_as(ALICE, train)


def test_a_link_of_one_s_own_is_followed(place: Path) -> None:
    def train() -> None:
        (place / "disk").mkdir(mode=0o700)
        (place / "run").symlink_to(place / "disk")
        save(place / "root", 1, fast=FastTier(place / "run", replicas=0, durable_every=None))

    run_as(ALICE, train)
    assert file_names.step_dirs(place / "disk").keys() == {1}


@pytest.mark.parametrize("below", ["", ROLE])
def test_a_step_of_another_user_is_not_loaded(place: Path, below: str) -> None:
    """It could be in a folder that everybody could write before."""
    fast = FastTier(place / "run", replicas=0, durable_every=None)

    def train() -> None:
        with closing(manager_in(place / "root", fast=fast)) as manager:
            for step in (1, 2):
                manager.save(step).wait()

    run_as(ALICE, train)
    os.chown(file_names.step_dir(place / "run", 2) / below, MALLORY, MALLORY)
    (place / "run" / file_names.step_name(2) / below).chmod(0o755)

    def load() -> tuple[int, list[str]]:
        told = warnings_told()
        with closing(manager_in(place / "root", fast=fast)) as manager:
            return manager.load().step, told

    step, told = run_as(ALICE, load)
    assert step == 1
    assert any(f"is left out: it belongs to user {MALLORY}" in text for text in told)


def test_a_folder_that_is_replaced_during_the_training_is_refused(place: Path) -> None:
    run, fast = place / "run", FastTier(place / "run", replicas=0, durable_every=None)

    def train() -> None:
        with closing(manager_in(place / "root", fast=fast)) as manager:
            manager.save(1).wait()
            run.rename(place / "old")
            run.symlink_to(place / "mallorys")  # not his own, but what it leads to is another user's
            with pytest.raises(InvalidArgumentError, match=f"belongs to user {MALLORY}"):
                manager.load()
            with pytest.raises(CommitError, match="is not the folder that this trainer has begun with: a link leads"):
                manager.save(2)

    run_as(MALLORY, lambda: (place / "mallorys").mkdir())
    run_as(ALICE, train)


# -- users who share ---------------------------------------------------------------------------------------


def test_two_users_of_a_group_share_a_root(place: Path) -> None:
    root = place / "root"
    run_as(ALICE, lambda: save(root, 1), 0o002, TEAM)
    run_as(BOB, lambda: save(root, 2, max_to_keep=1), 0o002, TEAM)
    run_as(ALICE, lambda: save(root, 3, max_to_keep=1), 0o002, TEAM)
    assert [status.step for status in complete_steps(root)] == [3]
    assert run_as(MALLORY, lambda: os.access(root, os.R_OK | os.X_OK), 0o002, STRANGERS) is False


def test_a_root_of_another_user_says_whose_it_is(place: Path) -> None:
    run_as(BOB, lambda: save(place / "root", 1))
    with pytest.raises(Exception, match=f"Permission denied.*belongs to user {BOB}, mode 0700"):
        run_as(ALICE, lambda: save(place / "root", 2))


# -- locks and leftovers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "what"), [(0o644, "its process is dead"), (0o600, "it cannot be read")])
def test_a_lock_of_another_user_is_told_by_name(
    place: Path, mode: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the sticky bit nobody else can take its place."""
    monkeypatch.setattr("mcore_ckpt.steps.trainer_lock.TRAINER_LEASE_S", 0.0)
    path = file_names.trainer_file(place, ROLE)

    def leave() -> None:
        path.write_bytes(DEAD)
        path.chmod(mode)

    run_as(BOB, leave)
    with pytest.raises(LockedError, match=f"{what}.*belongs to user {BOB}, mode 0{mode:o}"):
        run_as(ALICE, lambda: TrainerLock(place, ROLE).take(60.0))


def test_leftovers_of_another_user_are_told_by_name(place: Path) -> None:
    step_path = file_names.step_dir(place, 1)
    tracker = place / f".{file_names.TRACKER_FILE}.{'a' * 32}"
    assert file_names.is_under_way(tracker.name, place / file_names.TRACKER_FILE)

    def leave() -> None:
        file_names.staging_dir(step_path / ROLE, "a" * 32).mkdir(parents=True)
        tracker.touch()

    def look() -> list[str]:
        told = warnings_told()
        leftovers.remove_leftovers(place, ROLE, alone=True)
        return told

    run_as(BOB, leave)
    told = run_as(ALICE, look)
    for path in (tracker, step_path):
        assert any(text.startswith(str(path)) and f"belongs to user {BOB}" in text for text in told), told


def test_a_step_of_another_user_says_whose_it_is(place: Path) -> None:
    run_as(BOB, lambda: file_names.step_dir(place, 1).mkdir())
    with pytest.raises(Exception, match=f"Permission denied.*belongs to user {BOB}"):
        run_as(ALICE, lambda: save(place, 1))


def test_a_tracker_of_another_user_is_told_by_name(place: Path) -> None:
    """The save goes on without it."""
    run_as(BOB, lambda: (place / file_names.TRACKER_FILE).write_text("7"))

    def train() -> list[str]:
        told = warnings_told()
        save(place, 1)
        return told

    told = run_as(ALICE, train)
    assert any(f"could not be updated: [Errno 1] Operation not permitted: {place}" in text for text in told), told
    assert any(f"belongs to user {BOB}" in text for text in told)


def test_a_tool_says_whose_lock_it_cannot_read(place: Path) -> None:
    run_as(BOB, lambda: file_names.trainer_file(place, "critic").touch(0o600))
    with pytest.raises(LockedError, match=f"it cannot be read.*belongs to user {BOB}"):
        run_as(ALICE, lambda: ToolLocks(place, [ROLE]).__enter__())
