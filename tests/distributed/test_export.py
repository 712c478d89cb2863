"""`hf_model` in save_contents: what lies in `huggingface/` is the model that was trained, as HuggingFace has it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CommitError
from mcore_ckpt.io import tuning
from mcore_ckpt.models import (
    HfModel,
    HfTensor,
    hf_tensors,
    model_from_config,
)
from mcore_ckpt.state.model import gather_parameters
from mcore_ckpt.state.optimizer import copy_main_to_model
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import TIMEOUT_S, manager_of, position
from tests.distributed.global_state import GlobalState, assert_same_state, global_state, positions
from tests.distributed.hf_words import hf_config
from tests.distributed.layouts import LAYOUTS
from tests.distributed.refusals import assert_names, refused
from tests.distributed.test_fallback import flip
from tests.distributed.tiers import marks
from tests.distributed.training import VOCAB_SIZE, Layout, Training, build, parallel, train

CONTENTS = ("model", "optimizer", "extra", "hf_model")


def exported(tensor: HfTensor, state: GlobalState) -> torch.Tensor:
    """A HuggingFace tensor, put together from whole mcore tensors element by element."""
    whole = torch.full((tensor.numel,), torch.nan, dtype=state[f"{tensor.slabs[0].mcore} model"].dtype)
    for slab in tensor.slabs:
        source = state[f"{slab.mcore} model"][: slab.region.global_shape[0]]
        whole[slab.start : slab.start + slab.numel] = source.reshape(-1)[positions(slab.region)]
    return whole.view(tensor.shape)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by the safetensors library, by the index if there is one."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert files == {path.name for path in folder.glob("*.safetensors")}
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(folder / file).items()}


def assert_exported(folder: Path, training: Training, state: GlobalState) -> None:
    model = described(training.layout)
    found = read_weights(folder)
    wanted = {tensor.name: exported(tensor, state) for tensor in hf_tensors(model)}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert not tensor.isnan().any(), name
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def described(layout: Layout) -> HfModel:
    return model_from_config(json.loads(hf_config(layout).to_json_string(use_diff=False)))


EXPORTED = ("plain", "tp2", "pp2-tied-bf16", "pp2-vpp2", "ep2", "tp2-pp2", "tp2-ep2-etp1", "tp2-pp2-ep2-etp1")
IN_CI = {
    ("tp2", "sync"),
    ("pp2-tied-bf16", "async"),
    ("pp2-vpp2", "sync"),
    ("ep2", "async"),
}


def of_world(name: str, in_ci: bool) -> tuple[pytest.MarkDecorator, ...]:
    return marks(LAYOUTS[name].world, in_ci)


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough for every rank to have a file of its own."""
    monkeypatch.setattr(tuning, "HF_LEAST_FILE_BYTES", 1 << 12)


def cases(*names: str) -> list[Any]:
    """Those whose name ends with "!" run in CI."""
    return [
        pytest.param(LAYOUTS[name.rstrip("!")], id=name.rstrip("!"), marks=of_world(name.rstrip("!"), name[-1] == "!"))
        for name in names
    ]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(LAYOUTS[name], mode, id=f"{name}-{mode}", marks=of_world(name, (name, mode) in IN_CI))
        for name in EXPORTED
        for mode in ("sync", "async")
    ],
)
@pytest.mark.usefixtures("many_files")
def test_the_export_is_the_trained_model(layout: Layout, mode: str, shared_path: Path) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        state = global_state(training)
        config = {"save_contents": CONTENTS, "async_save": mode == "async"}
        manager = manager_of(training, shared_path, hf_config=hf_config(layout), **config)
        handle = manager.save(2, extra_state=position(2))
        if mode == "async":
            # What goes on must not be seen in what was saved.
            train(training, 2, 3)
        handle.wait()
        manager.close()
        with everywhere():
            assert handle.report.export_s > 0
            folder = shared_path / "global_steps_2" / "actor" / "huggingface"
            assert_exported(folder, training, state)
            assert len(list(folder.glob("*.safetensors"))) >= layout.world
            _assert_in_manifest(folder.parent)
            config = json.loads((folder / "config.json").read_text())
            assert config["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[layout.precision]


def _assert_in_manifest(role_dir: Path) -> None:
    manifest = read_manifest(role_dir)
    assert "hf_model" in manifest.contents
    listed = {file.path for file in manifest.files}
    there = {str(path.relative_to(role_dir)) for path in role_dir.rglob("*") if path.is_file()}
    assert there == listed | {"manifest.json"}


@pytest.mark.parametrize("only", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", cases("tp2!"))
def test_durable_steps_of_the_fast_tier_have_the_export(layout: Layout, only: bool, shared_path: Path) -> None:
    """It is made in the root, from the files there. The node has what it is made from, and each step can be loaded."""
    root, node = shared_path / "root", shared_path / "node"
    with parallel(layout):
        training = build(layout, seed=1)
        fast = FastTier(node, replicas=0, durable_every=2)
        contents = ("hf_model",) if only else CONTENTS
        words: dict[str, Any] = {"save_contents": contents, "load_contents": ("model",), "fast": fast}
        manager = manager_of(training, root, hf_config=hf_config(layout), **words)
        for step in (1, 2):
            train(training, step - 1, step)
            handle = manager.save(step)
        state = global_state(training)
        train(training, 2, 3)
        manager.save(3)
        manager.close()
        with everywhere():
            assert handle.drain is not None
            assert handle.drain.committed
            role_dir = root / "global_steps_2" / "actor"
            assert_exported(role_dir / "huggingface", training, state)
            _assert_in_manifest(role_dir)
            assert (role_dir / "model").exists() is not only
            assert not (root / "global_steps_1").exists()
            assert not list(node.rglob("*.safetensors"))
            assert "model" in read_manifest(node / "global_steps_3" / "actor").contents
            assert "hf_model" not in read_manifest(node / "global_steps_3" / "actor").contents
        manager = manager_of(training, root, hf_config=hf_config(layout), **words)
        assert manager.load(step=2).step == 2
        loaded = global_state(training)
        manager.close()
        with everywhere():
            weights = [name for name in state if name.endswith(" model")]
            assert weights
            for name in weights:
                assert torch.equal(loaded[name], state[name]), name


@pytest.mark.parametrize("layout", cases("tp2!", "tp2-pp2"))
def test_only_the_export_is_kept_if_only_it_is_asked_for(layout: Layout, shared_path: Path) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        state = global_state(training)
        manager = manager_of(
            training, shared_path, hf_config=hf_config(layout), save_contents=("hf_model",), load_contents=("model",)
        )
        manager.save(1)
        manager.close()
        with everywhere():
            role_dir = shared_path / "global_steps_1" / "actor"
            assert_exported(role_dir / "huggingface", training, state)
            _assert_in_manifest(role_dir)
            assert not (role_dir / "model").exists()
            assert [path.name for path in role_dir.glob(".*")] == []
        # A tokenizer that the training has added a token to, which the config does not know.
        rows = state["embedding.word_embeddings.weight model"].shape[0]
        tokenizer = SimpleNamespace(get_vocab=lambda: {"<new>": rows - 1}, save_pretrained=lambda folder: None)
        config = CheckpointConfig(timeout_s=TIMEOUT_S, save_contents=("hf_model",), load_contents=("model",))
        manager = CheckpointManager(
            shared_path / "added",
            training.model,
            hf_config=hf_config(layout),
            processing_class=tokenizer,
            config=config,
        )
        manager.save(1)
        manager.close()
        with everywhere():
            folder = shared_path / "added" / "global_steps_1" / "actor" / "huggingface"
            assert json.loads((folder / "config.json").read_bytes())["vocab_size"] == rows > VOCAB_SIZE
            assert read_weights(folder)["model.embed_tokens.weight"].shape[0] == rows


@pytest.mark.parametrize("layout", cases("tp2", "pp2-tied-bf16!", "tp2-ep2-etp1"))
def test_the_export_alone_can_be_loaded(layout: Layout, shared_path: Path) -> None:
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        wanted = model_alone(global_state(training))
        config = {"save_contents": ("hf_model",), "load_contents": ("hf_model",)}
        manager = manager_of(training, shared_path, hf_config=hf_config(layout), **config)
        manager.save(2)
        train(training, 2, 4)
        with torch.no_grad():
            for parameter in (parameter for chunk in training.model for parameter in chunk.parameters()):
                parameter.fill_(torch.nan)
        manager.load()
        assert_same_state(model_alone(global_state(training)), wanted)
        # The next step must not bring the old weights back.
        copy_main_to_model(training.optimizer)
        gather_parameters(training.model)
        assert_same_state(model_alone(global_state(training)), wanted)
        manager.close()


@pytest.mark.world(2)
@pytest.mark.parametrize("contents", [("hf_model",), ("hf_model", "optimizer")])
def test_a_flipped_bit_of_the_export_is_never_loaded(contents: tuple[str, ...], shared_path: Path) -> None:
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        training = build(layout, seed=1)
        words = {"save_contents": contents, "load_contents": contents}
        manager = manager_of(training, shared_path, hf_config=hf_config(layout), **words)
        states = []
        for step in (1, 2):
            train(training, step - 1, step)
            manager.save(step).wait()
            states.append(model_alone(global_state(training)))
        dist.barrier()
        if dist.get_rank() == 0:
            (weights,) = shared_path.glob("global_steps_2/actor/huggingface/*.safetensors")
            flip(weights, 8 * weights.stat().st_size - 77)
        dist.barrier()
        before = model_alone(global_state(training))
        for message in raised_everywhere(CheckpointCorruptError, error_of(lambda: manager.load(step=2))):
            assert "safetensors: has a wrong CRC" in message
            assert "Nothing has been changed" in message
        assert_same_state(model_alone(global_state(training)), before)
        with everywhere():
            assert manager.load().step == 1
        assert_same_state(model_alone(global_state(training)), states[0])
        manager.close()


def model_alone(state: GlobalState) -> GlobalState:
    """Without what only pads the vocabulary, which HuggingFace has not."""
    model = {name: tensor for name, tensor in state.items() if name.endswith(" model")}
    return {
        name: tensor[:VOCAB_SIZE] if "word_emb" in name or "output" in name else tensor
        for name, tensor in model.items()
    }


@pytest.mark.world(2)
def test_a_config_of_another_model_is_refused_before_anything_is_saved(shared_path: Path) -> None:
    layout = LAYOUTS["tp2"]
    with parallel(layout):
        training = build(layout, seed=1)
        for changed, wanted in (
            ({"num_key_value_heads": 1}, "num_query_groups"),
            ({"vocab_size": 1000}, "word_embeddings"),
            ({"vocab_size": 100}, "word_embeddings"),
            ({"tie_word_embeddings": True}, "output_layer"),
            # The same shapes: eight heads of half the size.
            ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 5}, "num_attention_heads"),
        ):
            config = hf_config(layout)
            for name, value in changed.items():
                setattr(config, name, value)
            messages = refused(
                training,
                lambda config=config: manager_of(training, shared_path, hf_config=config, save_contents=CONTENTS),
                CheckpointMismatchError,
            )
            assert_names(messages, wanted)
        # More tokens than rows: which of the rows behind vocab_size belong to tokens is unknown.
        tokenizer = SimpleNamespace(get_vocab=lambda: {"<new>": 10_000}, save_pretrained=lambda folder: None)
        arguments = {"hf_config": hf_config(layout), "processing_class": tokenizer}
        config = CheckpointConfig(timeout_s=TIMEOUT_S, save_contents=CONTENTS)
        messages = refused(
            training,
            lambda: CheckpointManager(shared_path, training.model, training.optimizer, config=config, **arguments),
            CheckpointMismatchError,
        )
        assert_names(messages, f"10001 tokens.* vocab_size of config.json is {VOCAB_SIZE}")
        with everywhere(), pytest.raises(ValueError, match="hf_config"):
            manager_of(training, shared_path, save_contents=CONTENTS)


@pytest.mark.world(2)
def test_a_config_that_computes_something_else_is_told(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = LAYOUTS["tp2"]
    with parallel(layout):
        training = build(layout, seed=1)
        config = hf_config(layout)
        config.rms_norm_eps = 1e-3
        manager_of(training, shared_path, hf_config=config, save_contents=CONTENTS).close()
        told = [record.getMessage() for record in caplog.records if record.name == "mcore_ckpt.save.hf_export"]
        with everywhere():
            assert len(told) == (dist.get_rank() == 0)
            assert all("layernorm_epsilon" in text for text in told)
            caplog.clear()
        manager_of(training, shared_path, hf_config=hf_config(layout), save_contents=CONTENTS).close()
        with everywhere():
            assert not [record for record in caplog.records if record.name == "mcore_ckpt.save.hf_export"]
        # Without an export, the checkpoints still keep it, so another order of rows is told, too.
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 4, 5
        manager_of(training, shared_path, hf_config=config).close()
        told = [record.getMessage() for record in caplog.records if record.name == "mcore_ckpt.save.hf_export"]
        with everywhere():
            assert len(told) == (dist.get_rank() == 0)
            assert all("num_attention_heads" in text and "merge" in text for text in told)


@pytest.mark.world(2)
def test_a_rank_with_a_disk_of_its_own_is_told_of_at_once(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it could say so the others wait in the round of what the model is made from."""

    def unseen(staging: Path) -> None:
        if dist.get_rank() == 1:
            raise CommitError(f"{staging} cannot be seen")

    layout = LAYOUTS["tp2"]
    with parallel(layout):
        training = build(layout, seed=1)
        manager = manager_of(training, shared_path, hf_config=hf_config(layout), save_contents=CONTENTS)
        monkeypatch.setattr("mcore_ckpt.save.rank_files.check_seen", unseen)
        messages = refused(training, lambda: manager.save(1), CommitError)
        assert_names(messages, r"rank 1: .*staging.* cannot be seen")
        manager.close()


@pytest.mark.world(2)
def test_a_missing_layer_fails_the_save_on_all_ranks_and_leaves_nothing(shared_path: Path) -> None:
    layout = LAYOUTS["tp2"]
    with parallel(layout):
        training = build(layout, seed=1)
        config = hf_config(layout)
        manager = manager_of(training, shared_path, hf_config=config, save_contents=CONTENTS)
        config.num_hidden_layers += 1  # a manager is not made with it
        error = error_of(lambda: manager_of(training, shared_path / "a", hf_config=config, save_contents=CONTENTS))
        said = r"hf_config .* wanted the layers 2 x \(attention \+ mlp\), found 3 x"
        assert_names(raised_everywhere(CheckpointMismatchError, error), said)
        messages = refused(training, lambda: manager.save(1), CheckpointMismatchError)
        assert_names(messages, r"decoder\.layers\.2")
        dist.barrier()
        with everywhere():
            assert not (shared_path / "global_steps_1" / "actor").exists()
        manager.close()
