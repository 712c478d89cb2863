"""Each kind of path, given to each command: it is taken, or the answer says what it is and what takes it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.arguments import TAKES, taken
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.tools.examine.find import find_checkpoint
from tests.support.checkpoints import make as make_version
from tests.support.mcore_checkpoints import make_checkpoint
from tests.support.node_folders import divide
from tests.support.privileges import protect, without_privileges
from tests.support.tiny_models import make_hf_folder
from tests.support.torch_dist_folder import make_torch_dist

STEPS = ("list", "watch", "prune", "branch", "collect")
MODELS = ("test", "test --reference", "convert --hf_model_path", "merge --hf_model_path", "bench --model")
ANY_FOLDER = ("doctor", "bench", "convert CHECKPOINT --hf_model_path")
OURS = ("inspect", "verify", "diff", "reshard", "convert", "merge", "test --local_dir")

# What a path is, in words, and which commands take it. "doctor" and "bench" take any folder.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "root": ("a folder of steps", (*STEPS, *OURS)),
    "parent": ("a folder above the steps", (*STEPS, *OURS)),  # the only root below it is taken
    "parents": ("a folder above the steps", ()),
    "root/global_steps_3": ("the folder of a step", ("list", "watch", *OURS)),
    "root/global_steps_3/actor": ("the folder of a role", ("list", "watch", *OURS)),
    "root/global_steps_3/actor/model": ("a folder inside a step", ("list", "watch", *MODELS[3:])),
    "flat": ("a folder of steps", (*STEPS, *OURS)),
    "flat/global_step_3": ("the folder of a role", ("list", "watch", *OURS)),
    "verl of ours": ("a folder of steps", (*STEPS, *OURS)),
    "node0": ("a folder of steps", (*STEPS, *OURS)),
    "torch_dist": ("a torch_dist checkpoint of Megatron", ("merge", "test --local_dir")),
    "megatron": ("a folder of steps of another program (iter_0000010", ("merge", "test --local_dir")),
    "megatron/iter_0000010": ("a torch_dist checkpoint of Megatron", ("merge", "test --local_dir")),
    "verl": ("a folder of steps of another program (global_step_4", ("merge", "test --local_dir")),
    "verl/global_step_4/actor": ("a torch_dist checkpoint of Megatron", ("merge", "test --local_dir")),
    "ranks": ("with a file for each rank", ("merge", "test --local_dir")),
    "fsdp": ("a folder of FSDP shards", ("merge", "test --local_dir")),
    "hf": ("a HuggingFace model", MODELS),
    "adapter": ("an adapter in PEFT's form", MODELS),
    "empty": ("an empty folder", (*STEPS, *OURS, *MODELS)),  # each says what it lacks
    "zero": ("a folder of steps", (*STEPS, *OURS)),
    "hf/config.json": ("a file", ()),
    "root/global_steps_3/actor/manifest.json": ("a file of a checkpoint", ()),
    "rot": ("there is no such folder: the closest name is", ()),
    "root/global_steps_4": ("there is no such folder: the closest name is", ()),
    "hf/config.json/x": ("is a file", ()),
    "Qwen/Qwen3-0.6B": ("there is no such folder", ()),
    "best": ("the folder of a step", OURS),  # a step that somebody has renamed
    "latest": ("the folder of a step", ("list", "watch", *OURS)),  # a link to a step
    "odd names": ("a folder of steps of this package whose names were changed (global_steps_0000003)", ()),
    "release": ("a folder of steps of another program (release: a torch_dist", ("merge", "test --local_dir")),
    "legacy": (
        "a folder of steps of another program (iter_0000010: a checkpoint in Megatron's legacy",
        ("merge", "test --local_dir"),
    ),
    "legacy/iter_0000010": ("a checkpoint in Megatron's legacy format", ()),
    "trainer": ("(checkpoint-500: a HuggingFace model)", ("merge", "test --local_dir")),
    "bin": ("a HuggingFace model", MODELS),
    "models--Qwen--Qwen3": ("a model's folder in the hub's cache", ()),
    "dangling": ("is a link to /not/mounted, which does not exist (is it not mounted?)", ()),
    "dangling/run": ("dangling, a link to /not/mounted, which does not exist (is it not mounted?)", ()),
    "loop": ("is a link to loop, which leads back to it", ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kinds")
    hf = make_hf_folder(made / "hf", "llama")
    shutil.move(make_checkpoint(made / "made", hf, tp=2).parent.parent, made / "root")
    shutil.rmtree(made / "made")
    (step,) = (made / "root").glob("global_steps_*")
    step.rename(made / "root" / "global_steps_3")
    make_version(made / "root" / "global_steps_3" / "actor", 3)
    divide(made / "root" / "global_steps_3" / "actor", [made / "node0", made / "node1"])
    (made / "root" / file_names.TRACKER_FILE).write_text("3")
    shutil.copytree(made / "root", made / "parent" / "run")
    for name in ("one", "two"):
        shutil.copytree(made / "root", made / "parents" / name)
    (made / "flat").mkdir()
    shutil.copytree(made / "root" / "global_steps_3" / "actor", made / "flat" / "global_step_3")
    shutil.copytree(made / "root" / "global_steps_3", made / "verl of ours" / "global_step_3")
    (made / "verl of ours" / "global_step_3" / "data.pt").write_bytes(b"x")
    for name in ("flat", "verl of ours"):
        (made / name / file_names.TRACKER_FILE).write_text("3")
    make_version(made / "made" / "global_steps_0" / "actor", 0)
    (made / "zero").mkdir()
    (made / "made" / "global_steps_0").rename(made / "zero" / "checkpoint-0")
    (made / "zero" / file_names.TRACKER_FILE).write_text("0")
    shutil.rmtree(made / "made")
    make_torch_dist(made / "torch_dist")
    for number in (5, 10):
        shutil.copytree(made / "torch_dist", made / "megatron" / f"iter_{number:07d}")
    for tree in ("model", "optimizer", "extra"):
        shutil.copytree(made / "torch_dist", made / "verl" / "global_step_4" / "actor" / tree / "dist_ckpt")
    (made / "verl" / "global_step_4" / "data.pt").write_bytes(b"x")
    (made / "verl" / file_names.TRACKER_FILE).write_text("4")
    (made / "ranks" / "model" / "mp_rank_00").mkdir(parents=True)
    (made / "ranks" / "model" / "mp_rank_00" / "model.pt").write_bytes(b"x")
    (made / "fsdp").mkdir()
    (made / "fsdp" / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    (made / "adapter").mkdir()
    (made / "adapter" / "adapter_config.json").write_text("{}")
    (made / "adapter" / "adapter_model.safetensors").write_bytes(b"x")
    (made / "empty").mkdir()
    for copy in ("best", "odd names/global_steps_0000003"):
        shutil.copytree(made / "root" / "global_steps_3", made / copy)
    for link, target in (("latest", "root/global_steps_3"), ("dangling", "/not/mounted"), ("loop", "loop")):
        (made / link).symlink_to(target)
    shutil.copytree(made / "torch_dist", made / "release" / "release")
    (made / "release" / file_names.TRACKER_FILE).write_text("release")
    (made / "legacy" / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (made / "legacy" / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"x")
    for file in hf.iterdir():  # an export in the same folder changes nothing
        shutil.copy(file, made / "legacy" / "iter_0000010")
    shutil.copytree(hf, made / "trainer" / "checkpoint-500")
    (made / "bin").mkdir()
    shutil.copy(hf / "config.json", made / "bin")
    (made / "bin" / "pytorch_model.bin").write_bytes(b"x")
    (made / "models--Qwen--Qwen3" / "snapshots" / "main").mkdir(parents=True)
    return made


@pytest.fixture(autouse=True)
def at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_takes_it_or_says_what_it_is(kind: str) -> None:
    words, takers = KINDS[kind]
    is_folder = os.path.isdir(kind)
    for command in TAKES:
        takes = command in takers or (
            is_folder and command in ("doctor", "bench", "convert CHECKPOINT --hf_model_path")
        )
        if takes:
            assert taken(Path(kind), command).is_dir()
            continue
        with pytest.raises(InvalidArgumentError) as refused:
            taken(Path(kind), command)
        said = str(refused.value)
        assert said.startswith(f"{Path(kind)}: ")
        assert words in said
        assert (
            "no such folder" in said
            or "is a file" in said
            or "a link to" in said
            or f"which `mcore-ckpt {command}` does not take: " in said
        )


@pytest.mark.parametrize("command", ["list", "watch --once", "prune --dry-run", "inspect", "verify"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("empty", "node0")])
def test_the_commands_ask(command: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound checkpoint is found where it is, and no other folder is called damaged, or one without steps."""
    words, takers = KINDS[kind]
    name, *more = command.split()
    status = main([name, kind, *more])
    captured = capsys.readouterr()
    if name in takers:
        assert status == 0
    else:
        assert status == 2
        assert words in captured.err
    assert "damaged" not in captured.out + captured.err
    assert "no step is complete" not in captured.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("convert hf --output_path out", "`mcore-ckpt convert --hf_model_path hf --output_path OUT`"),
        ("convert hf --output_path out --format torch_dist", "`mcore-ckpt convert --hf_model_path hf"),
        ("convert --hf_model_path root --output_path out", "--hf_model_path root: is a folder of steps"),
        ("convert torch_dist --output_path out --format torch_dist", "`mcore-ckpt merge torch_dist OUT`"),
        ("reshard torch_dist out", "is a torch_dist checkpoint of Megatron, which `mcore-ckpt reshard` does not take"),
        ("collect hf out", "is a HuggingFace model, which `mcore-ckpt collect` does not take"),
        ("merge hf out", "is a HuggingFace model, which `mcore-ckpt merge` does not take"),
        ("merge megatron out", "has the steps 5, 10 of another program: choose one of them with --step"),
        ("merge fsdp out", "read them with --backend fsdp"),
        ("test root --reference hf", "is a folder of steps, which `mcore-ckpt test` does not take"),
        ("test --local_dir hf --reference hf", "--local_dir hf: is a HuggingFace model"),
        ("merge Qwen/Qwen3-0.6B out", "no such folder: a model on the hub is only taken as --hf_model_path"),
        ("convert root --output_path out --format torch_dist --hf_model_path a/b", "name a folder, not a model"),
        (
            "merge legacy/iter_0000010 out",
            "does not take: this package does not read this format: convert",
        ),
        ("list bin", "`mcore-ckpt convert` needs the weights as model.safetensors"),
        ("list trainer", "such as trainer/checkpoint-500: `mcore-ckpt convert --hf_model_path trainer/checkpoint-500"),
        ("merge megatron/iter_0000010 out --step 10", "not a folder of steps: leave out --step"),
        ("test hf --reference hf --atol inf", "use finite numbers of 0 or more"),
        ("test hf --reference hf --most -1", "--most -1: use 0 or more"),
        ("test hf --reference hf --step 9 --backend megatron", "--backend, --step: without effect, because there"),
        ("convert --hf_model_path hf --output_path out --layout verl --step 7", "--layout, --step: without effect"),
        ("convert root --output_path out --format torch_dist --tp 4", "--tp: without effect, because the other"),
        (
            "convert --hf_model_path hf --output_path out --format torch_dist --tp 4 --pipeline-layout nonsense",
            "--tp, --pipeline-layout: without effect, because torch_dist loads under any layout",
        ),
        ("diff root hf", "hf: is a HuggingFace model, which `mcore-ckpt diff` does not take"),
        ("inspect root --html page.html --diff hf", "--diff hf: is a HuggingFace model"),
        ("test hf --reference root", "--reference root: is a folder of steps"),
        ("merge root out --hf_model_path torch_dist", "--hf_model_path torch_dist: is a torch_dist checkpoint"),
        ("merge root out --hf_model_path nowhere", "--hf_model_path nowhere: there is no such folder"),
        ("bench . --model root", "--model root: is a folder of steps, which `mcore-ckpt bench --model` does not"),
        ("bench . --model hf/config.json", "--model hf/config.json: is a file"),
        ("bench rot", "the closest name is"),
        ("doctor hf/config.json", "is a file, which `mcore-ckpt doctor` does not take"),
    ],
)
def test_other_commands(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert words in capsys.readouterr().err
    assert not Path("out").exists()


def test_what_is_in_a_checkpoint_is_no_role(folder: Path) -> None:
    """verl has a tree each for model, optimizer and the rest, and each looks like a checkpoint."""
    for place in ("verl", "verl/global_step_4", "verl/global_step_4/actor"):
        found = find_checkpoint(Path(place))
        assert (found.path.name, found.kind) == ("actor", "torch_dist")
    assert find_checkpoint(Path("megatron"), step=5).path == Path("megatron/iter_0000005")


@pytest.mark.parametrize("command", ["list", "watch --once", "inspect", "verify", "prune", "diff", "merge"])
def test_what_may_not_be_read_is_not_called_missing(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("root", tmp_path / "hidden" / "root")
    name, *more = command.split()
    others = {"diff": ["root"], "merge": [str(tmp_path / "out")]}.get(name, [])
    for place in ("hidden", "hidden/root"):
        protect(tmp_path / "hidden")
        with without_privileges():
            assert main([name, str(tmp_path / place), *others, *more]) == 1
        os.chmod(tmp_path / "hidden", 0o700)
        why = f"cannot be read: permission denied by {tmp_path / 'hidden'}"
        assert f"{tmp_path / place}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["global_steps_3", "global_steps_3/actor", "global_steps_3/actor/manifest.json"])
def test_a_step_that_may_not_be_read_hides_no_other(
    closed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It belongs to another user. The steps beside it are of use nevertheless."""
    root = tmp_path / "root"
    shutil.copytree("root", root)
    make_version(root / "global_steps_2" / "actor", 2)
    protect(root / closed)
    with without_privileges():
        assert main(["list", str(root)]) == 0
        said = capsys.readouterr().out
        assert f"{root / closed}: cannot be read: " in said
        assert "newest complete step: 2" in said
        assert main(["inspect", str(root)]) == 0
        assert "step 2 of actor" in capsys.readouterr().out
    os.chmod(root / closed, 0o700)


def test_a_kind_that_may_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("torch_dist", tmp_path / "dist")
    shutil.copytree("root", tmp_path / "root")
    protect(tmp_path / "dist" / "metadata.json")
    protect(tmp_path / "root" / file_names.TRACKER_FILE)
    with without_privileges():
        assert main(["merge", str(tmp_path / "dist"), str(tmp_path / "out")]) == 1
        assert "metadata.json: cannot be read, so the kind of this folder is not known" in capsys.readouterr().err
        assert main(["verify", str(tmp_path / "root")]) == 1
        assert f"{file_names.TRACKER_FILE}: cannot be read: permission denied" in capsys.readouterr().out


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("root", tmp_path / "root")
    role_dir = tmp_path / "root" / "global_steps_3" / "actor"
    file = next(role_dir.rglob("*.pt"))
    protect(file)
    for shown in ([], ["--json"]):
        with without_privileges():
            assert main(["verify", str(tmp_path / "root"), *shown]) == 1
        said = capsys.readouterr().out
        if shown:
            (role,) = json.loads(said)["roles"]
            assert [damage["unreadable"] for damage in role["damages"]] == [True]
        else:
            assert f"{role_dir}: cannot be read" in said
            assert f"{file}: cannot be opened: [Errno 13] Permission denied" in said
            assert "damaged" not in said
