"""Reads ROLL's `checkpoint_config`, which has ROLL's own options and ours. The driver and every worker receive it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import parse_step
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.integrations.kit.options import kept_count, refuse_fast, refuse_skip
from mcore_ckpt.steps import PreservationPolicy

PIPELINE_ROLE = "pipeline"  # ROLL's name for the driver's role, and for its folder

# ROLL decides these fields by its list of clusters, and by its options save_only_model, save_hf_model, async_upload and
# max_ckpt_to_keep. A remote store is refused, because the copies would lack the driver's role.
_SAID_ELSEWHERE = (
    *("save_contents", "load_contents", "async_save", "max_to_keep", "keep_every", "roles"),
    *("remote", "prune_remote", "upload_timeout_s"),
)
_RULES = ("keep_every", "keep_best", "keep_for")
_ROLLS = {"type", "output_dir", "async_upload", "verify_on_resume", *_RULES}


@dataclass(frozen=True)
class RollOptions:
    """The options in one `checkpoint_config`.

    Attributes:
        root: `output_dir`, the folder that contains each `checkpoint-{N}`.
        async_upload: True if training continues while a checkpoint is written. This is the default, as in ROLL.
        verify_on_resume: True if `resume_from_checkpoint: true` reads all of a checkpoint before choosing it.
        rules: further rules that keep steps if `max_ckpt_to_keep` is set, by the names of CheckpointConfig's fields.
        config: the options of this package.
    """

    root: Path
    async_upload: bool
    verify_on_resume: bool
    rules: Mapping[str, Any]
    config: CheckpointConfig

    @property
    def metrics(self) -> frozenset[str]:
        """The names of the metrics in the rules `keep_best`."""
        return frozenset(rule.metric for rule in PreservationPolicy(1, **self.rules).keep_best)

    def policy(self, pipeline_config: Any) -> PreservationPolicy:
        """Returns the policy that follows from `max_ckpt_to_keep` and the further rules."""
        count = kept_count(getattr(pipeline_config, "max_ckpt_to_keep", 0))
        return PreservationPolicy(count, **self.rules) if count else PreservationPolicy()


def read_options(checkpoint_config: Mapping[str, Any]) -> RollOptions:
    """Reads a `checkpoint_config`. Raises InvalidArgumentError for unknown options and an unusable `output_dir`."""
    given = dict(checkpoint_config)
    ours = {name: value for name, value in given.items() if name not in _ROLLS}
    config = CheckpointConfig.from_dict(ours, "checkpoint_config", but=_SAID_ELSEWHERE)
    refuse_fast(config, "checkpoint_config", "ROLL's driver commits its role of each step only in output_dir")
    refuse_skip(config, "checkpoint_config", "ROLL's driver commits its own role after each save")
    output_dir = given.get("output_dir")
    if not output_dir:
        raise InvalidArgumentError("checkpoint_config has no output_dir: name a folder that all nodes share")
    if "${" in str(output_dir):
        raise InvalidArgumentError(
            f"checkpoint_config.output_dir is {output_dir!r}: resolve it first (OmegaConf, resolve=True)"
        )
    ours = {"async_upload": given.get("async_upload", True), "verify_on_resume": given.get("verify_on_resume", False)}
    for name, value in ours.items():
        check_value(f"checkpoint_config.{name}", value, bool)
    rules = {name: given[name] for name in _RULES if given.get(name) is not None}
    PreservationPolicy(1, **rules)  # raises if a value is not allowed
    return RollOptions(
        root=Path(output_dir).expanduser().absolute(),
        async_upload=ours["async_upload"],
        verify_on_resume=ours["verify_on_resume"],
        rules=rules,
        config=config,
    )


def step_of(ckpt_id: str) -> int:
    """Returns the N of ROLL's `checkpoint-{N}`. Raises InvalidArgumentError for any other name."""
    step = parse_step(ckpt_id)
    if step is None:
        raise InvalidArgumentError(f"ckpt_id is {ckpt_id!r}, but ROLL's checkpoints have names such as checkpoint-100")
    return step
