"""Reads config and tokenizer of the model that a training started from, to write them into the checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def published_config(path: str | None, needed: bool) -> Any:
    """Returns the transformers config of a HuggingFace folder or model name; None without a path.

    If `needed` (the checkpoints also get a HuggingFace model), a config that cannot be read is an error. Otherwise a
    warning is logged, and None is returned. For example, a config cannot be read if reading needs the model's own
    Python code.

    Raises OSError, ValueError: the config is needed, and transformers cannot read it.
    """
    if not path:
        return None
    from transformers import AutoConfig

    return _read(path, "config", AutoConfig.from_pretrained, needed)


def published_tokenizer(path: str | None) -> Any:
    """Returns the tokenizer of a HuggingFace folder or model name; None, with a warning, if it cannot be read."""
    if not path:
        return None
    from transformers import AutoTokenizer

    return _read(path, "tokenizer", AutoTokenizer.from_pretrained, needed=False)


def _read(path: str, what: str, read: Callable[..., Any], needed: bool) -> Any:
    try:
        return read(path, trust_remote_code=False)  # trust_remote_code=None would prompt the user
    except (OSError, ValueError) as error:
        if needed:
            raise
        logger.warning(
            "%s: the HuggingFace %s cannot be read, so the checkpoints will not contain it: %s", path, what, error
        )
        return None
