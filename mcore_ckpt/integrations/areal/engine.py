"""AReaL's Megatron engines with our checkpointer. Their controllers start workers by the dotted path of these classes.

actor = MegatronPPOActor.as_controller(config, scheduler)
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, ClassVar

from areal.engine import megatron_engine as areal

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.areal.checkpointer import Checkpointer

if TYPE_CHECKING:
    from areal.api import FinetuneSpec, SaveLoadMeta

# Each of the classes below has it from its other base: two of them here would be one too many for super().
_Engine: Any = areal.MegatronEngine if TYPE_CHECKING else object

logger = logging.getLogger(__name__)

# `SaveLoadMeta.weight_format` travels to workers in other processes; what else our Saver wants to say does not.
HF_ASYNC = "hf_async"


class CheckpointedEngine(_Engine):
    """Before a MegatronEngine in the list of bases.

    `checkpoint_config` may be set in a subclass; `async_save` is AReaL's (`actor.megatron.async_save`).
    """

    checkpoint_config: ClassVar[CheckpointConfig] = CheckpointConfig()
    checkpointer: Any

    def _create_optimizer(self, ft_spec: FinetuneSpec) -> None:
        super()._create_optimizer(ft_spec)
        # AReaL's has none either without an optimizer (ref), nor for adapters.
        if self.checkpointer is not None:
            config = dataclasses.replace(self.checkpoint_config, async_save=self.mcore_config.async_save)
            self.checkpointer = Checkpointer(
                self.model,
                self.optimizer,
                self.lr_scheduler,
                hf_config=self.hf_config,
                processing_class=self.processor or self.tokenizer,
                config=config,
            )

    def save(self, meta: SaveLoadMeta) -> None:
        """As AReaL's; the weight format "hf_async" returns as soon as the model may change again."""
        wait = meta.weight_format != HF_ASYNC
        if wait and meta.weight_format != "hf":
            super().save(meta)
            return
        stock = dataclasses.replace(meta, weight_format="hf")
        # Adapters alone are written by Megatron-Bridge.
        if meta.with_optim or self.config.use_lora or not isinstance(self.checkpointer, Checkpointer):
            super().save(stock)
            return
        try:
            with self._offload_aware_context():
                self.checkpointer.export(meta.path, meta.processor or meta.tokenizer, wait=wait)
        except UnsupportedError as error:
            logger.warning("exporting as AReaL does, into a folder that is there before it is whole: %s", error)
            super().save(stock)

    def wait_async_saves(self) -> None:
        """Returns once no save and no export is under way. Raises CheckpointError: one has failed."""
        if self.checkpointer is not None:
            self.checkpointer.wait_async_saves()


class MegatronPPOActor(CheckpointedEngine, areal.MegatronPPOActor):
    """AReaL's, with our checkpointer."""


class MegatronPPOCritic(CheckpointedEngine, areal.MegatronPPOCritic):
    """AReaL's, with our checkpointer."""


class MegatronLMEngine(CheckpointedEngine, areal.MegatronLMEngine):
    """AReaL's, with our checkpointer."""


class MegatronRWEngine(CheckpointedEngine, areal.MegatronRWEngine):
    """AReaL's, with our checkpointer."""


class MegatronDPOEngine(CheckpointedEngine, areal.MegatronDPOEngine):
    """AReaL's, with our checkpointer."""


def is_checkpointed(engine: Any) -> bool:
    """Whether an engine is of these classes, or a controller of such engines in other processes."""
    engine_class = getattr(engine, "train_engine", type(engine))
    return isinstance(engine_class, type) and issubclass(engine_class, CheckpointedEngine)
