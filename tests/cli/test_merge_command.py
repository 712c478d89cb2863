"""`mcore-ckpt merge` as it is typed: the folder is right and whole, or it is not there."""

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.huggingface import elements as filling
from mcore_ckpt.formats.huggingface import model_writer
from mcore_ckpt.formats.huggingface import writer as writing
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io import streams as streaming
from mcore_ckpt.io.disk_space import DiskSpace, Limit
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.steps import commit, new_folder
from mcore_ckpt.steps.role_files import files_manifest
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from tests.support.forks import Start, forked, separate
from tests.support.hub_server import HubServer
from tests.support.mcore_checkpoints import make, make_checkpoint, mcore_tensors, pad_vocabulary, weights
from tests.support.tiny_models import make_hf_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
IMPORTS = ("mcore_ckpt.cli.main", "mcore_ckpt.tools.convert.merge")
ASSETS = {
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"of": "the tokenizer"}',
    "merges.txt": b"a b\n",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    # Of a vision-language model's processor, in the files that transformers 4 and 5 have for it.
    "preprocessor_config.json": b'{"patch_size": 14}',
    "video_preprocessor_config.json": b'{"fps": 2}',
    "processor_config.json": b'{"image_processor": {}}',
    **dict.fromkeys(("README.md", "LICENSE", "vocab.bpe", "tokenizer.model.v3", "encoding/dsv32.py"), b"own"),
}
NO_ASSETS = (
    *("pytorch_model.bin", "model.safetensors.index.json", ".hidden.json"),
    # The first says that the weights are quantized, which they are not.
    *("hf_quant_config.json", "original/consolidated.00.pth", "onnx/model.onnx_data", "model.Q8_0.gguf"),
)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_folder(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def saved(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of steps of a checkpoint under tp = 2, pp = 2, with a tokenizer; nobody changes it."""
    root = tmp_path_factory.mktemp("saved")
    role_dir = make_checkpoint(root, hf, 2, pp=2)
    for name, data in ASSETS.items():
        path = role_dir / file_names.HUGGINGFACE_DIR / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    for name in NO_ASSETS:
        path = role_dir / file_names.HUGGINGFACE_DIR / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
    return role_dir.parent.parent


@pytest.fixture
def own(hf: Path, tmp_path: Path) -> Path:
    """The role's folder of a checkpoint that a test may change."""
    return make_checkpoint(tmp_path / "own", hf)


def assert_same(folder: Path, hf: Path) -> None:
    found, wanted = weights(folder), weights(hf)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def nothing_left(folder: Path) -> bool:
    """Whether a target did not come, and neither did anything beside it."""
    return not folder.exists() or not any(folder.iterdir())


# -- what comes --------------------------------------------------------------------------------------------


def test_a_folder_that_transformers_opens(saved: Path, hf: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = tmp_path / "models" / "merged"
    assert main(["merge", str(saved), str(target), "--max-shard-size", "200KB"]) == 0
    assert_same(target, hf)
    index = json.loads((target / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(hf).values())
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values())
    reference = AutoModelForCausalLM.from_pretrained(hf)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, reference(tokens).logits)
    assert {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} == {
        *ASSETS,
        "config.json",
        "model.safetensors.index.json",
        *set(index["weight_map"].values()),
    }
    for name, data in ASSETS.items():
        assert (target / name).read_bytes() == data
    assert os.listdir(target.parent) == ["merged"]


def test_a_framework_s_own_part_of_a_step_is_no_second_model(saved: Path, hf: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "root")
    step_path = next(path for paths in file_names.step_dirs(tmp_path / "root").values() for path in paths)
    attempt = commit.new_attempt()
    staging = commit.open_staging(step_path / "recover_info", attempt)
    number = file_names.parse_step(step_path.name)
    assert number is not None
    commit.write_manifest(staging, files_manifest("recover_info", number, ("actor",), attempt, [], 1))
    commit.publish(staging, step_path / "recover_info", attempt)
    assert main(["merge", str(tmp_path / "root"), str(tmp_path / "merged")]) == 0
    assert_same(tmp_path / "merged", hf)


@pytest.mark.parametrize("start", [forked, pytest.param(separate, marks=pytest.mark.full)])
def test_the_flags_of_verls_merger(saved: Path, hf: Path, tmp_path: Path, start: Start) -> None:
    role_dir = next(saved.glob("*/actor"))
    command = [ROOT / "scripts/model_merger.py", "merge", "--backend", "megatron", "--hf_model_path", hf]
    command += ["--local_dir", role_dir, "--target_dir", tmp_path / "merged"]
    done = start([*command, "--use_cpu_initialization", "--trust-remote-code"], imports=IMPORTS)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "merged", hf)
    arguments = ["--backend", "megatron", "--local_dir", str(role_dir), "--test_hf_dir", str(hf)]
    assert main(["test", *arguments, "--use_cpu_initialization", "--trust-remote-code"]) == 0


def test_a_result_for_programs(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "merged").mkdir()
    arguments = ["--dtype", "bfloat16", "--step", "5", "--role", "actor", "--json"]
    assert main(["merge", str(saved), str(tmp_path / "merged"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") > 0
    assert found == {
        "source": str(next(saved.glob("*/actor"))),
        "target": str(tmp_path / "merged"),
        "model": "qwen3 of 4 layers",
        "dtype": "bfloat16",
        "files": 1,
        "bytes": sum(tensor.numel() * 2 for tensor in weights(tmp_path / "merged").values()),
        "multi_token_prediction": False,
        "left_out": [
            {
                "reason": "padding of the vocabulary, which has 131 tokens",
                "tensors": [
                    f"{name}.weight (rows 131 to 135)" for name in ("embedding.word_embeddings", "output_layer")
                ],
            },
            {"reason": "descriptions of how the old weights were quantized", "tensors": ["hf_quant_config.json"]},
            {
                "reason": "old weights in the form of another program or of an adapter",
                "tensors": ["model.Q8_0.gguf", "onnx/model.onnx_data", "original/consolidated.00.pth"],
            },
        ],
        "other_model": [],
    }
    assert json.loads((tmp_path / "merged" / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in weights(tmp_path / "merged").values()} == {torch.bfloat16}


def test_a_critic_is_known_by_its_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    hf = make_hf_folder(tmp_path / "hf", "qwen3-value")
    role_dir = make_checkpoint(tmp_path, hf)
    path = role_dir / file_names.HUGGINGFACE_DIR / "config.json"
    config = json.loads(path.read_bytes())
    # Trainers make critics of a language model's folder.
    path.write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    assert main(["merge", str(role_dir), str(tmp_path / "merged"), "--is-value-model"]) == 0
    assert_same(tmp_path / "merged", hf)
    model, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    assert model.score.weight.shape == (1, 64)


@pytest.mark.parametrize("start", [forked, pytest.param(separate, marks=pytest.mark.full)])
def test_ranks_of_torchrun_share_the_work(saved: Path, hf: Path, tmp_path: Path, start: Start) -> None:
    command = [ROOT / "scripts/model_merger.py", "merge", saved, tmp_path / "out" / "merged", "--json"]
    done = start(command, ranks=2, imports=IMPORTS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 2
    assert_same(tmp_path / "out" / "merged", hf)
    assert os.listdir(tmp_path / "out") == ["merged"]


def on_ranks(count: int, work: Callable[[Agreement], object]) -> list[BaseException | None]:
    """What `work` raises on each of several ranks, which are threads."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    ends: list[BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            work(Agreement(store, rank, count, "merge", 20))
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def test_if_one_rank_fails_all_do(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(plan: Any, numbers: Any, *rest: Any, **options: Any) -> Any:
        if 0 in numbers:
            raise OSError(errno.ENOSPC, "no space", "the third file")
        return writing.write_weights(plan, numbers, *rest, **options)

    request = MergeRequest(saved, tmp_path / "out" / "merged")
    monkeypatch.setattr(model_writer, "write_weights", write)
    ends = on_ranks(3, lambda agreement: merge(request, agreement=agreement))
    for error in ends:
        assert isinstance(error, CheckpointError)
        assert "no space" in str(error)
    assert nothing_left(tmp_path / "out")
    monkeypatch.undo()
    assert on_ranks(3, lambda agreement: merge(request, agreement=agreement)) == [None] * 3
    assert len([*(tmp_path / "out" / "merged").glob("*.safetensors")]) == 3


def test_upload_comes_last(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class HfApi:
        def create_repo(self, repository: str, **options: Any) -> None:
            calls.append((repository, options))

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            calls.append((repo_id, folder_path, sorted(os.listdir(folder_path))))

    monkeypatch.setattr("huggingface_hub.HfApi", HfApi)
    target = tmp_path / "merged"
    assert main(["merge", str(saved), str(target), "--hf_upload_path", "me/model", "--private"]) == 0
    assert calls == [
        ("me/model", {"private": True, "exist_ok": True}),
        ("me/model", target, sorted(os.listdir(target))),
    ]


@pytest.mark.parametrize(
    ("flags", "is_there", "is_private"),
    [
        ([], False, True),
        (["--private"], False, True),
        (["--public"], False, False),
        ([], True, False),  # whoever has made it has chosen
    ],
)
def test_a_new_repository_is_private_unless_asked_otherwise(
    flags: list[str], is_there: bool, is_private: bool, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda _, repo_id, folder_path: pushed.append(repo_id))
    with HubServer() as hub, hub.used(tmp_path / "home", HF_TOKEN="hf_own"):
        if is_there:
            hub.add("me/model", {"README.md": b"mine"})
        assert main(["merge", str(saved), str(tmp_path / "merged"), "--hf_upload_path", "me/model", *flags]) == 0
        assert hub.repositories["me/model"].is_private == is_private
    assert pushed == ["me/model"]


def test_a_repository_is_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["merge", "saved", "merged", "--hf_upload_path", "me/model", "--private", "--public"])
    assert "--public: not allowed with argument --private" in capsys.readouterr().err


def test_a_model_on_the_hub_is_not_replaced_unasked(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    class HfApi:
        def list_repo_files(self, repository: str) -> list[str]:
            return ["README.md", "model.safetensors"]

        def create_repo(self, repository: str, **options: Any) -> None:
            calls.append(repository)

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            calls.append(repo_id)

    monkeypatch.setattr("huggingface_hub.HfApi", HfApi)
    target = tmp_path / "merged"
    assert main(["merge", str(saved), str(target), "--hf_upload_path", "me/model"]) == 2
    assert "--hf_upload_path me/model: has a model already (model.safetensors)" in capsys.readouterr().err
    assert (target.exists(), calls) == (False, [])
    assert main(["merge", str(saved), str(target), "--hf_upload_path", "me/model", "--force"]) == 0
    assert calls == ["me/model"] * 2


def test_an_upload_that_fails_leaves_the_folder(
    saved: Path, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class HfApi:
        def create_repo(self, repository: str, **options: Any) -> None:
            raise ConnectionError("no such host: https://user:S3CRET@host/x?X-Amz-Signature=S3CRET")

    monkeypatch.setattr("huggingface_hub.HfApi", HfApi)
    assert main(["merge", str(saved), str(tmp_path / "merged"), "--hf_upload_path", "me/model"]) == 1
    assert (
        "is complete, but could not be uploaded to me/model: ConnectionError: no such host: https://***@host/x?..."
        in (said := capsys.readouterr().err)
    )
    assert "S3CRET" not in said
    assert_same(tmp_path / "merged", hf)


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--step", "4"], 1, "no complete checkpoint of step 4: there are the steps "),
        (["--role", "critic"], 2, "has the roles actor"),
        (["--private"], 2, "--private needs a repository"),
        (["--public"], 2, "--public needs a repository"),
        (["--local_dir", "elsewhere"], 2, "source: give it once"),
        (["--tie-word-embedding"], 1, "tie_word_embedding is True, but the tensors have a head"),
        (["--is-value-model"], 1, "is_value_model is True, but the tensors show a model with a language model"),
        (["--hf_model_path", "nowhere"], 2, "--hf_model_path nowhere: there is no such folder"),
    ],
)
def test_exit_status(
    saved: Path, tmp_path: Path, arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(saved), str(tmp_path / "out" / "merged"), *arguments]) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("size", ["0", "5TB", "many"])
def test_sizes_that_are_none(size: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["merge", str(saved), str(tmp_path / "merged"), "--max-shard-size", size])
    assert end.value.code == 2


def test_a_target_that_is_there_stays(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "mine").write_text("x")
    assert main(["merge", str(saved), str(tmp_path / "merged")]) == 2
    assert "exists already and is not empty" in capsys.readouterr().err
    assert os.listdir(tmp_path / "merged") == ["mine"]
    assert os.listdir(tmp_path) == ["merged"]


def test_a_target_that_fills_meanwhile_stays(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "merged"

    def write_index(*arguments: Any) -> None:
        target.mkdir()
        (target / "mine").write_text("x")

    monkeypatch.setattr(model_writer, "write_index", write_index)
    with pytest.raises(CheckpointError, match="could not be put in place"):
        merge(MergeRequest(saved, target))
    assert os.listdir(target) == ["mine"]
    assert os.listdir(tmp_path) == ["merged"]


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _configure(**fields: Any) -> Callable[[Path], None]:
    def change(role_dir: Path) -> None:
        path = role_dir / file_names.HUGGINGFACE_DIR / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda role_dir: _damage(role_dir / file_names.model_file(0, 0)), "wrong CRC"),
        (lambda role_dir: (role_dir / file_names.model_file(0, 0)).unlink(), "model_states.pt: missing"),
        (lambda role_dir: (role_dir / file_names.MANIFEST_FILE).unlink(), "no complete checkpoint"),
        (lambda role_dir: (role_dir / file_names.HUGGINGFACE_DIR / "config.json").unlink(), "config.json: missing"),
        (_configure(model_type="qwen2"), "lacks decoder.layers.0.self_attention.linear_qkv.bias"),
        (_configure(model_type="unheard"), "model_type 'unheard' is not known"),
        (_configure(num_hidden_layers=3), "has decoder.layers.3."),
        (_configure(num_hidden_layers=3), "or leave out these tensors with --ignore"),
        (_configure(tie_word_embeddings=True), "tie_word_embeddings is True, but the tensors have a head"),
        (_configure(vocab_size=1000), "shape [136, 64]"),
        (
            _configure(vocab_size=100),
            "config.json requires [100, 64]",
        ),
    ],
)
def test_what_is_wrong_is_named(
    change: Callable[[Path], object], words: str, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(own)
    assert main(["merge", str(own), str(tmp_path / "out" / "merged")]) == 1
    assert words in capsys.readouterr().err
    assert nothing_left(tmp_path / "out")


def test_tensors_that_the_model_does_not_have_are_left_out_as_the_refusal_says(own: Path, tmp_path: Path) -> None:
    _configure(num_hidden_layers=3)(own)
    assert main(["merge", str(own), str(tmp_path / "merged"), "--ignore", r"decoder\.layers\.3\..*"]) == 0
    assert not any(".layers.3." in name for name in weights(tmp_path / "merged"))


def test_code_that_the_source_does_not_have_is_warned_of(
    own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers has DeepSeek-V3 itself, so it loads without the code that the published auto_map names."""
    _configure(auto_map={"AutoModelForCausalLM": "modeling_own.Own"})(own)
    assert main(["merge", str(own), str(tmp_path / "merged")]) == 0
    assert "names the code modeling_own.Own, which is not in the folder" in caplog.text
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["auto_map"]


def test_code_of_a_models_own_is_copied_and_not_run(own: Path, tmp_path: Path) -> None:
    names = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "somebody/theirs--configuration.Theirs"}
    _configure(auto_map=names)(own)
    code = own / file_names.HUGGINGFACE_DIR / "modeling_own.py"
    code.write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    assert main(["merge", str(own), str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "modeling_own.py").read_bytes() == code.read_bytes()
    assert not (tmp_path / "run").exists()


def test_what_a_dtype_cannot_hold_is_refused(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = mcore_tensors(hf)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    tensors[name][2, 3], tensors[name][2, 4] = 65600.0, float("-inf")
    role_dir = make(tmp_path / "large", tensors, config=(hf / "config.json").read_bytes())
    assert main(["merge", str(role_dir), str(tmp_path / "out" / "merged"), "--dtype", "float16"]) == 1
    assert f"{name}: has the value 65600.0, which torch.float16 cannot hold" in capsys.readouterr().err
    assert nothing_left(tmp_path / "out")
    # What is infinite already is as it was saved.
    tensors[name][2, 3] = 65504.0
    role_dir = make(tmp_path / "held", tensors, config=(hf / "config.json").read_bytes())
    assert main(["merge", str(role_dir), str(tmp_path / "merged"), "--dtype", "float16"]) == 0


def test_tensors_of_nobody_are_left_out_if_they_are_listed(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"decoder.layers.0.probe.weight": torch.ones(3), "other.weight": torch.ones(2)}
    role_dir = make(tmp_path / "more", mcore_tensors(hf) | extra, config=(hf / "config.json").read_bytes())
    assert main(["merge", str(role_dir), str(tmp_path / "out" / "merged"), "--ignore", r".*\.probe\..*"]) == 1
    assert "other.weight" in capsys.readouterr().err
    assert (
        main(["merge", str(role_dir), str(tmp_path / "merged"), "--ignore", r".*\.probe\..*", "--ignore", "other.*"])
        == 0
    )
    assert weights(tmp_path / "merged").keys() == weights(hf).keys()
    assert main(["merge", str(role_dir), str(tmp_path / "out" / "merged"), "--ignore", "("]) == 2


def test_nan_is_refused_unless_asked_for(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = mcore_tensors(hf)
    pad_vocabulary(tensors)
    tensors["decoder.layers.1.mlp.linear_fc2.weight"][2, 3] = float("nan")
    role_dir = make(tmp_path / "nan", tensors, config=(hf / "config.json").read_bytes())
    assert main(["merge", str(role_dir), str(tmp_path / "out" / "merged")]) == 1
    assert f"model.layers.1.mlp.down_proj.weight: element {2 * 96 + 3} is NaN" in capsys.readouterr().err
    assert nothing_left(tmp_path / "out")
    assert main(["merge", str(role_dir), str(tmp_path / "out" / "merged"), "--allow-nan"]) == 0


def test_a_full_disk(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_index(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "index")

    monkeypatch.setattr(model_writer, "write_index", write_index)
    with pytest.raises(CheckpointError, match="No space left on device"):
        merge(MergeRequest(saved, tmp_path / "out" / "merged"))
    assert nothing_left(tmp_path / "out")
    monkeypatch.setattr(new_folder, "space_of", lambda folder: DiskSpace((Limit("nbytes", 1000, "tmpfs"),)))
    with pytest.raises(CheckpointError, match="but only 1,000 bytes are free"):
        merge(MergeRequest(saved, tmp_path / "new" / "merged"))
    assert not (tmp_path / "new").exists()


# -- killed ------------------------------------------------------------------------------------------------

KILLED_AT = {
    "before the first file": "model_writer.write_weights = lambda *rest, **options: die()",
    "in the middle of a file": "tuning.STREAM_BYTES = 8192; refuse = writing._refuse_nan; writing._refuse_nan = "
    "lambda placed: die() if placed.part.start > 50000 else refuse(placed)",
    "before the config": "model_writer.write_config = lambda *rest: die()",
    "before the rename": "os.rename = lambda *names: die()",
    "after the rename": "new_folder.sync_dir = lambda path: die() if (path / 'merged').exists() else None",
}
KILLED = """
import os, signal, sys
from mcore_ckpt.io import tuning, streams as streaming
from mcore_ckpt.cli.main import main
from mcore_ckpt.formats.huggingface import model_writer, writer as writing
from mcore_ckpt.steps import new_folder
def die(): os.kill(os.getpid(), signal.SIGKILL)
{point}
main(["merge", *sys.argv[1:]])
"""


@pytest.mark.parametrize("start", [forked, pytest.param(separate, marks=pytest.mark.full)])
@pytest.mark.parametrize("point", KILLED_AT)
def test_killed_it_is_absent_or_whole(point: str, saved: Path, hf: Path, tmp_path: Path, start: Start) -> None:
    program = tmp_path / "killed.py"
    program.write_text(KILLED.format(point=KILLED_AT[point]))
    target = tmp_path / "merged"
    killed = start([program, saved, target], imports=IMPORTS)
    assert killed.returncode == -signal.SIGKILL
    program.unlink()
    if point == "after the rename":
        assert_same(target, hf)
        return
    assert not target.exists()
    assert len(os.listdir(tmp_path)) == 1
    # What it left goes with the next run, which is as if nothing had been.
    assert main(["merge", str(saved), str(target)]) == 0
    assert_same(target, hf)
    assert os.listdir(tmp_path) == ["merged"]


def test_another_run_that_lives_keeps_its_folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner: list[str] = []

    def write(plan: Any, *rest: Any, **options: Any) -> Any:
        if not inner:
            inner.append("begun")
            merge(MergeRequest(saved, tmp_path / "merged"))
        return writing.write_weights(plan, *rest, **options)

    monkeypatch.setattr(model_writer, "write_weights", write)
    with pytest.raises(CheckpointError, match="could not be put in place"):
        merge(MergeRequest(saved, tmp_path / "merged"))
    assert os.listdir(tmp_path) == ["merged"]


def test_memory_does_not_grow_with_files(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STREAM_BYTES", 16384)
    taken: list[int] = []

    class HostMemory(streaming.HostMemory):
        def take(self, nbytes: int, device: int | None = None) -> _native.HostBuffer:
            taken.append(nbytes)
            return super().take(nbytes, device)

    monkeypatch.setattr(streaming, "HostMemory", HostMemory)
    monkeypatch.setattr(filling, "HostMemory", HostMemory)
    merge(MergeRequest(saved, tmp_path / "merged", dtype=torch.float16))
    assert len(taken) > 20
    assert max(taken) <= 3 * 16384
