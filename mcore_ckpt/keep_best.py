"""Defines the rule `keep_best` of retention: the steps with the best values of a metric stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from mcore_ckpt.errors import InvalidArgumentError

_FORM = 'use ("reward", 3, "max") or "reward:3:max": a metric, how many steps stay, and "max" or "min"'


class KeepBest(NamedTuple):
    """One rule.

    Attributes:
        metric: the name of the metric.
        keep: how many steps stay.
        better: "max" if larger values are better, otherwise "min".
    """

    metric: str
    keep: int
    better: str

    def __str__(self) -> str:
        return f"{self.metric}:{self.keep}:{self.better}"


def keep_best_rules(given: object) -> tuple[KeepBest, ...]:
    """Returns the rules that an option names.

    Args:
        given: one rule or a list of rules. Each rule is a list of metric, count, and "max" or "min", or a text of these
            three with colons in between. None: no rule.

    Raises InvalidArgumentError: something is not a rule, or two rules have the same metric.

    Example:
        >>> keep_best_rules(("reward", 3, "max"))
        (KeepBest(metric='reward', keep=3, better='max'),)
        >>> [str(rule) for rule in keep_best_rules(["val/loss:1:min", ["reward", 3, "max"]])]
        ['val/loss:1:min', 'reward:3:max']
    """
    if given is None:
        return ()
    is_one = isinstance(given, str) or (_is_list(given) and len(given) == 3 and _is_count(given[1]))
    rules = tuple(_rule(each) for each in ([given] if is_one else given if _is_list(given) else [given]))
    metrics = [rule.metric for rule in rules]
    if twice := sorted({metric for metric in metrics if metrics.count(metric) > 1}):
        raise InvalidArgumentError(f"keep_best names the metric {twice[0]!r} twice: give each metric one rule")
    return rules


def _is_list(given: object) -> TypeGuard[Sequence[object]]:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def _is_count(given: object) -> TypeGuard[int]:
    return isinstance(given, int) and not isinstance(given, bool)


def _rule(given: object) -> KeepBest:
    parts = given.rsplit(":", 2) if isinstance(given, str) else given
    if not _is_list(parts) or len(parts) != 3:
        raise InvalidArgumentError(f"keep_best is {given!r}: {_FORM}")
    metric, count, better = parts
    if isinstance(given, str) and isinstance(count, str) and count.isdecimal():
        count = int(count)
    if not isinstance(metric, str) or not metric or not _is_count(count) or count < 1 or better not in ("max", "min"):
        raise InvalidArgumentError(f"keep_best is {given!r}: {_FORM}")
    return KeepBest(metric, count, str(better))
