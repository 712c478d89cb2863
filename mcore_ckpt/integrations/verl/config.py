"""Adds our options to verl's options for megatron checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
from importlib.util import find_spec
from typing import Any

from mcore_ckpt.integrations.verl.options import own_options
from mcore_ckpt.integrations.verl.vendor import VENDOR

try:
    from verl.trainer.config import CheckpointConfig
except ImportError as error:
    raise ImportError(f"McoreCkptConfig needs verl 0.6 or newer (pip install verl): {error}") from error
try:
    from verl.workers.config import McoreCheckpointConfig
except ImportError:
    McoreCheckpointConfig = CheckpointConfig  # verl 0.6 to 0.8 have one class for all engines

logger = logging.getLogger(__name__)

_OwnOptions: Any = dataclasses.make_dataclass(
    "_OwnOptions",
    [(field.name, field.type, dataclasses.field(default=field.default, repr=field.repr)) for field in own_options()],
)


@dataclasses.dataclass
class McoreCkptConfig(_OwnOptions, McoreCheckpointConfig):
    """verl's options for megatron checkpoints, extended by fields of mcore_ckpt.CheckpointConfig.

    Give this class as `actor_rollout_ref.actor.checkpoint._target_` (or `critic.checkpoint._target_`, or SFT's
    `checkpoint._target_`). Then each process that receives the options uses our engines and workers, and nothing else
    needs to be set.
    """

    def __post_init__(self) -> None:
        switch_over()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Ray pickles the options of a critic (verl 0.6 to 0.9, `RayPPOTrainer.init_workers`) and of an SFT run
        # (sft_trainer_ray) for the workers. Unpickling does not call __post_init__, so switch over here.
        self.__dict__.update(state)
        switch_over()


def switch_over() -> None:
    """Makes any installed version of verl use this package, unless VERL_ENGINE_VENDOR names other engines.

    The environment variable is the only way in verl 0.9, because its `EngineRegistry.get_engine_cls` (0.9.1) ignores
    the options.
    """
    from mcore_ckpt.integrations.verl import engines

    if engines.HAS_VENDORS:
        _choose_vendor()
    elif find_spec("verl.workers.megatron_workers") is not None:
        from mcore_ckpt.integrations.verl import workers  # noqa: F401  (the import replaces verl's manager)


def _choose_vendor() -> None:
    if os.environ.setdefault("VERL_ENGINE_VENDOR", VENDOR) != VENDOR:
        logger.warning(
            "VERL_ENGINE_VENDOR is %r, so verl does not use the engines of mcore_ckpt, and the options of mcore_ckpt "
            "have no effect: unset the variable, or set it to %r",
            os.environ["VERL_ENGINE_VENDOR"],
            VENDOR,
        )
