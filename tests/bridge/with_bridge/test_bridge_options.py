"""Each option and context of Bridge's is honoured, without effect, or refused by name."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import CheckpointConfig, GPTDatasetConfig
from megatron.bridge.training.state import TrainState
from megatron.bridge.utils.instantiate_utils import InstantiationException

import mcore_ckpt
from mcore_ckpt.checkpoint import MANIFEST_FILE
from mcore_ckpt.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    RemoteError,
    UnsupportedError,
)
from mcore_ckpt.integrations.bridge import McoreCheckpointManager, data_loader, options
from mcore_ckpt.integrations.bridge import manager as bridge_manager
from mcore_ckpt.integrations.bridge.hf_files import PublishedConfig
from mcore_ckpt.integrations.bridge.kept_mains import KeptMains
from mcore_ckpt.integrations.bridge.unsupported import refuse_load, refuse_save
from mcore_ckpt.integrations.kit.loop import Loaded, Training
from tests.bridge.bridge_run import OURS
from tests.distributed import forked_ranks

HONOURED = frozenset(
    {
        *("save", "load", "ckpt_step", "pretrained_checkpoint", "exit_on_missing_checkpoint", "finetune"),
        *("save_optim", "save_rng", "load_optim", "load_rng", "async_save", "verify_integrity"),
        *("most_recent_k", "save_retain_interval", "also_save_hf_checkpoint", "hf_source_path"),
        *("save_tokenizer_assets", "custom_manager_class"),
        # Bridge's loop reads it and calls the manager.
        "save_interval",
    }
)
WITHOUT_EFFECT = frozenset(
    {
        # How Bridge's own format is written, and how its own asynchronous saves run.
        *("fully_parallel_save", "ckpt_fully_parallel_save_process_group", "ckpt_assume_constant_structure"),
        *("storage_writers_per_rank", "dist_ckpt_workers", "dist_ckpt_save_pre_mcore_014"),
        *("dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient"),
        *("use_persistent_ckpt_worker", "async_strategy", "async_write_results_mp_mode"),
        *("async_ckpt_cpu_priority", "async_ckpt_io_priority", "async_ckpt_use_cpu_shm"),
        # How Bridge's own format is read. They have their effect when Bridge's loader reads its own checkpoints.
        *("fully_parallel_load", "ckpt_fully_parallel_load_exchange_algo", "ckpt_fully_parallel_load_process_group"),
        *("ckpt_load_validate_sharding_integrity", "stream_ckpt_dequant", "strict_fsdp_dtensor_load"),
        # Settings of options that are refused, or that are off.
        *("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir", "non_persistent_local_ckpt_algo"),
        *("replication_jump", "replication_factor", "hf_trust_remote_code", "hf_distributed_save"),
        "hf_save_every_n_ranks",
        # Options that Bridge has taken over from Megatron-LM. Its training (0.6.2) reads none of them.
        *("save_params_interval", "save_activations_interval", "save_tokens_per_expert_interval"),
        *("save_wgrads_interval", "save_dgrads_interval", "use_checkpoint_args", "use_mp_args_from_checkpoint_args"),
        *("use_tokenizer_model_from_checkpoint_args", "auto_detect_ckpt_format", "ckpt_convert_format"),
        *("ckpt_convert_save", "ckpt_convert_update_legacy_dist_opt_format"),
    }
)


def checkpoint(**given: Any) -> CheckpointConfig:
    found = CheckpointConfig(save="new", load="new")
    for name, value in given.items():
        assert hasattr(found, name)
        setattr(found, name, value)
    return found


def test_each_field_of_bridges_config_is_known_here() -> None:
    """A new field of Bridge's makes this red: decide what it means here."""
    kinds = (HONOURED, WITHOUT_EFFECT, frozenset(options.REFUSED))
    known = [name for names in kinds for name in names]
    assert sorted(known) == sorted(field.name for field in fields(CheckpointConfig))


@pytest.mark.parametrize(
    "given",
    [
        {"ckpt_format": "fsdp_dtensor"},
        {"non_persistent_save_interval": 1},
        {"non_persistent_ckpt_type": "local"},
        {"non_persistent_ckpt_type": "global"},
        {"replication": True},
        {"load_main_params_from_ckpt": True},
        {"dist_ckpt_strictness": "ignore_all"},
        {"most_recent_k": 0},
        {"save": "msc://bucket/run"},
        {"load": "msc://bucket/run"},
        {"pretrained_checkpoint": "s3://bucket/run"},
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"checkpoint.{next(iter(given))} is"):
        McoreCheckpointManager(checkpoint(**given))


def test_bridges_words_override_ours() -> None:
    own = mcore_ckpt.CheckpointConfig(max_to_keep=5, keep_every=10)
    assert options.overridden_config(checkpoint(), own, False).max_to_keep == 5
    found = options.overridden_config(checkpoint(most_recent_k=2, also_save_hf_checkpoint=True), own, True)
    assert (found.max_to_keep, found.keep_every, found.skip_frozen) == (2, 10, True)
    assert found.save_contents == ("model", "optimizer", "extra", "hf_model")


@pytest.mark.parametrize(
    ("path", "value", "refuse"),
    [
        ("non_persistent_ckpt", True, refuse_save),
        ("module_name", "vision", refuse_save),
        ("module_name", "vision", refuse_load),
        ("strict", False, refuse_load),
        ("skip_load_to_model_and_opt", True, refuse_load),
    ],
)
def test_a_context_that_cannot_be_honoured_is_refused_by_name(
    path: str, value: Any, refuse: Callable[[Any], None]
) -> None:
    kind = checkpointing.CheckpointSaveContext if refuse is refuse_save else checkpointing.CheckpointLoadContext
    given: dict[str, Any] = dict.fromkeys((field.name for field in fields(kind)), None)
    given |= {"state": SimpleNamespace(cfg=SimpleNamespace(model=SimpleNamespace())), "model": []}
    given |= {"non_persistent_ckpt": False} if refuse is refuse_save else {"strict": True}
    refuse(SimpleNamespace(**{**given, "skip_load_to_model_and_opt": False}))
    with pytest.raises(UnsupportedError, match=path):
        refuse(SimpleNamespace(**{**given, path: value}))


def test_interleaved_layers_are_refused() -> None:
    cfg = SimpleNamespace(model=SimpleNamespace(moe_mlp_glu_interleave_size=32))
    with pytest.raises(UnsupportedError, match=r"model\.moe_mlp_glu_interleave_size is 32"):
        refuse_load(SimpleNamespace(state=SimpleNamespace(cfg=cfg), strict=True, skip_load_to_model_and_opt=False))


def test_a_model_with_modelopts_state_is_refused() -> None:
    """The state would not be in the checkpoint. ModelOpt is a stand-in here (bridge_run.py)."""
    plain, converted = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    converted[0]._modelopt_state = []

    def context(chunk: Any, **model: Any) -> Any:
        state = SimpleNamespace(cfg=SimpleNamespace(model=SimpleNamespace(**model)))
        return SimpleNamespace(
            state=state, model=[chunk], strict=True, skip_load_to_model_and_opt=False, non_persistent_ckpt=False
        )

    for refuse in (refuse_save, refuse_load):
        refuse(context(plain, restore_modelopt_state=False))
        with pytest.raises(UnsupportedError, match="converted by ModelOpt"):
            refuse(context(converted))
        with pytest.raises(UnsupportedError, match=r"model\.restore_modelopt_state is set"):
            refuse(context(plain, restore_modelopt_state=True))


def test_the_folder_of_one_checkpoint_is_refused(tmp_path: Path) -> None:
    """Bridge would begin from scratch without a word."""
    one = tmp_path / "global_steps_4" / "actor"
    one.mkdir(parents=True)
    (one / MANIFEST_FILE).touch()
    for path in (one, one.parent):
        with pytest.raises(InvalidArgumentError, match=r"checkpoint\.load is .*ckpt_step"):
            McoreCheckpointManager(checkpoint(load=str(path)))


def test_a_missing_checkpoint_is_an_error_if_it_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="exit_on_missing_checkpoint"):
        McoreCheckpointManager(checkpoint(load=str(tmp_path / "none"), exit_on_missing_checkpoint=True))


@pytest.mark.parametrize("missing", ["exit_on_missing_checkpoint", "ckpt_step"])
@pytest.mark.parametrize("load", ["none", None])
def test_bridge_does_not_begin_from_scratch_if_a_checkpoint_must_be_there(
    tmp_path: Path, missing: str, load: str | None
) -> None:
    """Bridge would, because it asks for a load only if there is something to load."""
    given = {"load": load and str(tmp_path / load), missing: 4 if missing == "ckpt_step" else True}
    for fallback in (None, str(tmp_path / "no_weights")):
        with pytest.raises(CheckpointNotFoundError, match=missing):
            McoreCheckpointManager(checkpoint(**given, pretrained_checkpoint=fallback))
    with_fallback = checkpoint(**given, pretrained_checkpoint=huggingface_folder(tmp_path / "weights"))
    if missing == "ckpt_step":  # the weights have no steps
        with pytest.raises(CheckpointNotFoundError, match=missing):
            McoreCheckpointManager(with_fallback)
    else:
        McoreCheckpointManager(with_fallback)
    McoreCheckpointManager(checkpoint(**{**given, "load": huggingface_folder(tmp_path / "resumed")}))


def huggingface_folder(path: Path) -> str:
    """What Bridge takes for the folder of a HuggingFace model."""
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).touch()
    return str(path)


def state_of(checkpoint: CheckpointConfig, **more: Any) -> Any:
    """What Bridge's GlobalState has of these."""
    return SimpleNamespace(cfg=SimpleNamespace(**{"checkpoint": checkpoint, "peft": None, "model": None, **more}))


def test_adapters_must_be_there_too(tmp_path: Path) -> None:
    """With them `pretrained_checkpoint` is always there, but has the base model alone."""
    weights = huggingface_folder(tmp_path / "weights")
    given = checkpoint(
        load=str(tmp_path / "none"), pretrained_checkpoint=weights, exit_on_missing_checkpoint=True, save=None
    )
    McoreCheckpointManager(given).finalize_async_saves(state_of(given))
    manager = McoreCheckpointManager(given)
    with pytest.raises(CheckpointNotFoundError, match="exit_on_missing_checkpoint"):
        manager.finalize_async_saves(state_of(given, peft=object()))


def test_an_unsupported_model_is_refused_before_the_first_iteration() -> None:
    given = checkpoint(save=None)
    with pytest.raises(UnsupportedError, match="restore_modelopt_state"):
        McoreCheckpointManager(given).finalize_async_saves(
            state_of(given, model=SimpleNamespace(restore_modelopt_state=True))
        )


@pytest.mark.parametrize(
    ("given", "deletes"),
    [
        ({}, False),
        ({"most_recent_k": 2}, False),
        ({"save_retain_interval": 10}, True),
        ({"save_retain_interval": 10, "most_recent_k": 2}, False),
    ],
    ids=str,
)
def test_a_run_that_keeps_less_than_bridges_says_so_once(
    given: dict[str, Any], deletes: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    bridges = checkpoint(**given)
    manager = McoreCheckpointManager(bridges)
    for _ in range(2):
        manager.finalize_async_saves(state_of(bridges))
    found = [record.getMessage() for record in caplog.records if "save_retain_interval is 10" in record.getMessage()]
    assert len(found) == int(deletes)


def errors_of_ranks(tmp_path: Path, work: Callable[[int], Any]) -> list[str]:
    """The error that each of two ranks gets."""

    def record(rank: int) -> None:
        with pytest.raises(CheckpointError) as error:
            work(rank)
        (tmp_path / f"error_{rank}").write_text(f"{type(error.value).__name__}: {error.value}")

    log = tmp_path / "log"
    assert forked_ranks.run(2, record, log) == [0, 0], log.read_text()
    return [(tmp_path / f"error_{rank}").read_text() for rank in range(2)]


def test_a_hub_that_one_rank_does_not_reach_is_an_error_of_all(tmp_path: Path) -> None:
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(hf_source_path="org/model"), model=None, tokenizer=None)

    def work(rank: int) -> None:
        def read(path: str, **words: Any) -> str:
            if rank == 1:
                raise OSError("the hub does not answer")
            return path

        transformers.AutoConfig.from_pretrained = read
        PublishedConfig().get(cfg, timeout_s=10)

    errors = errors_of_ranks(tmp_path, work)
    assert errors[0] == errors[1]
    assert errors[0].startswith("RemoteError: rank 1: org/model: its config")


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def read(path: str, **words: Any) -> object:
        asked.append(path)
        if len(asked) == 1:
            raise OSError("the hub does not answer")
        return object()

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(), model=SimpleNamespace(hf_model_id="org/model"), tokenizer=None)
    published = PublishedConfig()
    with pytest.raises(RemoteError):
        published.get(cfg, timeout_s=10)
    assert published.get(cfg, timeout_s=10) is published.get(cfg, timeout_s=10)
    assert asked == ["org/model"] * 2


def test_bridge_makes_our_manager() -> None:
    manager = checkpointing.create_checkpoint_manager(checkpoint(custom_manager_class=OURS))
    assert isinstance(manager, McoreCheckpointManager)
    # Without our prefix, which the import has registered, it would not.
    with pytest.raises(InstantiationException):
        checkpointing.create_checkpoint_manager(checkpoint(custom_manager_class="mcore_ckpt.integrations.Other"))


def test_a_script_that_does_not_import_us_runs_behind_our_module(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    (tmp_path / "beside.py").write_text("value = 3\n")
    script.write_text(
        "import beside, sys\n"
        "from megatron.bridge.training.checkpointing import create_checkpoint_manager\n"
        "from megatron.bridge.training.config import CheckpointConfig\n"
        "config = CheckpointConfig(custom_manager_class=sys.argv[1])\n"
        "print(__name__, type(create_checkpoint_manager(config)).__name__)\n"
    )

    def work(rank: int) -> None:
        import runpy
        import sys

        sys.argv = ["python", str(script), OURS]
        runpy.run_module("mcore_ckpt.integrations.bridge", run_name="__main__", alter_sys=False)

    assert forked_ranks.run(1, work, log) == [0], log.read_text()
    assert "__main__ McoreCheckpointManager" in log.read_text()


class Loader:
    """Stands in for Energon's: a position that it saves and restores."""

    def __init__(self, position: int) -> None:
        self.position = position

    def save_state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_bridge_reads_the_data_loaders_state_that_we_hand_over() -> None:
    saved = data_loader.read_state(SimpleNamespace(iterable=Loader(7)), (0, 2))
    assert saved is not None
    handed_over = data_loader.HandedOver()
    folder = handed_over.write(saved, 4, (0, 2))
    new = Loader(0)
    # Without process groups, Bridge takes this for rank 0.
    checkpointing.maybe_load_dataloader_state(
        SimpleNamespace(iterable=new), 4, folder, pg_collection=SimpleNamespace(dp=None)
    )
    assert new.position == 7
    with pytest.raises(CheckpointMismatchError, match="data-parallel rank 0 of 2"):
        handed_over.write(saved, 4, (0, 1))
    assert not Path(str(folder)).exists()


def test_a_data_loaders_state_of_another_size_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    """The run that saved had one data-parallel rank, so the new second one has no state."""
    saved = data_loader.read_state(SimpleNamespace(iterable=Loader(7)), (0, 1))

    def work(rank: int) -> None:
        manager = McoreCheckpointManager(checkpoint())
        states = {"iteration": 4, data_loader.STATE: saved if rank == 0 else None}
        bridge_manager._data_parallel = lambda model: (rank, 2)
        manager._hand_over(state_of(checkpoint(), dataset=None).cfg, Loaded("new", states), Training([]))

    errors = errors_of_ranks(tmp_path, work)
    assert errors[0] == errors[1]
    assert "data-parallel rank 0 of 1" in errors[0]


def test_main_parameters_are_kept_once_and_in_host_memory() -> None:
    outer, rounded = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3, dtype=torch.bfloat16)
    updated = torch.tensor([1.0, 1.0 + 2**-20, 3.0])  # the second is no bf16
    inner = SimpleNamespace(
        param_to_inner_param={outer: updated},
        gpu_params_map_cpu_copy={outer: rounded},
        param_to_fp32_param={outer: updated},
    )
    kept = KeptMains(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]))
    assert [(copy.device.type, copy.dtype) for copy, _ in kept._kept] == [("cpu", torch.float32)]
    wanted = updated.clone()
    updated.fill_(float("nan"))
    kept.restore()
    assert torch.equal(outer, wanted)
    assert torch.equal(updated, wanted)
    assert torch.equal(rounded, wanted.bfloat16())
    assert not kept._kept


def test_an_iterator_without_a_state_has_none() -> None:
    assert data_loader.read_state([SimpleNamespace(iterable=Loader(1))], (0, 1)) is None
    assert data_loader.read_state(None, (0, 1)) is None
    assert data_loader.HandedOver().write(None, 4, (0, 1)) is None


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_says_once_that_it_has_no_position_of_several_loaders(
    kind: type, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaders = kind([SimpleNamespace(iterable=Loader(1)), SimpleNamespace(iterable=iter([])), None])
    warnings = []
    monkeypatch.setattr(bridge_manager.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(McoreCheckpointManager, "_begin", lambda *given: 1 / 0)  # what follows needs a training
    manager, state = McoreCheckpointManager(checkpoint()), state_of(checkpoint())
    for iterator in (None, loaders[0], loaders[1:], loaders, loaders):
        context = SimpleNamespace(non_persistent_ckpt=False, state=state, model=[], train_data_iterator=iterator)
        with pytest.raises(ZeroDivisionError):
            manager.save(context)
        warnings.append(caplog.text.count("will not have the position in the training data"))
    assert warnings == ([0, 0, 0, 1, 1] if rank == 0 else [0] * 5)
    assert rank or "a list of data loaders (3, of which 1 have a state)" in caplog.text


def test_bridge_restores_no_list_of_loaders() -> None:
    """Therefore no position of such a list is saved."""
    saved = data_loader.read_state(SimpleNamespace(iterable=Loader(7)), (0, 1))
    folder = data_loader.HandedOver()
    loader, groups = Loader(0), SimpleNamespace(dp=None)
    path = folder.write(saved, 4, (0, 1))
    checkpointing.maybe_load_dataloader_state([SimpleNamespace(iterable=loader)], 4, path, pg_collection=groups)
    assert loader.position == 0
    folder.remove()


def test_what_is_configured_is_kept() -> None:
    try:
        mcore_ckpt.integrations.bridge.configure(mcore_ckpt.CheckpointConfig(timeout_s=5), role="policy")
        assert (options.settings().role, options.settings().config.timeout_s) == ("policy", 5)
    finally:
        mcore_ckpt.integrations.bridge.configure()


def test_a_remote_store_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="remote"):
        mcore_ckpt.integrations.bridge.configure(mcore_ckpt.CheckpointConfig(remote="file:///elsewhere"))


def test_all_fields_of_the_train_state_are_plain() -> None:
    """They are saved as they are (`_saved_state`)."""
    assert all(isinstance(getattr(TrainState(), field.name), int) for field in fields(TrainState))
    assert {field.name for field in fields(GPTDatasetConfig)} >= {"dataloader_save", "dataloader_load"}
