"""ROLL's `checkpoint_config`, which every worker and the driver get: ROLL's own words, and our options beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import parse_step
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.steps import PreservationPolicy

PIPELINE_ROLE = "pipeline"  # what ROLL calls the driver's part of a checkpoint, and its folder

# What ROLL says elsewhere, in its own words: save_only_model, save_hf_model, async_upload, max_ckpt_to_keep, the
# clusters. Remote copies would lack the driver's part.
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
    """One `checkpoint_config`.

    Attributes:
        root: `output_dir`, the folder of `checkpoint-{N}`.
        async_upload: as in ROLL, on if nothing is said: training goes on while a checkpoint is written.
        verify_on_resume: `resume_from_checkpoint: true` reads all of a checkpoint before it is taken.
        keep_every: with `max_ckpt_to_keep`, steps that are multiples of this stay too.
        config: our options.
    """

    root: Path
    async_upload: bool
    verify_on_resume: bool
    keep_every: int | None
    config: CheckpointConfig

    def policy(self, pipeline_config: Any) -> PreservationPolicy:
        """What `max_ckpt_to_keep` lets stay."""
        count = getattr(pipeline_config, "max_ckpt_to_keep", 0)  # 0 is for all
        return PreservationPolicy(count, self.keep_every) if count else PreservationPolicy()


def read_options(checkpoint_config: Mapping[str, Any]) -> RollOptions:
    """Raises ValueError for an option that nobody knows, and for a folder that is none."""
    given = dict(checkpoint_config)
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        known = ", ".join(sorted(_KNOWN))
        raise ValueError(f"checkpoint_config has {', '.join(map(repr, unknown))}: the options are {known}")
    output_dir = given.get("output_dir")
    if not output_dir:
        raise ValueError("checkpoint_config has no output_dir: name a folder that all nodes share")
    if "${" in str(output_dir):
        raise ValueError(f"checkpoint_config.output_dir is {output_dir!r}: resolve it first (OmegaConf, resolve=True)")
    return RollOptions(
        root=Path(output_dir).absolute(),
        async_upload=bool(given.get("async_upload", True)),
        verify_on_resume=bool(given.get("verify_on_resume", False)),
        keep_every=given.get("keep_every"),
        config=CheckpointConfig(**{name: value for name, value in given.items() if name in _OURS}),
    )


def step_of(ckpt_id: str) -> int:
    """The step of ROLL's `checkpoint-{N}`. Raises ValueError."""
    step = parse_step(ckpt_id)
    if step is None:
        raise ValueError(f"ckpt_id is {ckpt_id!r}: ROLL names its checkpoints checkpoint-{{step}}")
    return step
