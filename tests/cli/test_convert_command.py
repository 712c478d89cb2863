"""`mcore-ckpt convert`, as it is typed: what comes, and what does not come where it fails."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.io.disk_space import DiskSpace, Limit
from mcore_ckpt.steps import commit, new_folder, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.tools.convert import destinations, to_torch_dist
from mcore_ckpt.tools.convert.reshard import role_writer
from tests.support.forks import Start, forked, separate
from tests.support.quantized_folders import FP8_CONFIG, fp8, publish
from tests.support.tiny_models import make_hf_folder

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parent.parent.parent
FORMATS = ("native", "torch_dist")
# torch_dist has no layout.
LAYOUTS = {"native": ("--tp", "2"), "torch_dist": ()}
IMPORTS = ("mcore_ckpt.cli.main", "mcore_ckpt.tools.convert.to_native", "mcore_ckpt.tools.convert.to_torch_dist")


def convert(source: Path, output: Path, *more: str) -> int:
    return main(["convert", "--hf_model_path", str(source), "--output_path", str(output), *more])


# CI converts to Megatron's format, which stores the same tensor of all layers as one, the architectures whose layers
# differ, or whose experts are many tensors of a layer. tests/tools/test_round_trip.py has every architecture in ours.
ARCHITECTURES = {
    **dict.fromkeys(("qwen3-value", "deepseek_v3-mtp", "gpt_oss"), "native"),
    **dict.fromkeys(("llama", "qwen2-tied", "qwen2_moe", "seed_oss", "deepseek_v2", "qwen3_5_text-mtp"), None),
    **dict.fromkeys(
        ("qwen3_moe-sparse", "mixtral", "deepseek_v3-no-q-lora", "glm4_moe-mtp", "qwen3_next-mtp"), "torch_dist"
    ),
    **dict.fromkeys(("qwen3_5_moe_text-mtp", "minimax_m2"), "torch_dist"),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if form == in_ci else pytest.mark.full)
        for form in FORMATS
        for name, in_ci in ARCHITECTURES.items()
    ],
)
def test_every_architecture_is_what_its_folder_holds(name: str, form: str, tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", name)
    assert convert(folder, tmp_path / "out", "--format", form, "--test", *LAYOUTS[form], "--json") == 0
    # And back: layer specs differ in a norm's name, of which a checkpoint for all of them has several.
    assert main(["test", "--local_dir", str(tmp_path / "out"), "--reference", str(folder)]) == 0


def test_a_checkpoint_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3_moe")
    (folder / "tokenizer.json").write_text("{}")
    sizes = ("--tp", "2", "--pp_size", "2", "--ep", "2", "--role", "critic", "--use_cpu_initialization")
    assert convert(folder, tmp_path / "out", *sizes, "--trust_remote_code", "--json") == 0
    role = Path(json.loads(capsys.readouterr().out)["path"])
    assert role == tmp_path / "out" / "global_steps_0" / "critic"
    assert tracker.read_tracker(tmp_path / "out") == 0
    assert sorted(path.name for path in (role / "huggingface").iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    ]
    # Of each pipeline stage the dense parts by tensor rank, and the experts by expert rank.
    assert len(list((role / "model").glob("mp_rank_??_???"))) == 4
    assert len(list((role / "model").glob("mp_rank_??_???_???"))) == 8
    for file in role.rglob("*.pt"):
        torch.load(file, weights_only=True, mmap=True)


def test_a_checkpoint_of_megatrons(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3_moe")
    assert convert(folder, tmp_path / "out", "--format", "torch_dist") == 0
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert (tmp_path / "out" / "huggingface" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("form", FORMATS)
def test_published_fp8_goes_in_and_out(form: str, tmp_path: Path) -> None:
    config = {**FP8_CONFIG, "weight_block_size": [8, 8]}
    folder = publish(make_hf_folder(tmp_path / "hf", "qwen3", dtype="bfloat16"), partial(fp8, block=(8, 8)), config)
    assert convert(folder, tmp_path / "out", "--format", form, "--dequantize-to", "float32", "--test") == 0
    for quantize in ((), ("--quantize", "fp8-block")):
        assert main(["merge", str(tmp_path / "out"), str(tmp_path / f"merged{len(quantize)}"), *quantize]) == 0
    # In float32 nothing was rounded, so the scales come back, too.
    stored, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "merged2"))
    for name, tensor in stored.items():
        close = torch.allclose(merged[name].float(), tensor.float(), rtol=1e-6, atol=0)
        assert close if name.endswith("_scale_inv") else torch.equal(merged[name].float(), tensor.float()), name
    plain = load_file(tmp_path / "merged0" / "model.safetensors")
    assert {tensor.dtype for name, tensor in plain.items() if name.endswith("proj.weight")} == {torch.float32}
    assert plain.keys() == {name for name in stored if not name.endswith("_scale_inv")}


@pytest.mark.parametrize("start", [forked, pytest.param(separate, marks=pytest.mark.full)])
@pytest.mark.parametrize("form", FORMATS)
def test_torchrun_divides_the_work(form: str, start: Start, tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    command = [REPOSITORY / "scripts" / "converter_hf_to_mcore.py", "--format", form, "--test", *LAYOUTS[form]]
    done = start([*command, "--hf_model_path", folder, "--output_path", tmp_path / "out"], ranks=2, imports=IMPORTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert convert(folder, tmp_path / "alone", "--format", form, *LAYOUTS[form]) == 0
    one, two = (
        {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*")
            if path.suffix in (".pt", ".distcp", ".json") and path.name != "manifest.json"
        }
        for root in (tmp_path / "alone", tmp_path / "out")
    )
    assert one == two


def _nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][5, 7] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _unknown(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "extra": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})


def _other_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own_code"}))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_nan, "NaN"),
        (_unknown, "extra"),
        (_other_type, "own_code"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(
    damage: object, words: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    assert callable(damage)
    damage(folder)
    assert convert(folder, tmp_path / "out", "--format", form) == 1
    assert words in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.distcp")) + list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--tp", "3"], 1, "attention heads of this tensor cannot be divided"),
        (["--pp", "3"], 1, "4 layers on pp = 3"),
        (["--tp", "0"], 2, "tp is 0"),
        (["--ep", "2"], 2, "no experts"),
        (["--role", "a/b"], 2, "a/b"),
    ],
)
def test_layouts_that_do_not_fit(
    arguments: list[str], status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    assert convert(folder, tmp_path / "out", *arguments) == status
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "field", "what"),
    [("qwen3_next", "linear_num_key_heads", "key heads"), ("nemotron_h", "n_groups", "Mamba groups")],
)
def test_heads_of_mixers_must_divide(
    name: str, field: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows would: two heads of 8."""
    folder = make_hf_folder(tmp_path / "hf", name, **{field: 2})
    assert convert(folder, tmp_path / "out", "--tp", "4") == 1
    assert f"2 {what} of this tensor cannot be divided among tp = 4" in capsys.readouterr().err
    assert convert(folder, tmp_path / "out", "--tp", "2", "--test") == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert convert(tmp_path / "nowhere", tmp_path / "out") == 2


@pytest.mark.parametrize("form", FORMATS)
def test_too_little_space_is_told_before_a_byte_is_written(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    monkeypatch.setattr(new_folder, "space_of", lambda folder: DiskSpace((Limit("nbytes", 1000, "tmpfs"),)))
    assert convert(folder, tmp_path / "out", "--format", form) == 1
    assert "but only 1,000 bytes are free" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_of_somebody_elses_is_replaced(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    assert convert(folder, tmp_path / "out", "--format", "torch_dist") == 2
    assert (tmp_path / "out" / "mine").read_text() == "kept"


@pytest.mark.parametrize("form", FORMATS)
def test_the_test_finds_what_was_written_wrong(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    module = role_writer if form == "native" else to_torch_dist
    check = module.check_written

    def with_another_folder(catalog: object, *more: object) -> None:
        # What stands in the folder now is not what was written.
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.2.mlp.up_proj.weight"][1, 1] += 1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        check(catalog, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "check_written", with_another_folder)
    assert convert(folder, tmp_path / "out", "--format", form, "--test") == 1
    assert "layers.2.mlp.linear_fc1.weight" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.distcp")) + list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["out", "Qwen2.5-7B", "out.staging-1"])
def test_what_a_dead_process_left_is_removed_by_the_next(name: str, form: str, tmp_path: Path) -> None:
    folder, output = make_hf_folder(tmp_path / "hf", "qwen3"), tmp_path / name
    place = output if form == "torch_dist" else output / "global_steps_0" / "actor"
    left = file_names.staging_dir(place, "0123abcd")
    of_another = file_names.staging_dir(place.with_name("other.staging-1"), "0123abcd")
    for staging in (left, of_another):
        staging.mkdir(parents=True)
        # No process has run since the machine was started.
        (staging / file_names.OWNER_FILE).write_text(json.dumps(asdict(replace(Owner.this_process(), start=0))))
    assert convert(folder, output, "--format", form) == 0
    assert not left.exists()
    assert of_another.exists()


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_killed_conversion_left_is_not_in_place(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    folder, output = make_hf_folder(tmp_path / "hf", "qwen3"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(commit, "publish", die)
        patched.setattr(destinations, "publish_folder", die)
        for tidy_up in ("discard", "remove_folder"):  # which a killed process does not
            patched.setattr(commit, tidy_up, lambda _: None)
        with pytest.raises(Killed):
            convert(folder, output, "--format", form)
    assert steps.complete_steps(output) == []
    assert not (output / "metadata.json").exists()
    assert convert(folder, output, "--format", form) == 0


def test_what_is_listed_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen2-tied")
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}
    save_file({**tensors, **head}, folder / "model.safetensors")
    assert convert(folder, tmp_path / "out") == 1
    assert "the two differ" in capsys.readouterr().err
    assert convert(folder, tmp_path / "out", "--ignore", "lm_head.*", "--test") == 0
    assert convert(folder, tmp_path / "other", "--ignore", "(") == 2
    assert "is no regular expression" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
def test_arguments_that_cannot_be_used(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen2")
    (tmp_path / "file").write_text("x")
    assert convert(folder, tmp_path / "file", "--format", form) == 2
    assert "is a file, not a folder" in capsys.readouterr().err
    for number in ("2", "two"):
        monkeypatch.setenv("WORLD_SIZE", number)
        monkeypatch.delenv("RANK", raising=False)
        assert convert(folder, tmp_path / "out", "--format", form) == 2
        assert "use torchrun, or unset WORLD_SIZE" in capsys.readouterr().err
        assert main(["merge", str(tmp_path), str(tmp_path / "out")]) == 2
        assert "use torchrun, or unset WORLD_SIZE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_layers_that_do_not_divide_are_divided_as_the_refusal_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the 61 layers of DeepSeek-V3 on any even number of stages."""
    folder = make_hf_folder(tmp_path / "hf", "llama", num_hidden_layers=3)
    assert convert(folder, tmp_path / "out", "--pp", "2") == 1
    error = capsys.readouterr().err
    for given in (["--first-stage-layers", "1"], ["--last-stage-layers", "2"], ["--pipeline-layout", "Et|ttL"]):
        assert given[0] in error
        assert convert(folder, tmp_path / given[0], "--pp", "2", *given, "--test") == 0
        manifest = json.loads((tmp_path / given[0] / "global_steps_0" / "actor" / "manifest.json").read_text())
        assert [stage["decoder"] for stage in manifest["stages"]] == [[0], [1, 2]]


def test_a_head_of_several_labels_is_refused_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_hf_folder(tmp_path / "hf", "qwen3-value")
    tensors = load_file(folder / "model.safetensors")
    five = {name: tensor.repeat(5, *[1] * (tensor.dim() - 1)) for name, tensor in tensors.items() if "score." in name}
    save_file(tensors | five, folder / "model.safetensors")
    assert convert(folder, tmp_path / "out") == 1
    assert "gives 5 values (labels), but megatron's value head gives one" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_models_that_nobody_could_use(
    changes: dict[str, object], words: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_hf_folder(tmp_path / "hf", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert convert(folder, tmp_path / "out", "--format", form) == 1
    assert words in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.distcp")) + list(tmp_path.rglob("*.pt"))


def test_layers_of_different_dtypes_are_not_one_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_hf_folder(tmp_path / "hf", "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].half()}, folder / "model.safetensors")
    assert convert(folder, tmp_path / "out", "--format", "torch_dist") == 1
    assert "megatron stores both parts as one tensor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
