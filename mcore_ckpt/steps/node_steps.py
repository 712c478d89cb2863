"""Finds which steps of the fast tier are whole, from what each node has in its folder.

A node's folder has the layout of a root. For each checkpoint, the folder has the manifest, which lists the files of all
nodes. But the folder has only the files that the node has written, and copies of some other files. A role's checkpoint
is whole if every file is on some node, and a node has committed the checkpoint. Each node looks into its own folder
(`held_roles`), and rank 0 joins the results (`fast_checkpoints`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary
from mcore_ckpt.checkpoint.provenance import decode_commit, decode_run, encoded_commit, encoded_run
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io.folder_sizes import sizes_of
from mcore_ckpt.sharding.plan import runs
from mcore_ckpt.steps.branches import StepCommit, commit_of
from mcore_ckpt.steps.worth import Lack, Weighed

logger = logging.getLogger(__name__)

# Positions in the manifest's list of files, as ranges `(first, last)` that include `last`.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HeldRole:
    """The files of a role's checkpoint that one node has.

    If the node has not committed the checkpoint, the files are in the node's staging folder. `has` has the positions of
    the node's files in the manifest.
    """

    head: ManifestSummary
    files: int
    has: Runs
    is_committed: bool
    save_count: int

    def to_record(self) -> list[Any]:
        """Returns JSON values, which a rank can send."""
        head, run, commit = self.head, self.head.run, self.head.commit
        of = [head.step, head.role, head.roles, head.attempt, head.created]
        more = [head.contents, dict(head.metrics), head.dropped]
        encoded = [*of, run and encoded_run(run), commit and encoded_commit(commit), *more]
        return [encoded, self.files, self.has, self.is_committed, self.save_count]

    @staticmethod
    def of(record: Sequence[Any]) -> HeldRole:
        """Returns the object that `to_record` has turned into this record."""
        encoded, files, has, is_committed, save_count = record
        step, role, roles, attempt, created, run, commit, contents, metrics, dropped = encoded
        found = run and decode_run(run), commit and decode_commit(commit)
        head = ManifestSummary(
            step, role, tuple(roles), attempt, created, *found, tuple(contents), metrics, tuple(dropped)
        )
        return HeldRole(head, files, tuple((first, last) for first, last in has), is_committed, save_count)


@dataclass(frozen=True)
class FastCheckpoint:
    """One role's checkpoint on all nodes together.

    Attributes:
        files: how many files the checkpoint has.
        holders: for each node that has some of the files, the node's number and these files.
        is_committed: whether a node has committed the checkpoint.
        is_staged: whether the checkpoint is still in the staging folder of a node that died during its commit.
    """

    head: ManifestSummary
    files: int
    holders: tuple[tuple[int, Runs], ...]
    is_committed: bool
    is_staged: bool
    save_count: int

    @property
    def step(self) -> int:
        """The step's number."""
        return self.head.step

    @property
    def role(self) -> str:
        """The role."""
        return self.head.role

    @property
    def attempt(self) -> str:
        """The id of the save."""
        return self.head.attempt

    @property
    def commit(self) -> StepCommit:
        """The place of the checkpoint among all commits."""
        return commit_of(self.step, [self.head.commit])

    @property
    def missing(self) -> list[int]:
        """The positions of the files that no node has."""
        there = {position for _, has in self.holders for first, last in has for position in range(first, last + 1)}
        return [position for position in range(self.files) if position not in there]

    @property
    def nodes_of_rarest_file(self) -> int:
        """The number of nodes that have the rarest file.

        If fewer nodes than this number are lost, no file is lost.
        """
        changes = [0] * (self.files + 1)
        for _, has in self.holders:
            for first, last in has:
                changes[first] += 1
                changes[last + 1] -= 1
        return min(accumulate(changes[:-1]), default=len(self.holders))

    @property
    def is_complete(self) -> bool:
        """True if the checkpoint is whole: committed, and every file is on some node."""
        return self.is_committed and not self.missing


def order_of(step: FastCheckpoint | NodeStep) -> tuple[int, int]:
    """Returns a sort key by commit for checkpoints, like `choice.order_of` for steps."""
    return step.commit.number, step.step


def held_roles(folder: Path, refused: Callable[[Path], str | None] = lambda path: None) -> list[HeldRole]:
    """Returns, for every checkpoint, the files that a node's folder has. Unreadable folders are logged and left out.

    `refused` returns a reason to leave out the folder of a step or role, or None. It may raise OSError.
    """
    found = []
    for step in file_names.step_dirs(folder):
        step_path = file_names.step_dir(folder, step)
        try:
            if _is_refused(step_path, refused):
                continue
            names = sorted(os.listdir(step_path))
        except FileNotFoundError:  # another role of the step has just been deleted, together with the folder
            continue
        except OSError as error:
            logger.warning("%s: is left out: %s", step_path, error)
            continue
        found += [held for name in names if (held := _held(step, step_path / name, refused)) is not None]
    return found


def _is_refused(folder: Path, refused: Callable[[Path], str | None]) -> bool:
    reason = refused(folder)
    if reason is not None:
        logger.warning("%s: is left out: it %s. If it is yours, chown it or chmod 700 it", folder, reason)
    return reason is not None


def _held(step: int, folder: Path, refused: Callable[[Path], str | None]) -> HeldRole | None:
    """Returns the contents of a role's folder or a staging folder; None for another folder, or without a manifest."""
    work = file_names.parse_work_dir(folder.name)
    is_role = work is None and file_names.is_role(folder.name)
    if not is_role and (work is None or work.purpose != "staging"):
        return None
    try:
        if _is_refused(folder, refused):
            return None
        manifest = read_manifest(folder)
    except (CheckpointNotFoundError, FileNotFoundError):
        return None
    except (CheckpointCorruptError, OSError) as error:
        logger.warning("%s: is left out: %s", folder, error)
        return None
    own = (folder.name, manifest.attempt) if work is None else (work.role, work.attempt)
    if manifest.step != step or own != (manifest.role, manifest.attempt) or manifest.placement is None:
        return None
    try:
        here = files_here(folder, manifest)
    except OSError as error:
        logger.warning("%s: is left out: %s", folder, error)
        return None
    save_count = manifest.placement.save_count
    return HeldRole(manifest.head, len(manifest.files), tuple(runs(here)), work is None, save_count)


def files_here(role_dir: Path, manifest: Manifest) -> list[int]:
    """Returns the positions of the manifest's files that a folder has, in their full size."""
    sizes = sizes_of(role_dir, (file.path for file in manifest.files))
    return [number for number, file in enumerate(manifest.files) if sizes.get(file.path) == file.size]


def fast_checkpoints(by_node: Iterable[tuple[int, Sequence[HeldRole]]]) -> list[FastCheckpoint]:
    """Joins the nodes' parts, the newest commit first. `by_node` has the number of each node that answered."""
    holders: dict[tuple[int, str, str], list[tuple[int, HeldRole]]] = {}
    for node, held in by_node:
        for each in held:
            holders.setdefault((each.head.step, each.head.role, each.head.attempt), []).append((node, each))
    return sorted(map(_together, holders.values()), key=order_of, reverse=True)


def _together(members: Sequence[tuple[int, HeldRole]]) -> FastCheckpoint:
    first = members[0][1]
    return FastCheckpoint(
        first.head,
        first.files,
        tuple((node, held.has) for node, held in members),
        any(held.is_committed for _, held in members),
        not all(held.is_committed for _, held in members),
        first.save_count,
    )


def safest(found: Iterable[FastCheckpoint], replicas: int) -> list[FastCheckpoint]:
    """Returns a role's whole checkpoints that survive the loss of the most nodes.

    These are the checkpoints with `replicas` copies of each file. If nodes were lost, or died before their copies were
    complete, there may be no such checkpoint. Then the checkpoints with the most copies are returned.
    """
    whole = [each for each in found if each.is_complete]
    wanted = min(replicas + 1, max((each.nodes_of_rarest_file for each in whole), default=0))
    return [each for each in whole if each.nodes_of_rarest_file >= wanted]


def in_order_of_saves(found: Iterable[FastCheckpoint]) -> list[FastCheckpoint]:
    """Returns the checkpoints of a step in the order of their saves, the last save at the end."""
    # If the checkpoints have no commit numbers, a checkpoint in a staging folder was saved last. The times of the saves
    # decide between all other checkpoints.
    return sorted(found, key=lambda each: (each.commit.number, each.is_staged, each.head.created))


@dataclass(frozen=True)
class NodeStep(Weighed):
    """A step on all nodes together, or the remains of a step.

    Attributes:
        heads: the summaries of the manifests of the step's roles.
        found: the checkpoints of the step's roles.
        why: returns why the step is not whole, and may ask other nodes for the reason; None if the step is whole.
        is_committed: whether a node has committed the step.
    """

    step: int
    heads: tuple[ManifestSummary, ...]
    found: Mapping[str, FastCheckpoint] = field(default_factory=dict)
    why: Callable[[], str] | None = field(default=None, compare=False)
    is_committed: bool = True
    problems: tuple[str, ...] = ()
    pinned: bool = False

    @property
    def claims(self) -> tuple[ManifestSummary, ...]:
        """Equal to `heads`; empty for a save that was under way."""
        return self.heads if self.is_committed else ()

    @property
    def declared(self) -> frozenset[str]:
        """The roles of the step's manifests."""
        return frozenset(head.role for head in self.heads)

    @property
    def committed(self) -> frozenset[str]:
        """The declared roles if the step is whole; empty otherwise, because nothing can be loaded."""
        return self.declared if self.why is None else frozenset()

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """Nothing, because a step that is not whole counts as not committed."""
        return ()

    @property
    def reason(self) -> str:
        """Why the step is not whole."""
        if self.why is not None:
            return self.why()
        return "" if self.is_claimed else f"{self.where} on the nodes: {self.why_missing('committed')}"

    def to_record(self) -> list[Any]:
        """Returns JSON values, which a rank can send."""
        heads = [[head.role, head.commit and encoded_commit(head.commit)] for head in self.heads]
        return [self.step, heads, None if self.why is None else self.why()]

    @staticmethod
    def of(record: Sequence[Any]) -> NodeStep:
        """Returns the step that `to_record` has turned into this record, without the step's checkpoints."""
        step, heads, reason = record
        summaries = [
            ManifestSummary(step, role, (role,), "", "", commit=commit and decode_commit(commit))
            for role, commit in heads
        ]
        return NodeStep(step, tuple(summaries), why=None if reason is None else lambda: str(reason))


def node_steps(
    found: Sequence[FastCheckpoint], roles: Sequence[str], why: Callable[[FastCheckpoint], str]
) -> list[NodeStep]:
    """Returns the whole steps (`whole_steps`), and the remains of steps that were committed after the last whole step.

    A checkpoint that no node has committed is a save that was under way, not a lost step. `why` returns why a
    checkpoint is not whole.
    """
    whole = list(whole_steps(found, roles).values())
    last = max(map(order_of, whole), default=(-1, -1))
    committed = [each for each in found if each.is_committed and each.role in roles]
    newer = [each for each in committed if order_of(each) > last]
    return [*whole, *(NodeStep(each.step, (each.head,), why=cache(partial(why, each))) for each in newer)]


def whole_steps(found: Iterable[FastCheckpoint], roles: Sequence[str]) -> dict[int, NodeStep]:
    """Returns the steps in which all declared roles, and the given roles, are whole.

    If a role of a step was saved twice, both saves can be whole: some nodes may still have the files of the first save,
    because these nodes were away, or died before they committed the second save. In that case the second save counts.
    """
    by_step: dict[int, dict[str, FastCheckpoint]] = {}
    for each in in_order_of_saves(found):
        if each.is_complete:
            by_step.setdefault(each.step, {})[each.role] = each
    return {
        step: NodeStep(step, tuple(each.head for each in there.values()), there)
        for step, there in by_step.items()
        if there.keys() >= {*roles, *(role for each in there.values() for role in each.head.roles)}
    }
