"""A signal handler of the trainer that raises in the midst of a call: its rank gets what it raised, the others are told
at once, and the ranks go on together. And what managers leave in the job's key-value store."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.errors import CommitError
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.integrations.kit.together import on_all_ranks
from mcore_ckpt.load import load as loading
from mcore_ckpt.ranks.one_round import Round
from mcore_ckpt.recover import recover
from mcore_ckpt.save import rank_files
from mcore_ckpt.save.rank_files import RankFiles
from mcore_ckpt.state import trainer_setup
from tests.distributed.agreement import everywhere, gather
from tests.distributed.hf_words import hf_config
from tests.distributed.layouts import LAYOUTS
from tests.distributed.training import Training, build, parallel

DP2 = LAYOUTS["dp2-bf16"]
FULL = pytest.mark.full
# Nobody may wait so long. Who does is killed with its test.
FAR_S = 3600.0

pytestmark = pytest.mark.world(2)


class PreemptedError(OSError):
    """What a trainer's handler raises: of a kind that a disk raises, too."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def raise_it(number: int, frame: object) -> None:
        raise PreemptedError("by the scheduler")

    before = signal.signal(signal.SIGUSR1, raise_it)
    yield
    signal.signal(signal.SIGUSR1, before)


def manager_of(training: Training, root: Path, hf_config: Any = None, **config: Any) -> CheckpointManager:
    choices, parts = CheckpointConfig(timeout_s=FAR_S, **config), (training.optimizer, training.scheduler)
    return CheckpointManager(root, training.model, *parts, hf_config=hf_config, config=choices)


def interrupted(owner: Any, name: str, victim: int, patch: pytest.MonkeyPatch) -> None:
    """Lets one rank get the signal when it has done the first part of a call."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        patch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return result

    if dist.get_rank() == victim:
        patch.setattr(owner, name, call)


def assert_told(call: Callable[[], object], victim: int) -> None:
    raised: BaseException | None = None
    try:
        call()
    except BaseException as error:
        raised = error
    found = gather((type(raised).__name__, str(raised)))
    assert found[victim] == ("PreemptedError", "by the scheduler"), found
    assert found[1 - victim][0] in ("CommitError", "AgreementError"), found
    assert "PreemptedError: by the scheduler" in found[1 - victim][1], found


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=FULL)])
@pytest.mark.parametrize("how", ["sync", "async", "fast", "export"])
def test_while_saving(how: str, victim: int, shared_path: Path) -> None:
    places: list[tuple[Any, str]] = [
        (RankFiles, "__init__"),
        (Round, "submit"),
        (rank_files, "take_samples"),
        (RankFiles, "capture"),
        *([] if how == "async" else [(RankFiles, "start_writing"), (FileWriter, "finish")]),
    ]
    config: dict[str, Any] = {"async_save": how == "async"}
    if how == "fast":
        config["fast"] = FastTier(shared_path / "node", replicas=0, durable_every=None)
    if how == "export":  # it has a round before that of the commit
        config |= {"save_contents": ("model", "hf_model"), "hf_config": hf_config(DP2)}
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path / "root", **config)
        manager.save(1).wait()
        for number, (owner, name) in enumerate(places, start=2):
            with pytest.MonkeyPatch.context() as patch:
                interrupted(owner, name, victim, patch)
                assert_told(lambda number=number: manager.save(number).wait(), victim)  # type: ignore[misc]
            manager.save(1).wait()
        manager.close()
        left = sorted(str(path.relative_to(shared_path)) for path in shared_path.rglob("*staging*"))
        with everywhere():
            assert left == []


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=FULL)])
def test_while_loading_and_recovering(victim: int, shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = manager_of(training, shared_path / "root")
        manager.save(1).wait()
        for call in (manager.load, lambda: recover(manager)):
            for name in ("find_candidates", "own_held", "plan_load", "_plan_together", "fill_tensors"):
                if name == "find_candidates" and victim != 0:
                    continue
                with pytest.MonkeyPatch.context() as patch:
                    interrupted(loading, name, victim, patch)
                    assert_told(call, victim)
                assert manager.load().step == 1
        manager.close()


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=FULL)])
def test_while_a_manager_is_made(victim: int, shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        for owner, name in ((trainer_setup, "check_megatron"), (Round, "submit"), (trainer_setup, "model_shards")):
            with pytest.MonkeyPatch.context() as patch:
                interrupted(owner, name, victim, patch)
                assert_told(lambda: manager_of(training, shared_path / "root").save(1), victim)
        manager_of(training, shared_path / "root").close()


def keys() -> int:
    """How many keys the job's store has, when all ranks have closed what they had."""
    dist.barrier()
    found: int = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return found


def bad() -> dict[str, Any]:
    raise ValueError("bad")


def test_a_manager_leaves_no_keys(shared_path: Path) -> None:
    fast = FastTier(shared_path / "node", replicas=0, durable_every=1)
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager_of(training, shared_path / "root").close()
        before = keys()
        for config in ({}, {"async_save": True}, {"fast": fast}, {"fast": fast, "async_save": True}):
            manager = manager_of(training, shared_path / "root", **config)
            manager.save(1).wait()
            manager.load()
            with pytest.raises(CommitError, match="bad"):
                manager.save(2, extra_state=bad if dist.get_rank() == 0 else None)
            recover(manager)
            manager.close()
            assert keys() == before
        on_all_ranks("test", "asking", lambda: None, FAR_S)
        assert keys() == before
        with pytest.raises(ValueError, match="role"):
            CheckpointManager(shared_path, training.model, training.optimizer, role="no/role")
        assert keys() == before
