"""Gives AReaL's trainers (1.0.4) our engines, Evaluator, Saver and RecoverHandler.

    from areal import PPOTrainer

    class Trainer(CheckpointedTrainer, PPOTrainer):
        pass

A trainer makes these objects in `__init__`, and recovers in the same method. So each object must be replaced as soon
as the trainer assigns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from areal.utils.environ import is_single_controller

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.areal import engine as ours
from mcore_ckpt.integrations.areal.evaluator import Evaluator
from mcore_ckpt.integrations.areal.recover import RecoverHandler
from mcore_ckpt.integrations.areal.saver import Saver

T = TypeVar("T")


class _Replaced(Generic[T]):
    """A descriptor. When AReaL assigns its own object to the attribute, the attribute gets our object instead."""

    def __init__(self, make: Callable[[Any, Any], T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, trainer: Any, stock: Any) -> None:
        trainer.__dict__[self._name] = self._make(trainer, stock)

    def __get__(self, trainer: Any, owner: type) -> T:
        try:
            found: T = trainer.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{owner.__name__}.{self._name} has not been assigned yet") from None
        return found


def _handler(trainer: Any, stock: Any) -> Any:
    """Returns our handler if all trained engines are ours, and AReaL's handler if none is.

    Other engines write no manifest, so no step would be complete.
    """
    engines = {name: getattr(trainer, name, None) for name in ("actor", "critic")}
    engines = {name: engine for name, engine in engines.items() if engine is not None}
    others = [name for name, engine in engines.items() if not ours.is_checkpointed(engine)]
    if others and len(others) == len(engines):
        return stock
    if others:
        raise UnsupportedError(
            f"{', '.join(others)} is not of the megatron backend, but another engine of this trainer is. Recovery "
            "needs the same backend for all of them: give all of them the megatron backend, or use AReaL's own trainer"
        )
    critic = {"critic": engines["critic"]} if "critic" in engines else {}
    return RecoverHandler(
        stock.config,
        stock.ft_spec,
        keep=trainer.steps_to_keep,
        others=critic,
        shared_with_group=trainer.shared_with_group,
        data_begins_anew=trainer.data_begins_anew,
    )


class CheckpointedTrainer:
    """A mixin that gives our engines, Evaluator, Saver and RecoverHandler to one of AReaL's trainers.

    The mixin must be the first base.

    Engines with another backend than megatron stay AReaL's own. A trainer without a megatron engine keeps AReaL's
    recovery.

    Attributes:
        steps_to_keep: how many complete recovery steps stay on disk. A subclass may set it.
        shared_with_group: as in CheckpointConfig, for the folder of these steps. A subclass may set it.
        data_begins_anew: as in RecoverHandler. A subclass may set it.
    """

    steps_to_keep = 1
    shared_with_group: bool | None = None
    data_begins_anew = False

    evaluator = _Replaced(lambda trainer, stock: Evaluator(stock.config, stock.ft_sepc))  # sic: AReaL's name
    saver = _Replaced(lambda trainer, stock: Saver(stock.config, stock.ft_spec))
    recover_handler = _Replaced(_handler)

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        """Makes the actor, the reference model and the teacher of PPOTrainer."""
        if alloc.backend != "megatron":
            return super()._create_train_engine(actor_config, alloc)  # type: ignore[misc]
        return self._started(ours.MegatronPPOActor, actor_config, alloc)

    def _create_critic(self, critic_config: Any, alloc: Any) -> Any:
        if alloc.backend != "megatron":
            return super()._create_critic(critic_config, alloc)  # type: ignore[misc]
        return self._started(ours.MegatronPPOCritic, critic_config, alloc)

    def _create_actor(self, actor_config: Any) -> Any:
        """Makes the actor, the only engine that the SFT, reward-model and DPO trainers have."""
        alloc = self.actor_alloc  # type: ignore[attr-defined]
        if alloc.backend != "megatron":
            return super()._create_actor(actor_config)  # type: ignore[misc]
        # Our class has the same name as the engine class that the trainer would use.
        return self._started(getattr(ours, _engine_name(type(self))), actor_config, alloc)

    def _started(self, engine_class: Any, config: Any, alloc: Any) -> Any:
        scheduler = getattr(self, "scheduler", None)
        engine = (
            engine_class.as_controller(config, scheduler) if is_single_controller() else engine_class(config=config)
        )
        engine.create_process_group(parallel_strategy=alloc.parallel)
        return engine


_ENGINE_OF_TRAINER = {
    "SFTTrainer": "MegatronLMEngine",
    "RWTrainer": "MegatronRWEngine",
    "DPOTrainer": "MegatronDPOEngine",
}


def _engine_name(trainer: type) -> str:
    for base in trainer.__mro__:
        if base.__name__ in _ENGINE_OF_TRAINER:
            return _ENGINE_OF_TRAINER[base.__name__]
    raise TypeError(
        f"{trainer.__name__} derives from none of AReaL's {', '.join(_ENGINE_OF_TRAINER)}: override `_create_actor`"
    )
