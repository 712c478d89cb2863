"""Adds our options to verl's options for megatron checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from mcore_ckpt.integrations.verl.options import own_options
from mcore_ckpt.integrations.verl.vendor import VENDOR

try:
    from verl.workers.config import McoreCheckpointConfig
except ImportError as error:
    raise ImportError(f"McoreCkptConfig needs verl 0.9 (pip install verl): {error}") from error

logger = logging.getLogger(__name__)

_OwnOptions: Any = dataclasses.make_dataclass(
    "_OwnOptions",
    [(field.name, field.type, dataclasses.field(default=field.default, repr=field.repr)) for field in own_options()],
)


@dataclasses.dataclass
class McoreCkptConfig(_OwnOptions, McoreCheckpointConfig):
    """verl's McoreCheckpointConfig, extended by fields of mcore_ckpt.CheckpointConfig.

    Give this class as `actor_rollout_ref.actor.checkpoint._target_` (or `critic.checkpoint._target_`, or SFT's
    `checkpoint._target_`). Then each process that receives the options uses our engines, and nothing else needs to be
    set.
    """

    def __post_init__(self) -> None:
        choose_engines()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Ray pickles the options of an SFT run for its workers (verl 0.9.1, sft_trainer_ray). Unpickling does not call
        # __post_init__.
        self.__dict__.update(state)
        choose_engines()


def choose_engines() -> None:
    """Registers our engines, and makes verl use them unless VERL_ENGINE_VENDOR names other engines.

    The environment variable is the only way, because verl's `EngineRegistry.get_engine_cls` (0.9.1) ignores the
    options.
    """
    from mcore_ckpt.integrations.verl import engines  # noqa: F401  (registers them)

    if os.environ.setdefault("VERL_ENGINE_VENDOR", VENDOR) != VENDOR:
        logger.warning(
            "VERL_ENGINE_VENDOR is %r, so verl does not use the engines of mcore_ckpt, and the options of mcore_ckpt "
            "have no effect: unset the variable, or set it to %r",
            os.environ["VERL_ENGINE_VENDOR"],
            VENDOR,
        )
