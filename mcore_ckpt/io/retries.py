"""Retries failed operations on a remote store, with growing pauses between the tries."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from mcore_ckpt.errors import CheckpointError, RemoteError, may_pass

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# How many times an operation is tried, and the first and the longest pause between two tries, in seconds. Each pause is
# up to twice as long as the previous one.
REMOTE_TRIES = 6
REMOTE_PAUSE_S = 1.0
REMOTE_PAUSE_MOST_S = 30.0


def persist(
    url: str,
    what: str,
    work: Callable[[], Result],
    redacted: Callable[[BaseException], str],
    stop: threading.Event,
    answers: tuple[type[Exception], ...],
) -> Result:
    """Runs `work`, which must be repeatable, until it succeeds, and returns its result.

    Exceptions in `answers`, such as FileNotFoundError, are answers of the store and not failures. These exceptions, and
    CheckpointErrors, are raised without another try. `redacted` turns an error into text without secrets.

    Raises RemoteError if all tries failed, if a try failed for a lasting reason, or if `stop` was set.
    """
    pause = REMOTE_PAUSE_S
    for number in range(1, REMOTE_TRIES + 1):
        if stop.is_set():
            raise RemoteError(f"{url}: {what} was stopped")
        try:
            return work()
        except CheckpointError:
            raise
        except answers:
            raise
        except Exception as error:
            stays = isinstance(error, OSError) and not may_pass(error)
            if number == REMOTE_TRIES or stays:
                tries = f"{number} times; the last error" if number > 1 else "once, for a lasting reason"
                raise RemoteError(
                    f"{url}: {what} has failed {tries}: {redacted(error)}. "
                    "Check that the store can be reached and that this process may use it"
                ) from None
            logger.info("%s: %s has failed, trying again: %s", url, what, redacted(error))
        # After an outage all ranks try again. Random pauses keep the requests of the ranks from arriving at the same
        # moment.
        stop.wait(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, REMOTE_PAUSE_MOST_S)
    raise AssertionError("unreachable: the last try returns or raises")
