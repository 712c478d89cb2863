"""Gives AReaL's Megatron engines (1.0.4) our checkpointer.

Use these classes in place of AReaL's. A controller tells its workers the dotted path of the class, and each worker
imports the class:

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

# Only type checkers need a base class here. At run time `CheckpointedEngine` is a mixin, and each engine class below
# names AReaL's engine as its second base.
_Engine: Any = areal.MegatronEngine if TYPE_CHECKING else object

logger = logging.getLogger(__name__)

# A value of `SaveLoadMeta.weight_format`. Our Saver requests an async export with this value, because no other field
# reaches workers in other processes.
HF_ASYNC = "hf_async"


class CheckpointedEngine(_Engine):
    """A mixin that gives one of AReaL's Megatron engines our checkpointer. The mixin must be the first base.

    Attributes:
        checkpoint_config: options that a subclass may set. AReaL's own option (`actor.megatron.async_save`) overrides
            `async_save`.
    """

    checkpoint_config: ClassVar[CheckpointConfig] = CheckpointConfig()
    checkpointer: Any

    def _create_optimizer(self, ft_spec: FinetuneSpec) -> None:
        super()._create_optimizer(ft_spec)
        # Like AReaL, make no checkpointer for an engine without an optimizer (the reference model). But make one for an
        # engine with adapters: AReaL does not, because its own checkpointer needs a distributed optimizer.
        has_adapters = self.config.use_lora and self.optimizer is not None
        if self.checkpointer is not None or has_adapters:
            config = dataclasses.replace(self.checkpoint_config, async_save=self.mcore_config.async_save)
            if has_adapters:  # the engine fills the base model from the base model's own files
                config = dataclasses.replace(config, skip_frozen=True)
            self.checkpointer = Checkpointer(
                self.model,
                self.optimizer,
                self.lr_scheduler,
                hf_config=self.hf_config,
                processing_class=self.processor or self.tokenizer,
                config=config,
            )

    def save(self, meta: SaveLoadMeta) -> None:
        """Saves like AReaL's engine. With the weight format "hf_async", returns as soon as the model may change."""
        wait = meta.weight_format != HF_ASYNC
        if wait and meta.weight_format != "hf":
            super().save(meta)
            return
        stock = dataclasses.replace(meta, weight_format="hf")
        # AReaL's engine handles these cases. For adapters, the engine uses Megatron-Bridge.
        if meta.with_optim or self.config.use_lora or not isinstance(self.checkpointer, Checkpointer):
            super().save(stock)
            return
        try:
            with self._offload_aware_context():
                self.checkpointer.export(meta.path, meta.processor or meta.tokenizer, wait=wait)
        except UnsupportedError as error:
            logger.warning(
                "AReaL's own engine exports this model, so the folder is visible before it is complete: %s", error
            )
            super().save(stock)

    def wait_async_saves(self) -> None:
        """Waits until no save and no export is under way. Raises CheckpointError if one of them failed."""
        if self.checkpointer is not None:
            self.checkpointer.wait_async_saves()


class MegatronPPOActor(CheckpointedEngine, areal.MegatronPPOActor):
    """AReaL's engine of this name with our checkpointer."""


class MegatronPPOCritic(CheckpointedEngine, areal.MegatronPPOCritic):
    """AReaL's engine of this name with our checkpointer."""


class MegatronLMEngine(CheckpointedEngine, areal.MegatronLMEngine):
    """AReaL's engine of this name with our checkpointer."""


class MegatronRWEngine(CheckpointedEngine, areal.MegatronRWEngine):
    """AReaL's engine of this name with our checkpointer."""


class MegatronDPOEngine(CheckpointedEngine, areal.MegatronDPOEngine):
    """AReaL's engine of this name with our checkpointer."""


def is_checkpointed(engine: Any) -> bool:
    """True for a CheckpointedEngine, and for a controller of such engines in other processes."""
    engine_class = getattr(engine, "train_engine", type(engine))
    return isinstance(engine_class, type) and issubclass(engine_class, CheckpointedEngine)
