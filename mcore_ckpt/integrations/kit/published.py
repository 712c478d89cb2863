"""Reads the transformers config of the model that a training started from, to write it beside the checkpoints."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def published_config(path: str | None, needed: bool) -> Any:
    """Returns the config of a HuggingFace folder or model name; None without a path.

    Args:
        path: what the framework was given as its HuggingFace model.
        needed: True if a config that cannot be read is an error: the checkpoints get a HuggingFace model, too.
            Otherwise it is a warning, and None is returned. Such a model may have Python code of its own.

    Raises OSError, ValueError: the config is needed, and transformers cannot read it.
    """
    if not path:
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)  # None would prompt the user
    except (OSError, ValueError) as error:
        if needed:
            raise
        logger.warning("%s: no HuggingFace config is written beside the checkpoints: %s", path, error)
        return None
