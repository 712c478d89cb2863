"""Decides which steps stay (the preservation policy) and deletes the other steps, except steps that are in use.

`judge` decides, and needs only the statuses of the steps. The statuses are read from disk each time, so any process can
delete: a trainer after its commit, a restarted trainer, or `mcore-ckpt prune` while a trainer runs.

To add a rule, add a field to `PreservationPolicy`, and a reason to `_Kept.reasons`. So that users can set the rule, add
the field to `config.py`, to `PreservationPolicy.of` (the policy of a trainer), and to `cli/prune.py`. Integrations make
policies from their frameworks' options.

`keep_for` compares the time in the manifest with this host's clock. If a clock was set back, or this host's clock is
behind, a step seems younger than it is, and stays longer. If a clock jumps forward, or this host's clock is ahead,
`keep_for` ends too soon for some steps. No other rule looks at clocks, so the newest `max_to_keep` steps stay in any
case.
"""

from __future__ import annotations

import datetime
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from mcore_ckpt.amounts import duration_text
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.field_checks import check_fields, checked, limited
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.keep_best import KeepBest, keep_best_rules
from mcore_ckpt.steps.choice import abandoned, oldest_first, order_of
from mcore_ckpt.steps.hidden_step import HiddenStep, hide_step
from mcore_ckpt.steps.listing import StepStatus, list_steps
from mcore_ckpt.steps.optimizer_files import drop_optimizer
from mcore_ckpt.steps.owner import write_owner
from mcore_ckpt.steps.read_lock import unread
from mcore_ckpt.steps.step_obstacles import check_may_rename, obstacle_to
from mcore_ckpt.steps.worth import Weighed, look_at_all

logger = logging.getLogger(__name__)


@checked
@dataclass(frozen=True)
class PreservationPolicy:
    """The rules that decide which steps stay. A step stays if one of the rules keeps it, or if it is pinned.

    Attributes:
        max_to_keep: how many of the newest complete steps of each role stay; None keeps all steps.
        keep_every: complete steps whose number is a multiple of this value stay, too, including step 0; None for no
            rule.
        keep_best: for each of these rules, the complete steps with the best values of the rule's metric stay, too.
            Abandoned steps and steps without the metric do not count. Of steps with equal values, the later commit
            counts as better.
        keep_for: complete steps that were saved less than this many seconds ago stay, too; None for no rule.
        optimizer_for_last: how many steps of each role keep the optimizer: the newest of the complete steps that have
            an optimizer. Other steps that stay lose their optimizer, unless they are pinned. None: all steps keep their
            optimizer.

    Example:
        >>> PreservationPolicy(max_to_keep=2, keep_every=1000)
        PreservationPolicy(max_to_keep=2, keep_every=1000)
    """

    max_to_keep: int | None = limited(None, least=1, or_none="to keep every checkpoint")
    keep_every: int | None = limited(None, least=1)
    keep_best: tuple[KeepBest, ...] = ()
    keep_for: float | None = limited(None, above=0, of="seconds")
    optimizer_for_last: int | None = limited(None, least=1)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "keep_best", keep_best_rules(self.keep_best))

    @classmethod
    def of(cls, config: CheckpointConfig, max_to_keep: int | None = None) -> PreservationPolicy:
        """Returns the policy of a trainer. If `max_to_keep` is given, it replaces the configured number."""
        return cls(
            config.max_to_keep if max_to_keep is None else max_to_keep,
            config.keep_every,
            config.keep_best,
            config.keep_for,
            config.optimizer_for_last,
        )


Step = TypeVar("Step", bound=Weighed)

NO_OTHERS: Mapping[str, PreservationPolicy] = MappingProxyType({})


@dataclass(frozen=True)
class RetentionDecision(Generic[Step]):
    """The decision whether a step stays, and its reason.

    Attributes:
        status: the step.
        stays: True if the step stays.
        reason: why the step stays or goes: which rules keep it, or why no rule does.
        loses: the roles that lose their optimizer, sorted.
    """

    status: Step
    stays: bool
    reason: str
    loses: tuple[str, ...] = ()


def too_old(
    statuses: Sequence[Step],
    policy: PreservationPolicy,
    committed: int | None = None,
    spared: Collection[int] = (),
    others: Mapping[str, PreservationPolicy] = NO_OTHERS,
) -> list[Step]:
    """Returns the steps that may be deleted. The arguments are the same as in `judge` and `judge_together`."""
    # The rules for optimizers are left out, because deciding about optimizers would look at files.
    policy, *rules = (replace(each, optimizer_for_last=None) for each in (policy, *others.values()))
    decisions = judge_together(statuses, policy, dict(zip(others, rules, strict=True)), committed, spared)
    return [decision.status for decision in decisions if not decision.stays]


def judge_together(
    statuses: Sequence[Step],
    policy: PreservationPolicy,
    others: Mapping[str, PreservationPolicy],
    committed: int | None = None,
    spared: Collection[int] = (),
) -> list[RetentionDecision[Step]]:
    """Decides as `judge` does, but also keeps the steps and optimizers that the rules of other roles keep.

    `others` are the rules of other roles, by role (`role_rules.py`). The rules of a role count only for steps that have
    the role. A role without `max_to_keep` has no say about steps. A role without `optimizer_for_last` has no say about
    its optimizer.
    """
    decisions = judge(statuses, policy, committed, spared)
    for role, rules in others.items():
        theirs = judge(statuses, rules, committed, spared)
        decisions = [_as_they_decide(role, rules, *pair) for pair in zip(decisions, theirs, strict=True)]
    return decisions


def _as_they_decide(
    role: str, rules: PreservationPolicy, own: RetentionDecision[Step], theirs: RetentionDecision[Step]
) -> RetentionDecision[Step]:
    if role not in own.status.committed | own.status.declared or not theirs.stays:
        return own
    if not own.stays and rules.max_to_keep is not None:
        file = file_names.rules_file(Path(), role)
        return replace(own, stays=True, reason=f"{theirs.reason}, by the rules of {role} ({file})")
    if rules.optimizer_for_last is not None and role not in theirs.loses:
        return replace(own, loses=tuple(each for each in own.loses if each != role))
    return own


def judge(
    statuses: Sequence[Step], policy: PreservationPolicy, committed: int | None = None, spared: Collection[int] = ()
) -> list[RetentionDecision[Step]]:
    """Decides which steps of a root stay, and which lose their optimizer. `statuses` are sorted by step number.

    Returns one decision for each step, in the same order.

    A step that is not understood stays. Such a step has no manifest of this package, or its manifest is damaged, has a
    newer format, or was copied from another step.

    Only steps that have all their files count. So `judge` looks at the files of the newest steps, until enough of them
    are whole, and not at the files of older steps. If a step would count but lacks files, it stays, because it may be a
    copy under way, or the only step that is left. Once enough newer steps are whole, such a step is deleted like any
    other old step.

    The step that was saved last (`committed`) stays with all its files, even if, after a rollback, it is not among the
    newest steps. The `spared` steps, such as the best step, also stay with all their files. Raises OSError or
    RemoteError: the files of a step cannot be looked at.
    """
    newest, lacking = _newest(statuses, policy.max_to_keep)
    given_up = frozenset[int]() if policy.max_to_keep is None else abandoned(statuses)
    best, lacking_best = _best(statuses, policy.keep_best, given_up)
    kept = _Kept(policy, newest, best, {*lacking, *lacking_best}, _now())
    # While no step is complete, another role may still be saving the first step, so nothing is too old.
    needed = [each.commit.number for each in statuses if each.step in newest or each.step == committed]
    oldest_needed = min(needed) if newest else 0
    named = dict.fromkeys(spared, "spared by its number") | ({} if committed is None else {committed: "saved last"})
    with_optimizer, _ = _newest(statuses, policy.optimizer_for_last, having="optimizer")
    decisions = []
    for status in statuses:
        stays = _why_it_stays(status, kept, oldest_needed, named)
        reason = stays or _why_it_goes(status, policy, status.step in given_up)
        loses: tuple[str, ...] = ()
        if stays and policy.optimizer_for_last is not None and status.step not in named:
            loses = _roles_to_strip(status, with_optimizer.get(status.step, ()))
        decisions.append(RetentionDecision(status, stays is not None, reason, loses))
    return decisions


def _roles_to_strip(status: Weighed, among_newest: Collection[str]) -> tuple[str, ...]:
    """Returns the roles of a step that lose their optimizer.

    Only roles with weights lose their optimizer, and only in whole steps.
    """
    if status.pinned or not status.is_claimed:
        return ()
    having = [head.role for head in status.heads if "optimizer" in head.contents and "model" in head.contents]
    roles = tuple(sorted(set(having) - set(among_newest)))
    return roles if roles and status.is_complete else ()


@dataclass(frozen=True)
class _Kept:
    """The steps that the rules keep.

    Attributes:
        policy: the rules.
        newest: the newest steps of each role, as a mapping from step to roles.
        best: the best steps, as a mapping from step to the rules that choose it.
        lacking: the steps that would be among the newest or best, but lack files.
        now: the present time.
    """

    policy: PreservationPolicy
    newest: Mapping[int, Sequence[str]]
    best: Mapping[int, Sequence[KeepBest]]
    lacking: Collection[int]
    now: datetime.datetime

    def reasons(self, status: Weighed) -> list[str]:
        """Describes the rules that keep a complete step."""
        step, policy = status.step, self.policy
        found = []
        if step in self.newest:
            found.append(f"among the newest {policy.max_to_keep} of {', '.join(self.newest[step])}")
        found += [f"among the best {rule.keep} by {_value(status, rule)}" for rule in self.best.get(step, ())]
        if policy.keep_every is not None and step % policy.keep_every == 0:
            found.append(f"a multiple of {policy.keep_every}")
        age_s = None if policy.keep_for is None else _age_s(status, self.now)
        if policy.keep_for is not None and age_s is not None and age_s < policy.keep_for:
            found.append(f"younger than {duration_text(policy.keep_for)}")
        return found


def _value(status: Weighed, rule: KeepBest) -> str:
    return f"{rule.metric} ({rule.better}): {status.metrics[rule.metric]:g}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _age_s(status: Weighed, now: datetime.datetime) -> float | None:
    """Returns how long ago the last role of a step was saved, in seconds; None if no manifest has a time."""
    ages = []
    for head in status.heads:
        with suppress(ValueError):
            created = datetime.datetime.fromisoformat(head.created)
            ages.append((now - (created if created.tzinfo else created.replace(tzinfo=datetime.UTC))).total_seconds())
    return min(ages, default=None)


def _best(
    statuses: Sequence[Weighed], rules: Sequence[KeepBest], given_up: Collection[int]
) -> tuple[dict[int, list[KeepBest]], set[int]]:
    """Returns the best complete steps by each rule, as a mapping from step to rules.

    The second result has the steps that would be among the best, but lack files.
    """
    best, lacking = dict[int, list[KeepBest]](), set[int]()
    claimed = [status for status in statuses if rules and status.is_claimed and status.step not in given_up]
    for rule in rules:
        sign = 1 if rule.better == "max" else -1
        having = [(sign * metrics[rule.metric], each) for each in claimed if rule.metric in (metrics := each.metrics)]
        best_first = [each for _, each in sorted(having, key=lambda pair: (pair[0], order_of(pair[1])), reverse=True)]
        look_at_all(best_first[: rule.keep])
        count = 0
        for each in best_first:
            if count == rule.keep:
                break
            if each.is_complete:
                best.setdefault(each.step, []).append(rule)
                count += 1
            else:
                lacking.add(each.step)
    return best, lacking


def _newest(
    statuses: Sequence[Weighed], count: int | None, having: str | None = None
) -> tuple[dict[int, list[str]], set[int]]:
    """Returns the `count` newest complete steps of each role, as a mapping from step to roles.

    The mapping is empty if `count` is None. Roles can save at different steps. Abandoned steps come after all others,
    so they never take the place of another step. If `having` is given, only steps in which the role has these contents
    count. The second result contains the steps that would be among the newest, but lack files.
    """
    claimed = [] if count is None else [status for status in statuses if status.is_claimed]
    roles = frozenset(role for status in claimed for role in status.committed)
    of_role = {role: _last_first(statuses, role, having) for role in roles}
    found: dict[str, list[Weighed]] = {}
    looked_at: dict[int, Weighed] = {}
    while True:
        # The first pass goes by the manifests alone. Later passes leave out the steps that turned out to lack files.
        found = {role: _may_count(steps, looked_at)[:count] for role, steps in of_role.items()}
        to_look_at = {each.step: each for steps in found.values() for each in steps if each.step not in looked_at}
        if not to_look_at:
            break
        look_at_all(to_look_at.values())
        looked_at |= to_look_at
    newest: dict[int, list[str]] = defaultdict(list)
    for role, steps in sorted(found.items()):
        for each in steps:
            newest[each.step].append(role)
    return newest, {step for step, each in looked_at.items() if not each.is_complete}


def _last_first(statuses: Sequence[Weighed], role: str, having: str | None) -> list[Weighed]:
    """Returns the claimed steps of a role, with the contents `having`, in the order in which a load tries them."""
    last_first = [status for status in reversed(oldest_first(statuses, (role,))) if status.is_claimed]
    if having is None:
        return [status for status in last_first if role in status.committed]
    return [each for each in last_first if any(head.role == role and having in head.contents for head in each.heads)]


def _may_count(steps: Sequence[Weighed], looked_at: Collection[int]) -> list[Weighed]:
    return [each for each in steps if each.step not in looked_at or each.is_complete]


def _why_it_stays(status: Weighed, kept: _Kept, oldest_needed: int, named: Mapping[int, str]) -> str | None:
    if status.pinned:
        return "pinned"
    if not status.is_claimed:
        if status.problems or not status.committed:
            return f"not understood, so it is not deleted: {status.reason}"
        if kept.policy.max_to_keep is None or status.commit.number >= oldest_needed:
            return f"may still become complete: {status.reason}"
        return named.get(status.step)  # no trainer can resume from it
    if kept.policy.max_to_keep is None:
        return "every complete step stays"
    if reasons := kept.reasons(status):
        return "; ".join(reasons)
    if status.step in named:
        return named[status.step]
    return f"does not count, but may be a copy under way: {status.reason}" if status.step in kept.lacking else None


def _why_it_goes(status: Weighed, policy: PreservationPolicy, is_given_up: bool) -> str:
    if not status.is_claimed:
        return f"older than all needed steps, and not complete: {status.reason}"
    by = ", and abandoned by the newest one" if is_given_up else ""
    best = "".join(f", nor among the best {rule.keep} by {rule.metric}" for rule in policy.keep_best)
    return f"not among the newest {policy.max_to_keep} of any role{best}{by}"


def delete_old_steps(
    root: Path,
    policy: PreservationPolicy,
    committed: int | None = None,
    spared: Collection[int] = (),
    others: Mapping[str, PreservationPolicy] = NO_OTHERS,
) -> list[int]:
    """Deletes the steps that the policy does not keep, and returns their numbers. Then removes old optimizers.

    The arguments are the same as in `judge` and `judge_together`.

    A step that cannot be deleted now is left for the next call. Raises OSError: the steps cannot be listed.
    """
    deleted = []
    decisions = judge_together(list_steps(root), policy, others, committed, spared)
    for status in (decision.status for decision in decisions if not decision.stays):
        obstacle = delete_step(status)
        if obstacle is None:
            deleted.append(status.step)
        else:
            logger.info("step %d is too old, but stays for now: %s", status.step, obstacle)
    remove_optimizers(decisions)
    return deleted


def remove_optimizers(decisions: Iterable[RetentionDecision[StepStatus]]) -> None:
    """Removes the optimizers that steps lose by these decisions. Raises nothing.

    An optimizer that cannot be removed is left for the next call.
    """
    for decision in decisions:
        if decision.loses:
            obstacle = drop_optimizer(decision.status, decision.loses)
            step = decision.status.step
            if obstacle is None:
                logger.info("step %d has lost the optimizer of %s", step, ", ".join(decision.loses))
            else:
                logger.info("step %d keeps its optimizer for now: %s", step, obstacle)


def delete_step(status: StepStatus) -> str | None:
    """Deletes one step unless it is in use. Returns the reason why it stays, or None if it is gone.

    Raises nothing, because one step that cannot be deleted must not prevent the deletion of other steps, or the disk
    would fill up.
    """
    try:
        return delete_or_raise(status)
    except OSError as error:
        logger.warning("%s is too old, but stays, because it cannot be deleted: %s", status.path, error)
        return f"it cannot be deleted: {error}"


def delete_or_raise(status: StepStatus, dry_run: bool = False) -> str | None:
    """Does the same as `delete_step`, but raises OSError if the step cannot be deleted. A dry run deletes nothing."""
    try:
        with unread(map(status.role_dir, sorted(status.committed))) as alone:
            obstacle = obstacle_to(status, status.path) if alone else "it is being read"
            if obstacle is not None:
                return obstacle
            check_may_rename(status.path)
            if dry_run:
                return None
            hidden = _hide_unless_changed(status)
            if isinstance(hidden, str):
                return hidden
    except FileNotFoundError:
        return "another process is deleting it"
    except CheckpointCorruptError as error:
        return str(error)
    try:
        left = hidden.remove()
    except KeyboardInterrupt:
        # The step is gone, so remove the rest of its files, too. A second Ctrl-C leaves these files to the next
        # trainer.
        hidden.remove()
        raise
    if left:
        logger.warning(
            "%s is deleted, but not all of its files could be removed: look at %s",
            status.path,
            ", ".join(map(str, left)),
        )
    return None


def discard_step(step_path: Path) -> None:
    """Deletes a step's folder with everything in it. No other process may be using the folder. Raises OSError.

    The folder is renamed first, so that a half-deleted step never looks like a step.
    """
    hidden = hide_step(step_path)
    sync_dir(step_path.parent)
    hidden.remove()


def _hide_unless_changed(status: StepStatus) -> HiddenStep | str:
    """Renames a step to a hidden name.

    If `obstacle_to` then finds an obstacle, renames the step back and returns the obstacle.
    """
    # A half-deleted step must not look like a step. Until the second check below, the owner file shows other processes
    # that this process may still rename the step back.
    with suppress(OSError):  # a full disk is the best reason to delete, and must not prevent the deletion
        write_owner(status.path)
    try:
        hidden = hide_step(status.path)
    except OSError:
        (status.path / file_names.OWNER_FILE).unlink(missing_ok=True)
        raise
    try:
        obstacle = obstacle_to(status, hidden.path)
    except OSError as error:
        obstacle = f"it cannot be checked: {error}"
    if obstacle is not None:
        hidden.put_back()  # first, because other processes remove the files of a hidden step without an owner
        (status.path / file_names.OWNER_FILE).unlink(missing_ok=True)
    with suppress(OSError):  # the renames are done, even if they cannot be made durable
        sync_dir(status.path.parent)
    return hidden if obstacle is None else obstacle
