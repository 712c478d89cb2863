"""Reads the metrics of a checkpoint, such as its reward. Retention uses the metrics to find the best steps.

A metric is a name with a finite number. The manifest contains the metrics that are known at the save. Later metrics are
in a small file of the step (`steps/later_metrics.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError, InvalidTypeError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small

# A listing may read the metrics of thousands of steps. So a checkpoint may have only a few metrics, with short names.
MOST_METRICS = 256
_NAME_LENGTH = 256


def read_metrics(given: object) -> tuple[dict[str, float], list[str]]:
    """Reads the metrics that a trainer gives.

    Args:
        given: the metrics by name: Python numbers, or scalars of NumPy or torch.

    Returns:
        The metrics, and the names of metrics that are NaN or infinite. Such metrics count as missing.

    Raises:
        InvalidTypeError: `given` is not a mapping, or a value is not a number.
        InvalidArgumentError: there are too many metrics, or a name is not a short, printable text.

    Example:
        >>> read_metrics({"reward": 0.7, "loss": float("nan")})
        ({'reward': 0.7}, ['loss'])
    """
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"metrics is a {type(given).__name__}: use a dict, such as {{'reward': 0.7}}")
    if len(given) > MOST_METRICS:
        raise InvalidArgumentError(f"metrics has {len(given)} names: use at most {MOST_METRICS}")
    found = {_name(name): _number(name, value) for name, value in given.items()}
    missing = [name for name, value in found.items() if not math.isfinite(value)]
    return {name: value for name, value in found.items() if name not in missing}, missing


def _name(name: object) -> str:
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > _NAME_LENGTH:
        raise InvalidArgumentError(
            f"metrics has the name {fields.shown(name)}: use a printable text of at most {_NAME_LENGTH} characters"
        )
    return name


def _number(name: str, value: Any) -> float:
    plain = value
    if callable(getattr(value, "item", None)):
        with suppress(RuntimeError, TypeError, ValueError):  # an array that has no number, or several numbers
            plain = value.item()
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise InvalidTypeError(f"metrics has {name} = {fields.shown(value)}: use a number")
    try:
        return float(plain)
    except OverflowError:  # the whole number is too large for a float
        return math.inf


def decode_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics in a record of JSON values; an empty dict if the record has no `metrics`.

    Raises FieldError.
    """
    found = fields.as_dict(record.get("metrics", {}), "metrics")
    if len(found) > MOST_METRICS:
        raise fields.FieldError(f"'metrics' has {len(found)} names, more than {MOST_METRICS}")
    return {fields.as_name(name, "metrics"): _decoded(value) for name, value in found.items()}


def _decoded(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise fields.FieldError(f"'metrics' has {fields.shown(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise fields.FieldError("'metrics' has a number that is too large") from None


def read_later_metrics(path: Path) -> dict[str, float]:
    """Returns the metrics in a file of a step; an empty dict if the file is missing or damaged. Raises nothing."""
    try:
        return decode_metrics({"metrics": fields.decode(read_small(path, limits.SMALL_BYTES))})
    except (OSError, CheckpointCorruptError, fields.FieldError):
        return {}
