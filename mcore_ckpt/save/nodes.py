"""Saves to the nodes' own folders (the fast tier), and begins the copies that follow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError
from mcore_ckpt.fast.saves import FastSaves
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.fast.transaction import commit_on_nodes, make_staging, open_on_nodes
from mcore_ckpt.io.access import top_mode
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.io.files import make_folder
from mcore_ckpt.ranks.node_map import NodeMap
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.destination import Following, Place, Written
from mcore_ckpt.save.drain import Drain, is_own_name
from mcore_ckpt.save.root import Root
from mcore_ckpt.save.save_times import SaveTimes
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.commit import check_structures, remove_folder, remove_if_empty
from mcore_ckpt.steps.listing import step_status
from mcore_ckpt.steps.space_watch import Saving
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt

logger = logging.getLogger(__name__)


class Nodes:
    """The nodes as the destination of one manager's saves. Durable steps are copied to `root`.

    Attributes:
        contents: see `Destination`. HuggingFace models are made only from steps in the root.
    """

    def __init__(self, context: SaveContext, fast: FastSaves, root: Root) -> None:
        self._context, self._fast, self._root = context, fast, root
        words = context.trainer.config.save_contents
        self.contents = tuple(dict.fromkeys("model" if word == "hf_model" else word for word in words))

    @property
    def lock(self) -> TrainerLock:
        return self._fast.tier.lock

    def writers_of(self, replicas: Sequence[int]) -> Sequence[tuple[int, ...]]:
        return self._fast.tier.writers_of(replicas)

    def folder_of(self, saving: Saving) -> Path:
        if saving.policy is None:
            raise InvalidArgumentError(
                f"path {saving.role_dir} is not part of a step below {self._context.trainer.root}, but the fast tier "
                "holds only such steps: leave path out, or use a manager without a fast tier for this checkpoint"
            )
        return self._fast.tier.role_dir(saving.step)

    def open(
        self, topic: str, saving: Saving, busy: bool, failure: Record | None, need: Need, parts: Sequence[str]
    ) -> Place:
        fast, skips = self._fast, self._context.trainer.config.if_busy == "skip"
        if skips:
            busy = busy or fast.must_wait_for_root()
        else:
            fast.wait_before_durable()
        if not busy:
            fast.wait_for_copies_of(saving.step)
        agreement = self._context.trainer.agreement
        opened = open_on_nodes(agreement, topic, fast.tier, saving.step, busy, failure, fast.plan_durable, parts, skips)
        fast.begun(opened.save_count, opened.is_durable)
        drain = None
        if opened.is_durable:
            drain = Drain(self._context, fast.drain_agreement, opened.attempt, saving, self._root.prepare)
        return _PlaceOnNodes(self._context, fast, saving, opened.attempt, opened.save_count, drain)

    def rounds_of(self, number: str, opened: Record) -> list[str]:
        # The commit has two rounds. The name of the first is enough, because no rank waits in the second round if the
        # first has failed.
        return [number]

    def interrupted(self, attempt: Attempt) -> None:
        self._root.interrupted(attempt)

    def remove_interrupted(self) -> None:
        self._root.remove_interrupted()

    def loaded(self, manifest: Manifest) -> None:
        self._fast.loaded(manifest)

    def wait(self) -> None:
        self._fast.wait()

    has_nodes = True

    @property
    def has_root(self) -> bool:
        return self._fast.tier.config.durable_every is not None

    @property
    def drain_s(self) -> float | None:
        return self._fast.drains.longest_s

    def choose_next(self, durable: bool) -> None:
        self._fast.next_is_durable = durable

    def await_drain(self, patience_s: float | None) -> bool:
        return self._fast.drains.wait_for_copy(timeout=patience_s)

    def await_copies_of(self, step: int, patience_s: float | None) -> bool:
        return self._fast.wait_for_copies_of(step, patience_s)

    def limit_waits(self, seconds: float, even_later: bool = True) -> None:
        for agreement in self._fast.agreements:
            agreement.limit_waits(seconds, even_later)


@dataclass(frozen=True, eq=False)
class _PlaceOnNodes:
    """One save to the nodes, on this rank."""

    context: SaveContext
    fast: FastSaves
    saving: Saving
    attempt: Attempt
    save_count: int
    drain: Drain | None

    def capturing(self) -> AbstractContextManager[None]:
        return self.fast.copies.paused()

    def prepare(self) -> None:
        self.fast.tier.lock.check_root()
        make_staging(self.attempt, top_mode(self.context.trainer.config.shared_with_group))

    def await_opening(self, topic: str) -> None:
        pass

    def check(self, files: Sequence[Written], structures: Sequence[Mapping[str, str]]) -> None:
        # Rank 0 sees only the files of its own node, so each node checks its own files (`fast/transaction.py`).
        check_structures(structures, self.fast.tier.nodes.number_of)

    def placed(self, files: Sequence[Written]) -> tuple[Sequence[Written], Placement]:
        return place_files(files, self.fast.tier.nodes, self.fast.tier.config.replicas, self.save_count)

    def commit(
        self,
        topic: str,
        write: Callable[[Path], Record],
        describe: Callable[[Sequence[Record]], Manifest],
        times: SaveTimes,
    ) -> list[WrittenFile]:
        def describe_if_held(records: Sequence[Record]) -> Manifest:
            self.fast.tier.lock.take(patience_s=0)
            return describe(records)

        commit_on_nodes(self.context.commits, topic, self.attempt, self.fast.tier, write, describe_if_held)
        return []  # HuggingFace models are made only from steps in the root

    def follow(self) -> Following:
        fast, step = self.fast, self.saving.step
        if self.context.trainer.agreement.is_coordinator:
            _track(self.context.trainer, fast.tier, step, self.saving.role_dir, self.context.lock.check_root)
        fast.committed(step, self.attempt.number, self.save_count)
        copies = fast.copies.add(step, self.attempt)
        retired = fast.retire_old(step) if fast.tier.is_lead else []
        drain = None if self.drain is None else fast.drains.start(self.drain)
        return Following(copies=copies, drain=drain, delete=partial(_delete, retired))


def place_files(
    written: Sequence[Written], nodes: NodeMap, replicas: int, save_count: int
) -> tuple[list[Written], Placement]:
    """Chooses which nodes shall have each file. Returns the files without repetitions, and their placement.

    Data-parallel replicas on several nodes have written the same file. Such a file counts once, and the nodes that have
    it need no copy.

    Args:
        written: the files, each with the rank that has written it, in the order of the ranks.
        nodes: the nodes of the job.
        replicas: how many other nodes shall have each file.
        save_count: see `Placement`.
    """
    first: dict[str, Written] = {}
    holders: dict[str, list[int]] = {}
    for rank, file in written:
        number = nodes.number_of(rank)
        known = first.setdefault(file.path, (rank, file))
        if (known[1].crc32, known[1].size) != (file.crc32, file.size):
            logger.warning(
                "%s: ranks %d and %d have different bytes, although they are replicas: %s's version of the file does "
                "not count, and the step has the version of rank %d",
                file.path,
                known[0],
                rank,
                nodes.all[number].name,
                known[0],
            )
            continue
        holders.setdefault(file.path, []).append(number)
    by_file = tuple(_with_copies(nodes, holders[path], replicas) for path in first)
    names = tuple(node.name for node in nodes.all)
    return list(first.values()), Placement(names, by_file, save_count)


def _with_copies(nodes: NodeMap, holders: Sequence[int], replicas: int) -> tuple[int, ...]:
    found = list(dict.fromkeys(holders))
    for other in nodes.preferred(found[0]):
        if len(found) > replicas:
            break
        if other not in found:
            found.append(other)
    return tuple(found)


def _delete(folders: Sequence[Path]) -> None:
    for folder in folders:
        remove_folder(folder)
        remove_if_empty(folder.parent)


def _track(trainer: Trainer, tier: NodeTier, step: int, role_dir: Path, check_root: Callable[[], object]) -> None:
    """Writes the number of a step into the root's tracker after the commit on the nodes. Only rank 0 calls this.

    A trainer that names its folders itself resumes from the step in the tracker, if the root has a folder for that
    step. So this function makes the step's folder, too. If this package names the folders, the tracker names only steps
    in the root, because `recover` and `load` need no tracker. Then this function does nothing.
    """
    if is_own_name(trainer, step, role_dir) or tier.config.durable_every is None:
        return
    step_path = role_dir if file_names.parse_step(role_dir.name) is not None else role_dir.parent
    try:
        check_root()
        status = replace(step_status(tier.role_dir(step).parent), in_node_folder=True)
        if status.is_complete:  # while another role's commit is still to come, the tracker stays
            make_folder(step_path)
            tracker.write_tracker(trainer.root, step)
    except (OSError, CheckpointError) as error:
        logger.warning("step %d is committed on the nodes, but the tracker could not be updated: %s", step, error)
