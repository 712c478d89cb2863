"""`mcore-ckpt convert CHECKPOINT --format torch_dist`, as it is typed, without megatron.

`test_for_trainers.py` in tests/distributed and in tests/verl/with_verl show that the trainers go on from it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt.cli.main import main
from mcore_ckpt.formats.contract import RegionRead
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.reader import open_torch_dist
from mcore_ckpt.io import tuning
from mcore_ckpt.io.disk_space import DiskSpace, Limit
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import new_folder, tracker
from mcore_ckpt.tools.convert import destinations
from mcore_ckpt.tools.convert.for_trainers import layouts
from tests.support.small_model import HIDDEN, LAYERS, STEP, VOCABULARY, Tensors, make, tensors_of

ROLE = Path(f"global_steps_{STEP}", "actor")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HIDDEN // 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SCATTER_BYTES", 100)
    monkeypatch.setattr(tuning, "HF_LEAST_FILE_BYTES", 2000)


def of_llama() -> Tensors:
    norms = {f"decoder.layers.{n}.mlp.linear_fc1.layer_norm_weight": torch.rand(HIDDEN) for n in range(LAYERS)}
    return tensors_of() | norms


def saved(root: Path, tensors: Tensors, roles: tuple[str, ...] = ("actor",)) -> Path:
    """As a run of two ranks has saved it, with random states of a reshard."""
    cuts = {name: Cut(None) for name in tensors if "norm_weight" in name}
    for role in roles:
        make(root / "before", tensors, tp=2, cuts=cuts, role=role, roles=roles, config=json.dumps(CONFIG).encode())
    assert main(["reshard", str(root / "before"), str(root / "ours"), "--tp", "1", "--pp", "2", "--json"]) == 0
    return root / "ours"


def back(source: Path, output: Path, *more: str) -> int:
    return main(["convert", str(source), "--format", "torch_dist", "--output_path", str(output), *more])


def test_too_little_space_is_told_before_a_byte_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path, tensors_of())
    monkeypatch.setattr(new_folder, "space_of", lambda folder: DiskSpace((Limit("nbytes", 1000, "tmpfs"),)))
    assert back(source, tmp_path / "theirs") == 1
    assert "but only 1,000 bytes are free" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


def test_random_states_that_lack_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "ours", of_llama(), cuts={name: Cut(None) for name in of_llama() if "norm_weight" in name})
    assert back(tmp_path / "ours", tmp_path / "theirs") == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "ours" / ROLE / "rng_states" / "rng_states_pp0_tp0_cp0_dp0.pt") in said
    assert "python, numpy, torch, device, megatron" in said
    assert not (tmp_path / "theirs").exists()


def test_a_result_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tensors_of(experts=True)
    source = saved(tmp_path, tensors)
    capsys.readouterr()
    assert back(source, tmp_path / "theirs", "--test", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    path = tmp_path / "theirs" / f"iter_{STEP:07d}"
    assert (found["path"], found["layout"], found["step"]) == (str(path), "megatron", STEP)
    assert found["source"] == [str(source / ROLE)]
    assert any("a seed but no random states" in note for note in found["notes"])
    assert any("extra_state (rank)" in note for note in found["notes"])
    assert tracker.read_tracker(tmp_path / "theirs") == STEP

    reader = open_torch_dist(path)
    memory = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    names = {name: _as_stored(name) for name in tensors}
    read_regions(reader, [RegionRead(names[n], Region.whole(tuple(t.shape)), t) for n, t in memory.items()])
    assert all(torch.equal(memory[name], tensor) for name, tensor in tensors.items())
    files = TorchDistFiles(path, [path])
    assert (files.common["iteration"], files.common["checkpoint_version"]) == (STEP, 3.0)
    args = vars(files.common["args"])
    assert (args["num_layers"], args["hidden_size"], args["num_attention_heads"]) == (LAYERS, HIDDEN, 2)
    assert (args["pipeline_model_parallel_size"], args["no_save_rng"], args["no_save_optim"]) == (2, True, False)
    assert not files.object_keys("rng_state")
    key = "decoder.final_layernorm.weight"
    for kind, more in (("param", 0), ("fp32_param", 0), ("exp_avg", 1)):
        values = torch.full((HIDDEN,), float("nan"))
        files.read(WantedPart(f"optimizer.state.{kind}.{key}", (HIDDEN,), (0,), values))
        assert torch.equal(values, tensors[key] + more), kind


def _as_stored(name: str) -> str:
    """The reader calls experts as megatron's local layer specs do."""
    front, mark, rest = name.partition(".mlp.experts.")
    layer, _, number = rest.rpartition(".weight")
    return f"{front}{mark}local_experts.{number}.{layer}.weight" if mark else name


def test_a_result_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, tensors_of())
    assert back(source / ROLE, tmp_path / "theirs") == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'theirs'}/iter_{STEP:07d}: step {STEP} for megatron" in said
    assert "start with --no-load-rng" in said


def test_all_roles_of_a_step_go_back_to_verl(tmp_path: Path) -> None:
    step = saved(tmp_path, of_llama(), ("actor", "critic")) / ROLE.parent
    (step / "data.pt").write_bytes(b"verl's")
    (step / "transfer_queue/storage_units").mkdir(parents=True)
    (step / "transfer_queue/storage_units/su_0.pkl").write_bytes(b"prompts in flight.")
    (step / ".pinned").touch()
    assert back(tmp_path / "ours", tmp_path / "theirs", "--layout", "verl", "--test", "--json") == 0
    theirs = tmp_path / "theirs" / f"global_step_{STEP}"
    assert (theirs / "data.pt").read_bytes() == b"verl's"
    assert (theirs / "transfer_queue/storage_units/su_0.pkl").read_bytes() == b"prompts in flight."
    assert sorted(path.name for path in theirs.iterdir()) == ["actor", "critic", "data.pt", "transfer_queue"]
    for role in ("actor", "critic"):
        folder = theirs / role / "model" / "huggingface"
        weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        assert torch.equal(weights["model.norm.weight"], tensors_of()["decoder.final_layernorm.weight"])
        files = TorchDistFiles(theirs, [theirs / role / "optimizer" / "dist_ckpt"])
        assert files.common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
        assert all(name.startswith("optimizer.state.") for name in files.names)
    assert tracker.read_tracker(tmp_path / "theirs") == STEP
    # Megatron-LM trains one of them.
    assert back(tmp_path / "ours", tmp_path / "lm", "--json") == 2
    assert back(tmp_path / "ours", tmp_path / "lm", "--role", "critic", "--json") == 0


def test_verl_0_8_gets_one_folder_for_each_role(tmp_path: Path) -> None:
    saved(tmp_path, of_llama(), ("actor", "critic"))
    assert back(tmp_path / "ours", tmp_path / "theirs", "--layout", "verl-0.8", "--test", "--json") == 0
    for role in ("actor", "critic"):
        folder = tmp_path / "theirs" / f"global_step_{STEP}" / role
        assert sorted(path.name for path in folder.iterdir()) == ["dist_ckpt", "huggingface"]
        assert list((folder / "huggingface").glob("*.safetensors"))
        files = TorchDistFiles(folder, [folder / "dist_ckpt"])
        assert files.common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
        # Where there is no bridge, and by mbridge for critics, weights are loaded from here.
        assert {name.startswith("optimizer.state.") for name in files.names} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["{ours}", "--output_path", "{out}"], 2, "mcore-ckpt reshard"),
        (["--output_path", "{out}", "--format", "torch_dist"], 2, "nothing to convert"),
        (["{nowhere}", "--output_path", "{out}", "--format", "torch_dist"], 2, "there is no such folder"),
        (["{ours}", "--output_path", "{ours}", "--format", "torch_dist"], 2, "name another folder to write to"),
        (["{ours}", "--output_path", "{out}", "--format", "torch_dist", "--step", "4"], 1, "checkpoint of step 4"),
        (["{ours}", "--output_path", "{out}", "--format", "torch_dist", "--role", "ref"], 2, "has actor"),
        (["{ours}", "--output_path", "{out}", "--format", "torch_dist", "--ignore", "x"], 2, "needs all tensors"),
        (["{bare}", "--output_path", "{out}", "--format", "torch_dist"], 1, "with --hf_model_path"),
    ],
)
def test_exit_status(
    tmp_path: Path, arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: tmp_path / name for name in ("ours", "out", "nowhere", "bare")}
    if "{bare}" in arguments:
        make(tmp_path / "bare0", tensors_of(), tp=1)
        assert main(["reshard", str(tmp_path / "bare0"), str(tmp_path / "bare"), "--tp", "2", "--json"]) == 0
    else:
        saved(tmp_path, tensors_of())
    capsys.readouterr()
    assert main(["convert", *(text.format(**places) for text in arguments)]) == status
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, tensors_of())
    there = tmp_path / "theirs" / f"iter_{STEP:07d}"
    there.mkdir(parents=True)
    (there / "mine").write_text("kept")
    assert back(source, tmp_path / "theirs") == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in there.iterdir()] == ["mine"]
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == [there.name]


@pytest.mark.parametrize("layout", ["megatron", "verl"])
def test_a_damaged_checkpoint_leaves_nothing(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, of_llama())
    file = source / ROLE / "optim" / "distrib_optim_pp1_tp0_cp0_dp0.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    assert back(source, tmp_path / "theirs", "--layout", layout) == 1
    assert file.name in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


def test_the_test_finds_what_was_written_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, read = saved(tmp_path, tensors_of()), layouts.read_slice
    written = []

    def read_once_wrongly(reader: Any, wanted: Any) -> torch.Tensor:
        values = read(reader, wanted)
        if wanted.tensor.kind == "exp_avg" and "linear_proj" in wanted.name and not written:
            written.append(wanted)
            values.view(-1)[1] += 1
        return values

    monkeypatch.setattr(layouts, "read_slice", read_once_wrongly)
    assert back(source, tmp_path / "theirs", "--test") == 1
    assert "optimizer.state.exp_avg." in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("file", ["actor/model/huggingface/model.safetensors", "transfer_queue/queued"])
def test_the_test_reads_weights_and_copies_too(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = saved(tmp_path, of_llama()) / ROLE.parent / "transfer_queue" / "queued"
    queued.parent.mkdir()
    queued.write_bytes(b"prompts in flight.")
    seal = destinations.NewFolder.seal

    def damage(destination: destinations.NewFolder) -> None:
        path = destination.staging / file
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
        seal(destination)

    monkeypatch.setattr(destinations.NewFolder, "seal", damage)
    assert back(tmp_path / "ours", tmp_path / "theirs", "--layout", "verl", "--test") == 1
    said = capsys.readouterr().err
    assert Path(file).name in said
    assert "differ from" in said
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("layout", "name", "text"),
    [
        ("megatron", "latest_checkpointed_iteration.txt", "6"),
        ("megatron", "latest_checkpointed_iteration.txt", "4"),  # a training that went back
        ("megatron", "latest_checkpointed_iteration.txt", "release"),
        ("bridge", "latest_train_state.pt", "of another step"),
    ],
)
def test_a_training_is_sent_to_another_step_only_if_asked(
    layout: str, name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path, tensors_of())
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / name).write_text(text)
    assert back(source, tmp_path / "theirs", "--layout", layout) == 2
    assert f"{name} names another checkpoint" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == [name]
    assert (tmp_path / "theirs" / name).read_text() == text
    assert back(source, tmp_path / "theirs", "--force", "--layout", layout) == 0
    assert tracker.read_tracker(tmp_path / "theirs") == 5
    assert (tmp_path / "theirs" / name).read_bytes() != text.encode()


def test_a_failing_rename_leaves_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path, tensors_of())
    (tmp_path / "theirs").mkdir()
    tracker.write_tracker(tmp_path / "theirs", 3)

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(destinations, "publish_folder", fail)
    assert back(source, tmp_path / "theirs", "--force") == 1
    assert "no space left" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["latest_checkpointed_iteration.txt"]
    assert tracker.read_tracker(tmp_path / "theirs") == 3


def test_adapters_alone_are_refused_for_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = (f"decoder.layers.{n}.self_attention.linear_qkv.adapter.linear_in.weight" for n in range(LAYERS))
    source = saved(tmp_path, {name: torch.rand(4, HIDDEN) for name in names})
    assert back(source, tmp_path / "theirs", "--layout", "verl") == 1
    assert "adapter" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()
