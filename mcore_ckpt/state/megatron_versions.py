"""Lists the supported versions of megatron-core. All other code asks for features, never for a version."""

from __future__ import annotations

import functools
import logging
import re

from mcore_ckpt.errors import UnsupportedError

logger = logging.getLogger(__name__)

# The versions that the tests use, oldest first.
TESTED = ("0.16", "0.17", "0.18", "0.19")
# 0.15 is not in TESTED, because only the tests of verl 0.6 use it. verl 0.6 does not run with newer versions.
_FIRST = (0, 15)


def check_megatron() -> None:
    """Checks the installed megatron-core. Logs a warning for an untested version, once per process.

    Raises UnsupportedError if the version is known not to work.
    """
    from megatron.core import __version__

    check_version(__version__)


@functools.cache
def check_version(version: str) -> None:
    """Checks one version of megatron-core. Logs the warning only at the first call with this version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else None
    if number is not None and number < _FIRST:
        raise UnsupportedError(
            f"megatron-core {version} is not supported: use one of the versions {TESTED[0]} to {TESTED[-1]}"
        )
    if number is None or f"{number[0]}.{number[1]}" not in TESTED:
        logger.warning(
            "megatron-core %s has not been tested with mcore_ckpt; versions %s to %s have. Before you rely on it, save "
            "a checkpoint and load it",
            version,
            TESTED[0],
            TESTED[-1],
        )
