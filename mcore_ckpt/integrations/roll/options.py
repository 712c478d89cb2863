"""Reads ROLL's `checkpoint_config`, which holds ROLL's own options and ours. Every worker and the driver get it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import parse_step
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.steps import PreservationPolicy

PIPELINE_ROLE = "pipeline"  # ROLL's name for the driver's role, and for its folder

# These options come from ROLL's own ones: save_only_model, save_hf_model, async_upload, max_ckpt_to_keep, the clusters.
# A remote store is refused, because the copies would lack the driver's role.
_SAID_ELSEWHERE = {
    "save_contents",
    "load_contents",
    "async_save",
    "max_to_keep",
    "keep_every",
    "roles",
    "remote",
    "prune_remote",
    "upload_timeout_s",
}
_OURS = {field.name for field in dataclasses.fields(CheckpointConfig)} - _SAID_ELSEWHERE
_KNOWN = _OURS | {"type", "output_dir", "async_upload", "keep_every", "verify_on_resume"}


@dataclass(frozen=True)
class RollOptions:
    """The options in one `checkpoint_config`.

    Attributes:
        root: `output_dir`, the folder of `checkpoint-{N}`.
        async_upload: training goes on while a checkpoint is written. On by default, as in ROLL.
        verify_on_resume: `resume_from_checkpoint: true` reads all of a checkpoint before it takes it.
        keep_every: with `max_ckpt_to_keep`, steps that are multiples of this stay, too.
        config: our options.
    """

    root: Path
    async_upload: bool
    verify_on_resume: bool
    keep_every: int | None
    config: CheckpointConfig

    def policy(self, pipeline_config: Any) -> PreservationPolicy:
        """Returns which steps stay by `max_ckpt_to_keep`."""
        count = getattr(pipeline_config, "max_ckpt_to_keep", 0)  # 0 keeps all
        return PreservationPolicy(count, self.keep_every) if count else PreservationPolicy()


def read_options(checkpoint_config: Mapping[str, Any]) -> RollOptions:
    """Reads a `checkpoint_config`. Raises InvalidArgumentError for unknown options and an unusable `output_dir`."""
    given = dict(checkpoint_config)
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        known = ", ".join(sorted(_KNOWN))
        raise InvalidArgumentError(f"checkpoint_config has {', '.join(map(repr, unknown))}: the options are {known}")
    output_dir = given.get("output_dir")
    if not output_dir:
        raise InvalidArgumentError("checkpoint_config has no output_dir: name a folder that all nodes share")
    if "${" in str(output_dir):
        raise InvalidArgumentError(
            f"checkpoint_config.output_dir is {output_dir!r}: resolve it first (OmegaConf, resolve=True)"
        )
    return RollOptions(
        root=Path(output_dir).expanduser().absolute(),
        async_upload=bool(given.get("async_upload", True)),
        verify_on_resume=bool(given.get("verify_on_resume", False)),
        keep_every=given.get("keep_every"),
        config=CheckpointConfig(**{name: value for name, value in given.items() if name in _OURS}),
    )


def step_of(ckpt_id: str) -> int:
    """Returns the step of ROLL's `checkpoint-{N}`. Raises InvalidArgumentError."""
    step = parse_step(ckpt_id)
    if step is None:
        raise InvalidArgumentError(f"ckpt_id is {ckpt_id!r}: ROLL names its checkpoints checkpoint-{{step}}")
    return step
