"""The owners of folders that other processes than the test's own have made."""

import os

from mcore_ckpt.ranks.hosts import this_host
from mcore_ckpt.steps import owner
from mcore_ckpt.steps.owner import Owner


def owner_of_process(pid: int) -> Owner:
    """A living process of this host, such as the one that started this one."""
    stat = owner._stat_of(pid)
    return Owner(this_host(), pid, 0 if stat is None else owner._start_in(stat))


def parent() -> Owner:
    """The process that started this one: it is alive, and it is another one."""
    return owner_of_process(os.getppid())
