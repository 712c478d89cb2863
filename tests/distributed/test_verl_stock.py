"""Runs that verl's own manager has saved go on with ours."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.state.model import unwrap
from tests.distributed.adapters import FROZEN, with_adapters
from tests.distributed.agreement import everywhere
from tests.distributed.foreign_checkpoints import save_torch_dist, seed_replicas_alike
from tests.distributed.hf_words import hf_config
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_state, chained, poison, snapshot
from tests.distributed.training import build, parallel, train
from tests.distributed.verl_words import resume, step_folder, verl_manager

DP2 = LAYOUTS["dp2-bf16"]


@pytest.mark.world(2)
@pytest.mark.parametrize("version", [pytest.param("0.7", marks=pytest.mark.full), "0.9"])
def test_a_run_of_the_stock_manager_goes_on(version: str, shared_path: Path) -> None:
    """Its defaults: HuggingFace weights beside megatron's optimizer; ours is told apart by its manifest."""
    layout = DP2
    ours, stock = step_folder(shared_path, 1) / "actor", step_folder(shared_path, 2) / "actor"
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        seed_replicas_alike()
        hf = {"hf_config": hf_config(layout), "save_contents": ["model", "optimizer", "extra", "hf_model"]}
        manager = verl_manager(training, **hf)
        manager.save_checkpoint(str(ours), None, 1, None)
        at_save = snapshot(training)
        for tree in ("optimizer", "extra") if version == "0.9" else (".",):
            save_torch_dist(training, stock / tree / "dist_ckpt", "dp_reshardable", model={})
        if dist.get_rank() == 0:
            shutil.copytree(
                ours / "huggingface", stock / "model/huggingface" if version == "0.9" else stock / "huggingface"
            )
            if version == "0.9":
                (stock / "model/dist_ckpt").mkdir()  # verl makes it in any case
        dist.barrier()
        for folder in (stock, ours, stock):
            train(training, 2, 3)
            manager.load_checkpoint(str(folder))
            assert_state(training, at_save)
        # And on in our format, the manager being the same.
        manager.save_checkpoint(str(step_folder(shared_path, 3) / "actor"), None, 3, None)
        poison(training)
        manager.load_checkpoint(str(step_folder(shared_path, 3) / "actor"))
        manager.close()
        assert_state(training, at_save)


@pytest.mark.world(2)
def test_adapters_of_the_stock_manager_go_on(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_adapters(monkeypatch)
    layout = replace(DP2, frozen=FROZEN)
    folder = step_folder(shared_path, 1) / "actor"
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        seed_replicas_alike()
        adapters = {
            name: value
            for name, value in training.model[0].module.sharded_state_dict(prefix="").items()
            if ".adapter." in name
        }
        save_torch_dist(training, folder / "model/dist_ckpt", "dp_reshardable", model=adapters)
        at_save = snapshot(training)
        train(training, 1, 2)
        resume(training, folder, peft_cls=object())
        assert_state(training, at_save)


@pytest.mark.world(2)
def test_adapters_of_verl_0_7_go_on(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has them in files of each rank (`save_adapter_checkpoint`), and 0.7.0 merges them into HuggingFace weights."""
    with_adapters(monkeypatch)
    layout = replace(DP2, frozen=FROZEN)
    folder = step_folder(shared_path, 1) / "actor"
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        seed_replicas_alike()
        save_torch_dist(training, folder / "dist_ckpt", "dp_reshardable", model={})
        if dist.get_rank() == 0:
            parameters = unwrap(training.model[0]).named_parameters()
            adapters = {name: parameter.data for name, parameter in parameters if ".adapter." in name}
            (folder / "adapter_checkpoint").mkdir()
            torch.save({"adapter_state_dict": adapters}, folder / "adapter_checkpoint" / "mp_rank_00_adapter.pt")
            (folder / "huggingface").mkdir()
            (folder / "huggingface" / "model.safetensors").write_bytes(b"merged, and not for the base model")
        dist.barrier()
        at_save = snapshot(training)
        train(training, 1, 2)
        for parameter in training.model[0].parameters():
            if parameter.requires_grad:
                parameter.data.fill_(float("nan"))
        resume(training, folder, peft_cls=object())
        assert_state(training, at_save)
        at_load = [parameter.detach().clone() for parameter in training.model[0].parameters()]
        train(training, 2, 3)
        resume(training, folder, peft_cls=object(), load_contents=["model"])
        # As the next step does, with main parameters that have followed.
        chained(training.optimizer)[0]._copy_main_params_to_model_params()
        with everywhere():
            assert all(map(torch.equal, training.model[0].parameters(), at_load))
