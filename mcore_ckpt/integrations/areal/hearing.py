"""What this package has to say reaches somebody, whatever AReaL does to loggers."""

from __future__ import annotations

import logging
import sys


def be_heard() -> None:
    """Whenever AReaL makes a logger (1.0.4, `areal.utils.logging.getLogger`) it disables all that are there: that a
    checkpoint was passed over, or that nothing was found, would be said to nobody."""
    for name, module in list(sys.modules.items()):
        logger = getattr(module, "logger", None) if name.startswith("mcore_ckpt.") else None
        if isinstance(logger, logging.Logger):
            logger.disabled = False
