"""Megatron-Bridge's adapters: saved alone and resumed, under every layout, out in PEFT's form and back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager, load_hf
from mcore_ckpt.errors import CheckpointMismatchError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.verl import MegatronCheckpointManager
from mcore_ckpt.load.huggingface_plan import Source
from mcore_ckpt.ranks import single_process_agreement
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.convert.to_native import convert_to_native
from mcore_ckpt.tools.examine.select import select
from tests.distributed.adapters import FROZEN, adapt, with_adapters
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.hf_models import (
    Model,
    Shape,
    build_model,
    logits_of,
    read_tensors,
    sample_tokens,
    transformers_logits,
)
from tests.distributed.refusals import assert_names
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, build, parallel, train
from tests.support.tiny_models import make_hf_folder, read_config

ALL = {"target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}


# -- saved alone, and resumed ------------------------------------------------------------------------------

RESUMED = {
    "dp2": ("LoRA", Layout(2, frozen=FROZEN)),
    "tp2-bf16": ("LoRA", Layout(2, tp=2, precision="bf16", frozen=FROZEN)),
    "pp2": ("LoRA", Layout(2, pp=2, num_layers=4, frozen=FROZEN)),
    "ep2": ("LoRA", Layout(2, ep=2, experts=4, frozen=FROZEN)),
    "not-distributed": ("LoRA", Layout(2, distributed_optimizer=False, frozen=FROZEN)),
    "peft-tp2-bf16": ("PEFT", Layout(2, tp=2, precision="bf16", frozen=FROZEN)),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*case, id=name, marks=marks(2, name == "tp2-bf16")) for name, case in RESUMED.items()],
)
def test_training_goes_on_as_if_never_stopped(
    kind: str, layout: Layout, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is not in the checkpoint: it is what the model was built with, as if `load_hf` had filled it."""
    with_adapters(monkeypatch, kind, **ALL)
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        save(training, shared_path, 2, skip_frozen=True)
        at_save = snapshot(training)
        through = train(training, 2, 4)
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 7, 8)
        base = {name: tensor.clone() for name, tensor in frozen_tensors(training.model)}
        poison(training)
        restore(training.model, base)
        manager = manager_of(training, shared_path, skip_frozen=True)
        manager.load()
        manager.close()
        loaded = snapshot(training)
        resumed = train(training, 2, 4)
        with everywhere():
            assert_same(loaded, at_save)
            assert resumed == through


def frozen_tensors(model: list[Any]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{number}.{name}", parameter)
        for number, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    ]


def restore(model: list[Any], values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in frozen_tensors(model):
            parameter.copy_(values[name])


# -- any layout --------------------------------------------------------------------------------------------

# The kind of adapters, or those that save and those that load, the model, and the layouts to save and to load under.
MOVED = {
    "lora": ("LoRA", "qwen3", Shape(2, tp=2), Shape(2, pp=2, first_stage_layers=1)),
    "canonical": ("CanonicalLoRA", "qwen3", Shape(2, tp=2), Shape(2)),
    "dora": ("DoRA", "qwen3", Shape(2, tp=2), Shape(2)),
    "experts": ("LoRA", "qwen3_moe", Shape(2, ep=2), Shape(2, tp=2)),
    "to-tp2": ("LoRA", "qwen3", Shape(2), Shape(2, tp=2)),
    "latent": ("LoRA", "deepseek_v3", Shape(2, tp=2), Shape(2)),
    "experts-tp2-ep2": ("LoRA", "qwen3_moe", Shape(4, tp=2, ep=2), Shape(4, ep=4)),
    "vpp2": ("LoRA", "qwen3", Shape(2, pp=2, vpp=2), Shape(2, tp=2)),
    "peft": ("PEFT", "qwen3", Shape(2, tp=2), Shape(2, pp=2, first_stage_layers=1)),
    "peft-to-bridge": ("PEFT LoRA", "qwen3", Shape(2), Shape(2, tp=2)),
    "bridge-to-peft": ("LoRA PEFT", "qwen3", Shape(2, tp=2), Shape(2, tp=2)),
}
MODEL_ONLY = CheckpointConfig(save_contents=("model",), load_contents=("model",), skip_frozen=True)
COLUMN = ["linear_qkv", "linear_fc1"]
LATENT = ["linear_q_up_proj", "linear_kv_up_proj", "linear_proj"]


@pytest.mark.parametrize(
    ("kind", "model", "first", "second"),
    [
        pytest.param(*case, id=name, marks=marks(case[2].world, name in ("lora", "experts", "peft")))
        for name, case in MOVED.items()
    ],
)
def test_adapters_go_from_layout_to_layout(
    kind: str, model: str, first: Shape, second: Shape, shared_path: Path
) -> None:
    """Saved alone under one layout, they are in PEFT's form what the model has that loads them under another."""
    folder = shared_path / "hf"
    on_rank_0(lambda: make_hf_folder(folder, model))
    more = (
        {"target_modules": LATENT} if model == "deepseek_v3" else {"target_modules": COLUMN} if kind == "DoRA" else {}
    )
    with parallel(first.layout):
        chunks = adapted_model(folder, first, kind.split()[0], **more)
        manager = CheckpointManager(shared_path / "first", chunks, config=MODEL_ONLY)
        manager.save(1).wait()
        manager.close()
        merged(shared_path / "first", folder, shared_path / "peft")
        if (first.tp, first.ep) != (2, 2):  # RowParallelLinear leaves the sum over the ranks of experts to others
            assert_computes_what_transformers_does(chunks, shared_path / "first", folder, shared_path / "merged")
    on_rank_0(lambda: reshard(select(shared_path / "first"), shared_path / "resharded", wanted_layout(second)))
    merged(shared_path / "resharded", folder, shared_path / "offline")
    with parallel(second.layout):
        chunks = adapted_model(folder, second, kind.split()[-1], **more)
        poison_adapters(chunks)
        manager = CheckpointManager(shared_path / "second", chunks, config=MODEL_ONLY)
        manager.load(path=shared_path / "first" / "global_steps_1" / "actor")
        manager.save(2).wait()
        merged(shared_path / "second", folder, shared_path / "again", step=2)
        # And from PEFT's form.
        poison_adapters(chunks)
        source: Source = "rank0" if kind == "CanonicalLoRA" else "shared"
        report = load_hf(chunks, shared_path / "peft", base=folder, source=source)
        manager.save(3).wait()
        manager.close()
        merged(shared_path / "second", folder, shared_path / "imported", step=3)
        # Training changes routers' biases, too.
        count = sum(shard.key.name.endswith("expert_bias") for shard in model_shards(chunks))
        count += sum(".adapter." in shard.key.name for shard in model_shards(chunks))
    with everywhere():
        wanted = read_tensors(shared_path / "peft")
        assert report.tensors == count > 0
        for name in ("again", "imported", "offline"):
            found = read_tensors(shared_path / name)
            assert found.keys() == wanted.keys()
            assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def wanted_layout(shape: Shape) -> WantedLayout:
    layout = shape.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp or 1, "ep": layout.ep, "etp": layout.etp or layout.tp}
    return WantedLayout(**sizes, cp=1, world=layout.world, first_stage_layers=shape.first_stage_layers)


def assert_computes_what_transformers_does(chunks: Model, root: Path, base: Path, target: Path) -> None:
    """Shows that each row is where it belongs; that it comes back from there would not show it."""
    on_rank_0(lambda: merge(MergeRequest(root, target, hf_model_path=base)))
    vocab = read_config(base)["vocab_size"]
    for chunk in chunks:
        chunk.eval()
    found = logits_of(chunks, sample_tokens(vocab))
    with everywhere():
        if found is not None:
            torch.testing.assert_close(found[..., :vocab], transformers_logits(target), rtol=1e-4, atol=1e-4)


def adapted_model(folder: Path, shape: Shape, kind: str, **more: Any) -> Model:
    chunks = build_model(folder, shape)
    load_hf(chunks, folder)
    return adapt(chunks, kind, **more)


def merged(root: Path, base: Path, target: Path, **which: Any) -> None:
    on_rank_0(lambda: merge(MergeRequest(root, target, hf_model_path=base, adapters="only", **which)))


def poison_adapters(chunks: Model) -> None:
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".adapter." in name or ".lora_" in name:
                    parameter.fill_(float("nan"))


# What is trained beside the adapters, under PEFT's names.
BESIDE_IN_PEFT = {
    "base_model.model.lm_head.weight": "output_layer.weight",
    "base_model.model.model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "base_model.model.model.norm.weight": "decoder.final_layernorm.weight",
    "base_model.model.model.layers.1.post_attention_layernorm.weight": "decoder.layers.1.pre_mlp_layernorm.weight",
}


def trained_in_full(chunks: Model) -> list[tuple[str, torch.nn.Parameter]]:
    endings = tuple(BESIDE_IN_PEFT.values())
    return [item for chunk in chunks for item in chunk.named_parameters() if item[0].endswith(endings)]


# -- saved in HuggingFace's format -------------------------------------------------------------------------


@pytest.mark.world(2)
def test_a_save_writes_what_a_merge_writes(shared_path: Path) -> None:
    """With `hf_model`: the adapters alone if the base is left out, as verl's trainers do, or merged if it is not."""
    folder, shape = shared_path / "hf", Shape(2, tp=2)
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    hf_config, contents = AutoConfig.from_pretrained(folder), ["model", "hf_model"]
    with parallel(shape.layout):
        chunks = adapted_model(folder, shape, "LoRA")
        with torch.no_grad():
            for _, parameter in trained_in_full(chunks):
                parameter.requires_grad_().mul_(1.5)
        alone = shared_path / "global_step_1" / "actor"
        options = SimpleNamespace(save_contents=contents, load_contents=["model"], async_save=False)
        verl = MegatronCheckpointManager(
            model=chunks, checkpoint_config=options, hf_config=hf_config, peft_cls=object()
        )
        verl.save_checkpoint(str(alone), None, 1, None)
        verl.close()
        merged(alone, folder, shared_path / "peft")
        config = CheckpointConfig(save_contents=tuple(contents), load_contents=("model",))
        manager = CheckpointManager(shared_path / "whole", chunks, hf_config=hf_config, config=config)
        manager.save(1).wait()
        manager.close()
        whole = shared_path / "whole" / "global_steps_1" / "actor"
        on_rank_0(lambda: merge(MergeRequest(whole, shared_path / "merged")))
        with everywhere():
            assert_same_folder(alone / "huggingface" / "adapter", shared_path / "peft")
            assert not list((alone / "huggingface").glob("*.safetensors"))
            assert_same_folder(whole / "huggingface", shared_path / "merged")
            assert read_tensors(alone / "huggingface" / "adapter").keys() >= BESIDE_IN_PEFT.keys()
        # And back: into a model whose values are lost.
        poison_adapters(chunks)
        with torch.no_grad():
            for _, parameter in trained_in_full(chunks):
                parameter.fill_(float("nan"))
        load_hf(chunks, alone / "huggingface" / "adapter", base=folder)
        manager = CheckpointManager(shared_path / "again", chunks, hf_config=hf_config, config=config)
        manager.save(1).wait()
        manager.close()
        with everywhere():
            assert_same_folder(
                shared_path / "again" / "global_steps_1" / "actor" / "huggingface", shared_path / "merged"
            )
        plain = build_model(folder, shape)
        config = replace(config, skip_frozen=True)
        error = error_of(lambda: CheckpointManager(shared_path / "c", plain, hf_config=hf_config, config=config))
        assert_names(raised_everywhere(InvalidArgumentError, error), "skip_frozen .* no adapters")


def assert_same_folder(one: Path, other: Path) -> None:
    found, wanted = read_tensors(one), read_tensors(other)
    assert found
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name in {path.name for path in other.glob("adapter_config.json")}:
        texts = [json.loads((each / name).read_text()) for each in (one, other)]
        assert [{**text, "base_model_name_or_path": None} for text in texts] == [texts[1]] * 2


@pytest.mark.parametrize("skip_frozen", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.world(2)
def test_a_base_model_loads_under_new_adapters(
    skip_frozen: bool, shared_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one stage has adapters here, and all stages load their base."""
    folder, shape = shared_path / "hf", Shape(2, pp=2)
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    on_rank_0(
        lambda: convert_to_native(folder, shared_path / "base", WantedLayout(), single_process_agreement("c", 60))
    )
    with parallel(shape.layout):
        plain = build_model(folder, shape)
        load_hf(plain, folder)
        wanted = [shard.tensor.clone() for shard in model_shards(plain) if shard.key.kind == "model"]
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        chunks = adapt(build_model(folder, shape)) if last else build_model(folder, shape)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(".adapter." in name)
        adapters = {s.key.name: s.tensor.clone() for s in model_shards(chunks) if is_adapter(s.key.name)}
        config = replace(MODEL_ONLY, skip_frozen=skip_frozen)
        manager = CheckpointManager(shared_path / "base", chunks, config=config)
        manager.load()
        manager.close()
        with everywhere():
            found = [s for s in model_shards(chunks) if s.key.kind == "model"]
            base = [shard.tensor for shard in found if not is_adapter(shard.key.name)]
            assert all(torch.equal(*pair) for pair in zip(base, wanted, strict=True))
            assert bool(adapters) == last
            assert all(torch.equal(s.tensor, adapters[s.key.name]) for s in found if is_adapter(s.key.name))
            assert dist.get_rank() or "has no adapters: the base model is loaded" in caplog.text


# -- refused -----------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_what_does_not_fit_is_refused_by_all_and_changes_nothing(shared_path: Path) -> None:
    folder, shape = shared_path / "hf", Shape(2, tp=2)
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    with parallel(shape.layout):
        chunks = adapted_model(folder, shape, "CanonicalLoRA")
        manager = CheckpointManager(shared_path / "root", chunks, config=MODEL_ONLY)
        manager.save(1).wait()
        manager.close()
        merged(shared_path / "root", folder, shared_path / "peft")
        fused = adapted_model(folder, shape, "LoRA")
        others = adapted_model(folder, shape, "CanonicalLoRA", target_modules=["linear_proj"])
        for model, words in (
            (fused, r"lora_A\.weight and .*lora_A\.weight differ.*CanonicalLoRA"),
            (others, "has adapters that the model lacks: .*gate_proj"),
        ):
            before = [parameter.clone() for parameter in model[0].parameters()]
            error = error_of(lambda: load_hf(model, shared_path / "peft", base=folder))  # noqa: B023
            assert_names(raised_everywhere(CheckpointMismatchError, error), words)
            with everywhere():
                assert all(torch.equal(*pair) for pair in zip(before, model[0].parameters(), strict=True))
        dora = adapted_model(folder, shape, "DoRA")
        error = error_of(lambda: CheckpointManager(shared_path / "root", dora, config=MODEL_ONLY))
        assert_names(raised_everywhere(UnsupportedError, error), "linear_proj.* DoRA of a row-parallel layer")
        for words, change in (("alpha 6, but .* have alpha 7", ""), ("of alpha 7 .* of alpha 8", "_q")):
            for name, module in chunks[0].named_modules():
                if ".adapter." in f"{name}." and hasattr(module, "alpha") and name.endswith(change):
                    module.alpha += 1
            error = error_of(lambda: load_all(shared_path / "root", chunks))
            assert_names(raised_everywhere(CheckpointMismatchError if not change else UnsupportedError, error), words)


@pytest.mark.world(2)
def test_what_peft_has_beside_one_adapter_for_each_layer_is_refused(shared_path: Path) -> None:
    from tests.support.roll_peft import BareLinear

    folder, shape = shared_path / "hf", Shape(2, tp=2)
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    with parallel(shape.layout):
        for words, more in (
            ("layers.0.* has the adapters default, second", {"adapters": ("default", "second")}),
            ("is a BareLinear without sharded_state_dict", {"layer": BareLinear}),
        ):
            chunks = adapted_model(folder, shape, "PEFT", **more)
            error = error_of(lambda: CheckpointManager(shared_path / "root", chunks, config=MODEL_ONLY))  # noqa: B023
            assert_names(raised_everywhere(UnsupportedError, error), words)


def load_all(root: Path, chunks: Model) -> None:
    manager = CheckpointManager(root, chunks, config=MODEL_ONLY)
    try:
        manager.load()
    finally:
        manager.close()


def on_rank_0(work: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        work()
    dist.barrier()
