"""Plans the fill of one tensor from the stored ranges that were located, and says whether the fill rounds values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.locate import Located, Wanted
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.state.trainer import Trainer


def plan_fill(
    wanted: Wanted, dtype: torch.dtype, located: Located, target: Callable[[], torch.Tensor], scaled: bool = False
) -> TensorFill:
    """Plans the fill of a tensor of `dtype` from the stored ranges that were located.

    `scaled` tells whether the tensor keeps its values in a scaled form. In that case the fill rounds the values.

    Raises CheckpointMismatchError: one of the two dtypes is an integer type, so the values cannot be converted.
    """
    stored = located.dtype
    if stored != dtype and not (stored.is_floating_point and (scaled or dtype.is_floating_point)):
        raise CheckpointMismatchError(
            f"{located.reads[0].stored.file if located.reads else wanted.file}: tensor {wanted.key}: wanted dtype "
            f"{dtype}, found {stored}"
        )
    rounding = describe_rounding(wanted.key.kind, stored, dtype, scaled)
    return TensorFill(located.reads, stored, target, padded=bool(located.outside), rounding=rounding)


def describe_rounding(kind: str, stored: torch.dtype, kept: torch.dtype, scaled: bool) -> str | None:
    """Returns a text on how values of one dtype are rounded to another dtype; None if no value is rounded."""
    if not scaled and _is_exact(stored, kept):
        return None
    return f"{kind}: {dtype_name(stored)} to {'scaled ' if scaled else ''}{dtype_name(kept)}"


def refuse_rounding(trainer: Trainer, roundings: Iterable[str | None]) -> None:
    """Raises CheckpointMismatchError if values would be rounded and the config has `strict_dtypes`."""
    rounded = sorted({rounding for rounding in roundings if rounding is not None})
    if rounded and trainer.config.strict_dtypes:
        raise CheckpointMismatchError(
            f"strict_dtypes is set, but this load would round values: {', '.join(rounded)}; use the dtypes and the "
            "layout of the checkpoint, or leave strict_dtypes unset"
        )


def _is_exact(stored: torch.dtype, kept: torch.dtype) -> bool:
    """Returns True if every value of the dtype `stored` is also a value of the dtype `kept`."""
    if stored == kept:
        return True
    from_, to = torch.finfo(stored), torch.finfo(kept)
    return to.eps <= from_.eps and to.max >= from_.max and to.tiny * to.eps <= from_.tiny * from_.eps


def not_there(wanted: Wanted, could_be_skipped: bool = False) -> CheckpointMismatchError:
    """Returns the error for a tensor that the checkpoint does not have.

    `could_be_skipped` says whether the tensor is a frozen parameter, which `skip_frozen` would leave out.
    """
    or_skip = " or, if only trained parameters were saved, set skip_frozen=True" if could_be_skipped else ""
    return CheckpointMismatchError(
        f"{wanted.file}: tensor {wanted.key}: wanted {wanted.region.describe()}, found no such tensor in the "
        f"checkpoint: build the model that was saved{or_skip}"
    )


def replicas_of(trainer: Trainer, expert: bool) -> tuple[int, ...]:
    """Returns the world ranks that share one read of a replicated tensor; empty if each rank reads for itself."""
    if trainer.config.load_replicas == "read":
        return ()
    return trainer.replicas.experts if expert and trainer.topology.experts_apart else trainer.replicas.dense
