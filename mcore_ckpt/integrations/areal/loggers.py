"""Keeps this package's log messages visible under AReaL."""

from __future__ import annotations

import logging
import sys


def enable_loggers() -> None:
    """Enables the loggers of this package again.

    AReaL (1.0.4, `areal.utils.logging.getLogger`) disables all existing loggers whenever it makes a new one. Without
    this call, warnings (that a checkpoint was skipped, or that none was found) would not be logged.
    """
    for name, module in list(sys.modules.items()):
        logger = getattr(module, "logger", None) if name.startswith("mcore_ckpt.") else None
        if isinstance(logger, logging.Logger):
            logger.disabled = False
