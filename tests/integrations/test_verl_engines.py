"""What the engines do differently from verl's, over stand-ins for these: tests/verl has the real ones."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.integrations.verl import MegatronCheckpointManager

Call = tuple[Any, ...]


class StockEngine:
    """As verl's `MegatronEngine`: it brings the model to the GPU, and has its own manager do the rest."""

    def __init__(self, trains: bool = True, offloads: bool = False, overlaps: bool = False, steps: int = -1) -> None:
        self.trains = trains
        self.engine_config = SimpleNamespace(param_offload=False, optimizer_offload=offloads)
        self.module = [SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=overlaps))]
        self.optimizer_config = SimpleNamespace(total_training_steps=steps)
        self.calls: list[Call] = []

    def initialize(self) -> None:
        if not self.trains:
            return
        self.checkpoint_mananager: Any = SimpleNamespace(
            model=self.module,
            optimizer="optimizer",
            lr_scheduler="scheduler",
            checkpoint_config={"async_save": True, "async_mode": "lazy"},
            role="critic",
            hf_config=None,
            processing_class=None,
            peft_cls=None,
            use_megatron_fsdp=False,
        )

    def save_checkpoint(self, *arguments: Any) -> None:
        self.calls.append(("to the GPU",))
        self.checkpoint_mananager.save_checkpoint(*arguments)

    def load_checkpoint(self, *arguments: Any) -> None:
        self.calls.append(("load", *arguments))


class Registry:
    @classmethod
    def register(cls, vendor: str, **key: str) -> Any:
        def register(engine: Any) -> Any:
            engine.key = {**key, "vendor": vendor}
            return engine

        return register


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    contents = {"EngineRegistry": Registry, "MegatronEngineWithLMHead": StockEngine}
    package = "verl.workers.engine"
    for name in ("verl", "verl.workers", package, f"{package}.megatron", f"{package}.megatron.transformer_impl"):
        module = ModuleType(name)
        vars(module).update(contents, MegatronEngineWithValueHead=StockEngine, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    name = "mcore_ckpt.integrations.verl.engines"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    del sys.modules[name]


def with_recorder(engine: Any) -> list[Call]:
    """Initialized; what its manager is asked for is told apart from what the manager would do."""
    engine.initialize()
    engine.checkpoint_mananager = SimpleNamespace(
        save_checkpoint=lambda *arguments: engine.calls.append(("save", *arguments)),
        wait=lambda: engine.calls.append(("wait",)),
    )
    return engine.calls


def test_the_manager_is_ours_and_has_what_the_stock_one_was_given(engines: Any) -> None:
    for offloads, mode in ((False, "lazy"), (True, "snapshot")):
        engine = engines.ValueModelEngine(offloads=offloads)
        engine.initialize()
        manager = engine.checkpoint_mananager
        assert isinstance(manager, MegatronCheckpointManager)
        assert manager.role == "critic"
        assert (manager._trainer["optimizer"], manager._trainer["lr_scheduler"]) == ("optimizer", "scheduler")
        assert (manager._config.async_save, manager._config.async_mode) == (True, mode)


def test_an_engine_that_does_not_train_has_none(engines: Any) -> None:
    engine = engines.LanguageModelEngine(trains=False)
    engine.initialize()
    assert not hasattr(engine, "checkpoint_mananager")


def test_they_are_registered_for_a_vendor_of_ours(engines: Any) -> None:
    common = {"backend": "megatron", "device": "cuda", "vendor": "mcore_ckpt"}
    assert engines.LanguageModelEngine.key == {"model_type": "language_model", **common}
    assert engines.ValueModelEngine.key == {"model_type": "value_model", **common}


def test_nothing_is_brought_to_the_gpu_for_a_save(engines: Any) -> None:
    calls = with_recorder(engine := engines.LanguageModelEngine())
    engine.save_checkpoint("/data/global_step_1/actor", None, 1, 2)
    assert calls == [("save", "/data/global_step_1/actor", None, 1, 2)]


def test_but_parameters_that_other_ranks_have_must_be_gathered_there(engines: Any) -> None:
    calls = with_recorder(engine := engines.LanguageModelEngine(overlaps=True))
    engine.save_checkpoint("/data/global_step_1/actor", None, 1, 2)
    assert calls == [("to the GPU",), ("save", "/data/global_step_1/actor", None, 1, 2)]


def test_the_last_save_is_waited_for(engines: Any) -> None:
    """verl's trainer returns, and Ray ends the workers."""
    calls = with_recorder(engine := engines.LanguageModelEngine(steps=2))
    for step in (1, 2):
        engine.save_checkpoint(f"/data/global_step_{step}/actor", global_step=step)
    assert [call[0] for call in calls] == ["save", "save", "wait"]


def test_nothing_is_deleted_unless_that_is_asked_for(engines: Any) -> None:
    """The stock engine's default is to delete, and verl's SFT trainer leaves the argument out."""
    calls = with_recorder(engine := engines.LanguageModelEngine())
    engine.load_checkpoint("/data/global_step_1")
    engine.load_checkpoint("/data/global_step_1", None, True)
    assert calls == [("load", "/data/global_step_1", None, False), ("load", "/data/global_step_1", None, True)]
