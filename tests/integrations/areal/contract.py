"""Against AReaL 1.0.4 itself: what it calls, with which arguments, and what it names on disk.

Run by tests/integrations/test_areal.py.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import areal
import pytest
from areal.api import FinetuneSpec, SaveLoadMeta, StepInfo
from areal.api.cli_args import RecoverConfig, SaverConfig
from areal.engine import megatron_engine
from areal.engine.megatron_utils.checkpointer import MegatronCheckpointManager
from areal.infra.controller.train_controller import TrainController
from areal.trainer.dpo_trainer import DPOTrainer
from areal.trainer.rl_trainer import PPOTrainer
from areal.trainer.rw_trainer import RWTrainer
from areal.trainer.sft_trainer import SFTTrainer
from areal.utils import evaluator as stock_evaluator
from areal.utils import recover as stock_recover
from areal.utils import saver as stock_saver
from areal.utils.dynamic_import import import_from_string

from mcore_ckpt import CheckpointConfig, FastTier
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations import areal as ours
from mcore_ckpt.integrations.areal import recover_info, stock_files
from mcore_ckpt.integrations.areal.saver import export_name

SOURCES = Path(areal.__file__).parent
TRAINERS = (PPOTrainer, SFTTrainer, RWTrainer, DPOTrainer)
ENGINES = ("MegatronPPOActor", "MegatronPPOCritic", "MegatronLMEngine", "MegatronRWEngine", "MegatronDPOEngine")


def test_it_is_the_version_that_was_read() -> None:
    assert version("areal") == "1.0.4"


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    ("mine", "theirs", "names"),
    [
        (ours.Checkpointer, MegatronCheckpointManager, "save_checkpoint load_checkpoint wait_async_saves close"),
        (ours.Saver, stock_saver.Saver, "__init__ save state_dict load_state_dict maybe_wait_for_staging finalize"),
        (ours.RecoverHandler, stock_recover.RecoverHandler, "__init__ dump load"),
        (ours.Evaluator, stock_evaluator.Evaluator, "__init__ evaluate state_dict load_state_dict"),
        (ours.CheckpointedEngine, megatron_engine.MegatronEngine, "_create_optimizer save"),
        (ours.CheckpointedTrainer, PPOTrainer, "_create_train_engine _create_critic"),
        *((ours.CheckpointedTrainer, trainer, "_create_actor") for trainer in TRAINERS[1:]),
    ],
    ids=str,
)
def test_signatures(mine: type, theirs: type, names: str) -> None:
    for name in names.split():
        wanted, found = parameters(getattr(theirs, name)), parameters(getattr(mine, name))
        assert found[: len(wanted)] == wanted, name
        # What is ours alone may be left out.
        assert all(default is not inspect.Parameter.empty for _, _, default in found[len(wanted) :]), name


@functools.cache
def called() -> dict[str, set[str]]:
    """By attribute, the names in `<anything>.<attribute>.<name>` in AReaL's megatron engine and trainers."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        if not str(path.relative_to(SOURCES)).startswith(("engine/megatron", "trainer/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                found.setdefault(node.value.attr, set()).add(node.attr)
    return found


@pytest.mark.parametrize(
    ("attribute", "mine", "least"),
    [
        ("checkpointer", ours.Checkpointer, {"save_checkpoint", "load_checkpoint", "close"}),
        ("saver", ours.Saver, {"save", "is_async", "maybe_wait_for_staging", "finalize"}),
        ("recover_handler", ours.RecoverHandler, {"dump", "load"}),
        ("evaluator", ours.Evaluator, {"evaluate"}),
    ],
)
def test_all_that_is_called_is_there(attribute: str, mine: type, least: set[str]) -> None:
    config = {field.name for cls in (SaverConfig, RecoverConfig) for field in dataclasses.fields(cls)}
    assert least <= called()[attribute]
    assert [name for name in called()[attribute] - config if not hasattr(mine, name)] == []


def test_names_of_the_files_of_recover_info() -> None:
    source = inspect.getsource(stock_recover.RecoverInfo.dump)
    tree = ast.parse("class _:\n" + source)
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    files = {
        text for text in constants if isinstance(text, str) and text.endswith((".json", ".pkl")) and " " not in text
    }
    assert files == {*recover_info.JSON_FILES.values(), stock_files.DATALOADER_FILE}
    fields = [field.name for field in dataclasses.fields(stock_recover.RecoverInfo)]
    assert sorted(fields) == sorted(
        ["last_step_info", *(f"{name}_info" for name in recover_info.JSON_FILES if name != "step"), "dataloader_info"]
    )
    assert {field.name for field in dataclasses.fields(StepInfo)} == set(recover_info.STEP_FIELDS)


def test_where_things_lie(tmp_path: Path) -> None:
    wanted = stock_saver.Saver.get_model_save_path("exp", "trial", str(tmp_path), 1, 2, 9, "critic")
    assert Path(wanted).name == export_name(1, 2, 9)
    assert ours.Saver.get_model_save_root("exp", "trial", str(tmp_path), "critic") == str(Path(wanted).parent)
    handler = ours.RecoverHandler(recover_config(tmp_path), spec())
    assert str(handler._root) == stock_recover.RecoverHandler.recover_info_path("exp", "trial", str(tmp_path))
    assert handler._root.name == recover_info.INFO_ROLE


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (SaverConfig, "mode"),
        (RecoverConfig, "mode retries no_save_optim no_load_optim"),
    ],
)
def test_every_field_of_the_configs_is_known(config: type, fields: str) -> None:
    common = "experiment_name trial_name fileroot freq_epochs freq_steps freq_secs"
    assert {field.name for field in dataclasses.fields(config)} == set(f"{common} {fields}".split())


def test_what_save_and_load_are_told() -> None:
    wanted = "path weight_format with_optim tokenizer processor base_model_path naive_distributed"
    assert [field.name for field in dataclasses.fields(SaveLoadMeta)] == wanted.split()


@pytest.mark.parametrize("name", ENGINES)
def test_workers_find_the_engine_by_its_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = getattr(ours, name)
    # TrainController._async_initialize makes the path so.
    assert import_from_string(f"{engine.__module__}.{engine.__name__}") is engine
    assert issubclass(engine, getattr(megatron_engine, name))
    assert engine.__mro__.index(ours.CheckpointedEngine) < engine.__mro__.index(megatron_engine.MegatronEngine)
    made = []
    monkeypatch.setattr(TrainController, "__init__", lambda self, train_engine, **others: made.append(train_engine))
    engine.as_controller(SimpleNamespace(_version="v1"), None)
    assert made == [engine]


def test_the_path_of_an_engine_is_made_as_it_was_read() -> None:
    source = inspect.getsource(TrainController)
    assert "engine_class = self.train_engine" in source
    assert "{engine_class.__module__}.{engine_class.__name__}" in source


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_assigns_what_is_replaced(trainer: type) -> None:
    tree = ast.parse(inspect.getsource(trainer))
    assigned = [
        node.targets[0].attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    ]
    order = [assigned.index(name) for name in ("actor", "evaluator", "saver", "recover_handler", "recover_info")]
    assert order == sorted(order)


def test_a_trainer_gets_ours(tmp_path: Path) -> None:
    class Trainer(ours.CheckpointedTrainer, PPOTrainer):
        def __init__(self) -> None:
            self.actor, self.critic = actor, critic
            self.saver = stock_saver.Saver(saver_config(tmp_path, freq_steps=3), spec())
            self.recover_handler = stock_recover.RecoverHandler(recover_config(tmp_path), spec())

    actor, critic = (object.__new__(cls) for cls in (ours.MegatronPPOActor, ours.MegatronPPOCritic))
    trainer = Trainer()
    assert type(trainer.saver) is ours.Saver
    assert trainer.saver.config.freq_steps == 3
    assert type(trainer.recover_handler) is ours.RecoverHandler
    assert trainer.recover_handler._others == {"critic": critic}
    with pytest.raises(AttributeError, match="saver has not been assigned yet"):
        _ = object.__new__(Trainer).saver


def test_what_others_have_saved_is_theirs_to_recover_from(tmp_path: Path) -> None:
    """It has no manifest: with our handler no step would ever be complete, and each start be from the beginning."""

    class Trainer(ours.CheckpointedTrainer, PPOTrainer):
        def __init__(self, actor: Any, critic: Any) -> None:
            self.actor, self.critic = actor, critic
            self.recover_handler = stock_recover.RecoverHandler(recover_config(tmp_path), spec())

    own, fsdp = object.__new__(ours.MegatronPPOActor), SimpleNamespace()
    assert type(Trainer(fsdp, fsdp).recover_handler) is stock_recover.RecoverHandler
    assert type(Trainer(fsdp, None).recover_handler) is stock_recover.RecoverHandler
    assert type(Trainer(own, None).recover_handler) is ours.RecoverHandler
    with pytest.raises(UnsupportedError, match="critic is not of the megatron backend"):
        Trainer(own, fsdp)


def test_a_fast_tier_is_refused_because_areal_resumes_from_a_shared_folder() -> None:
    config = CheckpointConfig(fast=FastTier("/dev/shm/run", durable_every=5))
    with pytest.raises(UnsupportedError, match=r"checkpoint_config has a fast tier, but .*: leave fast out"):
        ours.Checkpointer([], config=config)
    with pytest.raises(UnsupportedError, match="checkpoint_config has if_busy='skip', but AReaL's RecoverHandler"):
        ours.Checkpointer([], config=CheckpointConfig(if_busy="skip"))


def test_an_engine_of_another_kind_is_refused_before_anything_is_saved(tmp_path: Path) -> None:
    handler = ours.RecoverHandler(recover_config(tmp_path, mode="on", freq_steps=1), spec())
    step = StepInfo(epoch=0, epoch_step=0, global_step=0, steps_per_epoch=4)
    with pytest.raises(UnsupportedError, match=r"default \(SimpleNamespace\): this engine is not from mcore_ckpt"):
        handler.dump(SimpleNamespace(), step, None, None, None, None)
    assert list(tmp_path.rglob("global_steps_*")) == []


@pytest.mark.parametrize(
    ("trainer", "hook", "wanted"),
    [
        (PPOTrainer, "_create_train_engine", "MegatronPPOActor"),
        (PPOTrainer, "_create_critic", "MegatronPPOCritic"),
        (SFTTrainer, "_create_actor", "MegatronLMEngine"),
        (RWTrainer, "_create_actor", "MegatronRWEngine"),
        (DPOTrainer, "_create_actor", "MegatronDPOEngine"),
    ],
)
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_trainer_makes_our_engines(
    trainer: type, hook: str, wanted: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(
        getattr(ours, wanted), "as_controller", classmethod(lambda cls, config, scheduler: made.append(cls) or Engine())
    )

    class Engine:
        def create_process_group(self, parallel_strategy: Any) -> None:
            assert parallel_strategy == "d2t2"

    class Stock(trainer):  # type: ignore[misc, valid-type]
        pass

    setattr(Stock, hook, lambda *args: "AReaL's own")
    mixed = type(trainer.__name__, (ours.CheckpointedTrainer, Stock), {"__init__": lambda self: None})()
    alloc = SimpleNamespace(backend=backend, parallel="d2t2")
    mixed.scheduler, mixed.actor_alloc = None, alloc
    arguments = ("config",) if hook == "_create_actor" else ("config", alloc)
    result = getattr(mixed, hook)(*arguments)
    if backend == "megatron":
        assert made == [getattr(ours, wanted)]
        assert isinstance(result, Engine)
    else:
        assert (result, made) == ("AReaL's own", [])


def spec() -> FinetuneSpec:
    return FinetuneSpec(total_train_epochs=2, dataset_size=8, train_batch_size=2)


def saver_config(root: Path, **fields: Any) -> SaverConfig:
    return SaverConfig(experiment_name="exp", trial_name="trial", fileroot=str(root), **fields)


def recover_config(root: Path, **fields: Any) -> RecoverConfig:
    return RecoverConfig(experiment_name="exp", trial_name="trial", fileroot=str(root), **fields)
