"""Leads all ranks through one save into the fast tier: each node's files end up committed in that node's own folder.

A save has three rounds. `open_on_nodes` has one round, and runs on the trainer's thread. `commit_on_nodes` has two
rounds, and runs on any thread. In its first round all ranks write, and rank 0 makes the manifest. In its second round
the manifest reaches all nodes. Then each node renames its staging folder. If one node has renamed its folder and other
nodes die before they rename their folders, the staging folders of the other nodes stay, with the manifest. The other
nodes rename these folders when a load chooses this step (`adopt`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary, WrittenFile, decode_manifest, encode_readable
from mcore_ckpt.checkpoint.reading import read_entries, read_manifest, read_manifest_summary, read_remote_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, CommitError
from mcore_ckpt.fast.tier import NodeTier
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io.access import top_mode
from mcore_ckpt.io.files import make_parents, new_folder, sync_dir, write_file
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.handed_over import end_links_in
from mcore_ckpt.steps.node_steps import HeldRole, files_here
from mcore_ckpt.steps.owner import write_owner
from mcore_ckpt.steps.transaction import Attempt, is_committed, raise_refusal, refusal_among

logger = logging.getLogger(__name__)

# How long a rank waits for its node's lead to rename the folder of a committed save, and the pause between two checks
# of that folder, in seconds.
_RENAME_S, _LOOK_S = 30.0, 0.02


@dataclass(frozen=True)
class NodeAttempt:
    """One save of all ranks into the fast tier.

    Attributes:
        attempt: the save's id, and its staging folder and final folder on this node.
        is_durable: whether the step also goes to the root.
        save_count: how many saves into the fast tier the training has begun, including this save.
    """

    attempt: Attempt
    is_durable: bool
    save_count: int


def open_on_nodes(
    agreement: Agreement,
    topic: str,
    tier: NodeTier,
    step: int,
    busy: bool,
    failure: Record | None,
    plan_durable: Callable[[], tuple[bool, int]],
    parts: Sequence[str] = (),
    skips: bool = False,
) -> NodeAttempt:
    """Waits for all ranks, and lets each node's lead prepare the node's folder. Every rank must call this function.

    `plan_durable` returns, on rank 0, `is_durable` and `save_count` of `NodeAttempt`. For the other arguments, see
    `steps.transaction.open_together`.

    Raises:
        LockedError: another trainer uses the folder of some node for this role.
        BusyError, SkippedSave, EarlierSaveError, InvalidArgumentError, CheckpointError: see `open_together`.
    """
    role_dir = tier.role_dir(step)

    def work() -> Record:
        if tier.is_lead and not busy and failure is None:
            tier.lock.check_root()
            tier.open_folder()
            tier.lock.take(agreement.timeout_s / 2)
            rename_committed(tier)
            remove_staging(tier.folder, tier.role, lambda head: tier.ownership().owns(head))
        return {"step": step, "busy": busy, "failure": failure, "parts": list(parts)}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([{"step": record["step"]} for record in records], "the step to save", CommitError)
        refusal = refusal_among(topic, records, skips)
        if refusal is not None:
            return refusal
        is_durable, save_count = plan_durable()
        return {"attempt": commit.new_attempt(), "is_durable": is_durable, "save_count": save_count}

    outcome = decide(agreement, topic, work, combine, CommitError)
    raise_refusal(outcome)
    number = outcome["attempt"]
    attempt = Attempt(number, file_names.staging_dir(role_dir, number), role_dir)
    return NodeAttempt(attempt, outcome["is_durable"], outcome["save_count"])


def make_staging(attempt: Attempt, mode: int) -> None:
    """Makes the staging folder on this node, if no other rank of the node has made it. Raises OSError.

    `mode` is the mode of new folders, before the umask is applied. A folder that an older version has made may have a
    more open mode. A more open mode does no harm, because only this training reads what is in the folder.
    """
    while not attempt.staging.is_dir():
        make_parents(attempt.role_dir.parent, mode)
        new_folder(attempt.role_dir.parent, mode, exist_ok=True)
        with suppress(FileNotFoundError):  # another role has removed the step's folder, which was empty
            new_folder(attempt.staging, mode, exist_ok=True)
    with suppress(FileExistsError):
        write_owner(attempt.staging)


def commit_on_nodes(
    agreement: Agreement,
    topic: str,
    attempt: Attempt,
    tier: NodeTier,
    write: Callable[[Path], Record],
    describe: Callable[[Sequence[Record]], Manifest],
) -> None:
    """Lets every rank write its files, then commits the files on every node. Every rank must call this function.

    Args:
        agreement, topic, attempt, describe: see `steps.transaction.commit_together`.
        tier: this rank's part of the fast tier.
        write: writes this rank's files below the staging folder, and returns a record for rank 0.

    Raises CheckpointError, of the same type on all ranks, if the save failed. Older steps are untouched.
    """

    def combine(records: Sequence[Record]) -> Record:
        manifest = describe(records)
        try:
            data = encode_readable(manifest)
        except ValueError as error:
            raise CommitError(f"not committed, because the manifest could not be read back: {error}") from None
        tier.publish(attempt.number, data)
        _place_manifest(attempt, tier, data)
        return {}

    def receive() -> Record:
        if tier.is_lead and not agreement.is_coordinator:
            with agreement.limited(agreement.timeout_s / 2) as patience_s:
                data = tier.receive(attempt.number, patience_s)
            tier.lock.take(patience_s=0)
            _place_manifest(attempt, tier, data)
        return {}

    def act() -> None:
        tier.lock.take(patience_s=0)
        commit.publish(attempt.staging, attempt.role_dir, attempt.number)

    started, second = time.monotonic(), f"{attempt.number}-nodes"
    try:
        decide(agreement, topic, lambda: write(attempt.staging), combine, CommitError, name=attempt.number)
    except BaseException as error:
        if is_interrupt(error):  # the other ranks may already wait for this rank in the second round
            agreement.fail_next_round(topic, error, second)
        if tier.is_lead:
            commit.discard(attempt.staging)
        raise
    try:
        decide(agreement, topic, receive, lambda _: {}, CommitError, act, name=second)
    except BaseException as error:
        if is_interrupt(error):
            raise
        if not _is_committed_on_node_0(tier, attempt):
            # If node 0 does not answer, it may have renamed its folder. So other nodes keep their folders, and the next
            # load decides whether the save is committed.
            if agreement.is_coordinator:
                commit.discard(attempt.staging)
            raise
        logger.warning("step %s is committed, but not all ranks know it: %s", attempt.role_dir.parent.name, error)
    if tier.is_lead and not agreement.is_coordinator:
        tier.unrenamed.append(attempt)
        try:
            rename_committed(tier)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "%s is committed, but %s could not rename its part, which the next save or load will do: %s",
                attempt.role_dir,
                tier.node.name,
                error,
            )
    logger.debug("%s: committed on all nodes after %.3f s", attempt.role_dir, time.monotonic() - started)


def _place_manifest(attempt: Attempt, tier: NodeTier, data: bytes) -> None:
    """Checks that this node has its ranks' files in their full size, and writes the manifest into the staging folder.

    Files that this node's ranks have written as replicas are removed if they differ from the files in the manifest.
    """
    manifest = decode_manifest(data)
    with suppress(CheckpointNotFoundError, CheckpointCorruptError):
        head = read_manifest_summary(attempt.role_dir)
        tier.ownership(manifest.run).check(attempt.role_dir, [head])
    own = set(tier.node.ranks)
    written = [
        (file.rank, WrittenFile(file.path, file.kind, file.size, file.crc32))
        for file in manifest.files
        if file.rank in own
    ]
    if not attempt.staging.is_dir():  # no rank of this node had anything to write
        make_staging(attempt, top_mode(tier.shared))
    commit.check_files(attempt.staging, written)
    _remove_different(attempt.staging, manifest, own)
    path = attempt.staging / file_names.MANIFEST_FILE
    write_file(path, [data])
    sync_dir(attempt.staging)


def _remove_different(staging: Path, manifest: Manifest, own: Set[int]) -> None:
    """Removes files that this node's ranks have written as replicas, if the files in the manifest have other bytes.

    Such files would count as copies, because they have the right size. Once they are removed, this node gets real
    copies. `own` has the ranks of this node.
    """
    for position in files_here(staging, manifest):
        file = manifest.files[position]
        if file.rank in own or file.index is None:
            continue
        try:
            read_entries(staging, file)  # this checks only the index, but the index has the CRCs of all tensors
        except CheckpointCorruptError as error:
            logger.warning("%s: is removed, because replicas on other nodes have other bytes: %s", staging, error)
            (staging / file.path).unlink()


def _is_committed_on_node_0(tier: NodeTier, attempt: Attempt) -> bool:
    """Returns True if rank 0's node, which renames first, is known to have committed a save."""
    if tier.number == 0:
        return is_committed(attempt)
    try:
        key = str(attempt.role_dir.relative_to(tier.folder))
        return read_remote_manifest(tier.peer(0), key).attempt == attempt.number
    except (OSError, CheckpointCorruptError):
        return False


def committed_manifest(attempt: Attempt) -> Manifest:
    """Returns the manifest of a save that all nodes have agreed to commit, once this node's lead has committed it.

    Raises CommitError if the save is not committed on this node after `_RENAME_S` seconds, or was replaced by a newer
    save.
    """
    deadline = time.monotonic() + _RENAME_S
    while True:
        with suppress(CheckpointNotFoundError, CheckpointCorruptError):
            manifest = read_manifest(attempt.role_dir)
            if manifest.attempt == attempt.number:
                return manifest
        if time.monotonic() > deadline:
            raise CommitError(f"{attempt.role_dir}: is not committed on this node, or was replaced by a newer save")
        time.sleep(_LOOK_S)


def rename_committed(tier: NodeTier) -> None:
    """Commits, on this node, the saves that all nodes have agreed to commit. Only leads call this function.

    Raises CheckpointError and OSError, like every commit.
    """
    # If such a save stayed in staging, the next save's `remove_staging` would delete the only copy of this node's
    # files.
    while tier.unrenamed:
        attempt = tier.unrenamed[0]
        tier.lock.take(patience_s=0)
        if attempt.staging.is_dir():
            commit.publish(attempt.staging, attempt.role_dir, attempt.number)
        tier.unrenamed.pop(0)


def remove_staging(folder: Path, role: str, owns: Callable[[ManifestSummary], bool]) -> None:
    """Removes the staging folders of a role in this node's folder. Only the lead that holds the lock calls this.

    Staging folders of another run stay if they have a manifest, because other nodes of that run may have committed the
    same save.
    """
    for paths in file_names.step_dirs(folder).values():
        for step_path in paths:
            entries: list[Path] = []
            with suppress(FileNotFoundError):  # another role of the step has just been deleted, and the folder with it
                entries = list(step_path.iterdir())
            for entry in entries:
                work = file_names.parse_work_dir(entry.name)
                if work is not None and work.role == role and all(map(owns, _heads_in(entry))):
                    with commit.taken_away(entry) as away:
                        commit.remove_folder(away)
            end_links_in(step_path, role, alone=True)
            commit.remove_if_empty(step_path)


def _heads_in(staging: Path) -> list[ManifestSummary]:
    try:
        return [read_manifest_summary(staging)]
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return []


def adopt(tier: NodeTier, held: Iterable[HeldRole], attempts: Sequence[str]) -> None:
    """Commits the saves in `attempts` on this node. Only leads call this function.

    Other nodes have committed these saves already.
    """
    for each in held:
        step, role, attempt = each.head.step, each.head.role, each.head.attempt
        if each.is_committed or attempt not in attempts:
            continue
        role_dir = tier.role_dir(step, role)
        try:
            commit.publish(file_names.staging_dir(role_dir, attempt), role_dir, attempt)
        except OSError as error:
            logger.warning(
                "%s: the save is committed on other nodes, but its folder cannot be renamed here: %s", role_dir, error
            )
