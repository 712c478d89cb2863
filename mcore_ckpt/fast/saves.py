"""Holds what saves into the fast tier share: which step is durable, the copies on other nodes, and which steps stay."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.config import FastTier
from mcore_ckpt.fast.copies import Copies
from mcore_ckpt.fast.drains import Drains
from mcore_ckpt.fast.found import found_on_nodes, own_held
from mcore_ckpt.fast.tier import NodeTier, open_tier
from mcore_ckpt.io.disk_watch import DiskWatch
from mcore_ckpt.ranks.deadlines import deadline_after, seconds_until
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps.choice import order_of
from mcore_ckpt.steps.commit import new_attempt
from mcore_ckpt.steps.handed_over import end_links_in
from mcore_ckpt.steps.listing import step_status
from mcore_ckpt.steps.node_steps import FastCheckpoint, safest
from mcore_ckpt.steps.pins import is_pinned
from mcore_ckpt.steps.worth import lack_of

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class FastSaves:
    """The state that all saves of one manager into the fast tier share.

    Attributes:
        drain_agreement: connects this rank with the other ranks, for rounds on the thread that copies to the root.
        save_count: how many saves into the tier the training has begun. Rank 0's count decides.
        next_is_durable: whether the next step is durable; None if the count of saves decides.
        earlier: the checkpoints that earlier managers have left on the nodes. Only rank 0 knows these checkpoints.
        agreements: the agreements of `copies` and `drains`, which `close` closes, too.
    """

    tier: NodeTier
    copies: Copies
    drains: Drains
    drain_agreement: Agreement
    save_count: int = 0
    next_is_durable: bool | None = None
    earlier: Sequence[FastCheckpoint] = ()
    agreements: Sequence[Agreement] = ()
    _attempts: dict[int, str] = field(default_factory=dict)
    _owes_durable: bool = False

    def wait_before_durable(self) -> None:
        """Waits for an earlier step that is being copied to the root, if the next step also goes to the root.

        Every rank calls this method before the round in which the save begins. If a rank waited in the round, the other
        ranks could give up waiting for this rank.
        """
        if self.must_wait_for_root():
            if self.tier.rank == 0:
                logger.warning("the training waits until an earlier step is in the root: use a larger durable_every")
            self.drains.wait_for_copy()

    def must_wait_for_root(self) -> bool:
        """Returns True if the next step also goes to the root, to which an earlier step is still being copied."""
        is_due, _ = self.plan_durable()
        return is_due and self.drains.busy

    def wait_for_copies_of(self, step: int, timeout: float | None = None) -> bool:
        """Waits until no copy of a step is under way, neither to other nodes nor to the root.

        Without this wait, a file of an earlier save of the step could reach a node after the new save. This file would
        then count as a file of the new save. Returns False if a copy is still under way after `timeout` seconds.
        """
        deadline = deadline_after(timeout)
        try:
            self.copies.wait(timeout, step)
        except TimeoutError:
            return False
        return self.drains.wait_for_copy(step, seconds_until(deadline))

    def plan_durable(self) -> tuple[bool, int]:
        """Returns whether the next save also goes to the root, and how many saves have begun, counting the next save.

        All roles choose the same steps, because each role counts its saves. If a role's save or the copy of this save
        to the root fails, the role saves its next step to the root instead, and goes on counting.
        """
        every, count = self.tier.config.durable_every, self.save_count + 1
        if every is not None and self.next_is_durable is not None:
            return self.next_is_durable, count
        is_owed = self._owes_durable or self.drains.has_failed
        return every is not None and (count % every == 0 or is_owed), count

    def begun(self, save_count: int, is_durable: bool) -> None:
        """Notes that all ranks have begun a save."""
        self.save_count, self._owes_durable, self.next_is_durable = save_count, is_durable, None

    def committed(self, step: int, attempt: str, save_count: int) -> None:
        """Notes that a step is committed in the fast tier."""
        self.save_count, self._owes_durable = save_count, False
        self._attempts[step] = attempt

    def found(self, save_count: int, safest: Iterable[tuple[int, str]]) -> None:
        """Notes how many saves earlier managers have begun, and which of these saves may count as completely copied."""
        self.save_count = save_count
        for step, attempt in safest:
            self._attempts[step] = attempt
            self.copies.mark_complete(attempt)

    def loaded(self, manifest: Manifest) -> None:
        """Notes that the training goes on from a checkpoint."""
        self.save_count = 0 if manifest.placement is None else manifest.placement.save_count

    def retire_old(self, step: int) -> list[Path]:
        """Moves old steps in this node's folder aside, after the commit of `step`, and returns the folders to delete.

        Only leads call this method, on the save's thread, so that no later save of a moved step is under way. Deleting
        the folders takes longer, and may be done later.

        The newest `keep` steps stay. The newest step with complete copies stays, too, because without this step a lost
        node could cost all steps. If this node has lost its part of a step, the step does not count as one of the
        newest `keep` steps. But the step stays while an older step stays, because other nodes may need the files that
        are left. Steps that `step` has abandoned are moved. Steps of another run, and steps that are pinned in this
        node's folder, stay.
        """
        on_branch, given_up = self._last_first(step)
        there = [*on_branch, *given_up]
        kept = self._newest_kept(on_branch)
        complete = [number for number in there if self._is_complete(number)]
        needed = self.copies.needed() | self.drains.needed()
        stays = {*kept, *complete[:1], *(number for number in there if self._attempts.get(number) in needed)}
        stays |= {number for number in there if is_pinned(self.tier.role_dir(number).parent)}
        retired = []
        for number in there:
            if number in stays:
                continue
            role_dir = self.tier.role_dir(number)
            aside = file_names.replaced_dir(role_dir, new_attempt())
            try:
                # Without its manifest, the folder is not a checkpoint, even if this process dies now.
                (role_dir / file_names.MANIFEST_FILE).unlink(missing_ok=True)
                os.rename(role_dir, aside)
            except OSError as error:
                logger.warning("%s: cannot be deleted, so the fast tier holds more than it should: %s", role_dir, error)
                continue
            self._attempts.pop(number, None)
            retired.append(aside)
        return retired

    def _last_first(self, committed: int) -> tuple[list[int], list[int]]:
        """Returns this run's steps on this node, the latest commit first.

        The first list has the steps in the branch of the step `committed`, the second list has all other steps.
        """
        here = [step for step in file_names.step_dirs(self.tier.folder) if self.tier.role_dir(step).is_dir()]
        statuses = {step: step_status(self.tier.role_dir(step).parent) for step in here}
        last = statuses[committed].commit
        saved = next((head.run for head in statuses[committed].heads if head.run is not None), None)
        ours = self.tier.ownership(saved)
        own = [each for each in statuses.values() if all(map(ours.owns, each.heads))]
        own.sort(key=order_of, reverse=True)
        on_branch = [each.step for each in own if last.leads_from(each.commit.number)]
        return on_branch, [each.step for each in own if not last.leads_from(each.commit.number)]

    def _newest_kept(self, steps: Sequence[int]) -> list[int]:
        """Returns the newest steps, up to and including the `keep`-th step whose part this node still has."""
        count = 0
        for position, step in enumerate(steps):
            # The commit has just checked the files of the newest step, so this step needs no second check.
            count += position == 0 or self._has_its_part(step)
            if count == self.tier.config.keep:
                return list(steps[: position + 1])
        return list(steps)

    def _has_its_part(self, step: int) -> bool:
        try:
            return lack_of(self.tier.role_dir(step), in_node_folder=True) is None
        except OSError as error:
            logger.warning("step %d of the fast tier cannot be looked at, and does not count: %s", step, error)
            return False

    def _is_complete(self, step: int) -> bool:
        attempt = self._attempts.get(step)
        return attempt is not None and self.copies.is_complete(attempt)

    def wait(self) -> None:
        """Waits until no step is being copied, neither to other nodes nor to the root."""
        self.drains.wait()
        self.copies.wait()

    def close(self) -> None:
        """Ends the threads, and closes this node's server."""
        self.copies.close()
        self.tier.close()
        for agreement in self.agreements:
            agreement.close()


def open_fast_saves(trainer: Trainer, config: FastTier) -> FastSaves:
    """Opens the fast tier of one manager. Every rank calls this function. Raises the errors of `open_tier`."""
    tier = open_tier(trainer.agreement, config, trainer.role, trainer.root, trainer.config.shared_with_group)
    try:
        return _opened(trainer, tier)
    except BaseException:
        tier.close()
        raise


def _opened(trainer: Trainer, tier: NodeTier) -> FastSaves:
    config = tier.config
    agreements = trainer.agreement.for_thread("copies"), trainer.agreement.for_thread("drains")
    for agreement in agreements:
        agreement.runner = DiskWatch(agreement.timeout_s, who=f"rank {agreement.rank}: ")
    if config.durable_every is None and not config.replicas and trainer.agreement.is_coordinator:
        logger.warning(
            "the fast tier has replicas=0 and durable_every=None, so a lost node loses all checkpoints: use replicas=1 "
            "or more, or a shared root with durable_every"
        )
    earlier: list[FastCheckpoint] = []
    saves = FastSaves(
        tier, Copies(agreements[0], tier), Drains(), agreements[1], earlier=earlier, agreements=agreements
    )
    saves.found(*_found_together(trainer.agreement, tier, earlier))
    return saves


def _found_together(
    agreement: Agreement, tier: NodeTier, earlier: list[FastCheckpoint]
) -> tuple[int, list[tuple[int, str]]]:
    """Returns the arguments of `FastSaves.found`, and on rank 0 fills `earlier`. Every rank calls this."""

    def work() -> Record:
        if tier.is_lead:
            for step_path in chain.from_iterable(file_names.step_dirs(tier.folder).values()):
                end_links_in(step_path, tier.role, alone=False)
        return {"held": [each.to_record() for each in own_held(tier) if each.head.role == tier.role]}

    def combine(records: Sequence[Record]) -> Record:
        found = found_on_nodes(tier, records)
        earlier.extend(found)
        newest = next((each.save_count for each in found if each.is_committed), 0)
        kept = [(each.step, each.attempt) for each in safest(found, tier.config.replicas)]
        return {"save_count": newest, "safest": kept}

    outcome = decide(agreement, "looking for earlier steps in the fast tier", work, combine)
    return outcome["save_count"], [(step, attempt) for step, attempt in outcome["safest"]]
