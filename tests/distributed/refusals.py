"""Loads that must fail on all ranks alike, and leave the training as it was."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of
from tests.distributed.snapshot import assert_same, snapshot
from tests.distributed.training import Training


def refused(training: Training, load: Callable[[], object], expected: type[CheckpointError]) -> list[str]:
    """Each rank's message of a load that must fail, and must not have touched the training."""
    before = snapshot(training)
    error = error_of(load)
    messages = raised_everywhere(expected, error)
    after = snapshot(training)
    with everywhere():
        assert_same(after, before)
    return messages


def refused_load(training: Training, root: Path, expected: type[CheckpointError], **choice: Any) -> list[str]:
    """Each rank's message of a manager's load from this root, which must fail; `choice` are arguments of `load`."""
    manager = manager_of(training, root)
    try:
        return refused(training, lambda: manager.load(**choice), expected)
    finally:
        manager.close()


def assert_names(messages: list[str], *patterns: str) -> None:
    missing = [(pattern, text) for text in messages for pattern in patterns if not re.search(pattern, text)]
    assert not missing, f"the message does not say {missing[0][0]!r}: {missing[0][1]}"
