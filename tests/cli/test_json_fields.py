"""The fields of each command's `--json` are those that docs/command_line.md lists, and of the types that it says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.demo.command import as_json as demo_as_json
from mcore_ckpt.cli.demo.huggingface import Generated
from mcore_ckpt.cli.demo.runner import Outcome, Plan, Training
from mcore_ckpt.cli.main import main
from tests.support import small_model
from tests.support.checkpoints import dead_owner, own, stage
from tests.support.checkpoints import make as make_version
from tests.support.mcore_checkpoints import make_checkpoint
from tests.support.node_folders import divide
from tests.support.small_model import make, tensors_of
from tests.support.tiny_models import make_hf_folder

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "command_line.md"
TYPES = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


def documented() -> dict[str, dict[str, str]]:
    """By command, the type of each field."""
    found: dict[str, dict[str, str]] = {}
    for section in re.split(r"^### ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]:
        name = section.split("`")[1]
        fields = found.setdefault(name, {})
        for cells in re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", section, flags=re.MULTILINE):
            for field in re.findall(r"`([^`]+)`", cells[0]):
                other = re.fullmatch(r"as in `(\w+)`", cells[1])
                if other is None:
                    fields[field] = cells[1]
                else:
                    same = {each: kind for each, kind in found[other[1]].items() if each.startswith(field)}
                    fields.update(same)
    return found


FIELDS = documented()


def leaves(value: Any, field: str, known: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yields each value that is documented, or that no documented field is below."""
    if field in known:
        yield field, value
    below = any(each.startswith((f"{field}.", f"{field}[]")) for each in known) or not field
    if isinstance(value, dict) and below:
        for key, item in value.items():
            yield from leaves(item, f"{field}.{key}" if field else key, known)
    elif isinstance(value, list) and below:
        for item in value:
            yield from leaves(item, f"{field}[]", known)
    elif field not in known:
        yield field, value


def has_type(value: Any, kind: str) -> bool:
    for each in kind.split(" or "):
        many = re.fullmatch(r"list of (\w+)s", each)
        if many is not None and isinstance(value, list) and all(TYPES[many[1]](item) for item in value):
            return True
        if many is None and each != "absent" and TYPES[each](value):
            return True
    return False


def check(name: str, *answers: Any) -> None:
    """Each field of the answers is documented, and each documented one is in an answer."""
    known = FIELDS[name]
    seen = set()
    for answer in answers:
        for field, value in leaves(answer, "", known):
            assert field in known, f"{name}: {field} is not in {DOCUMENT.name}"
            assert has_type(value, known[field]), f"{name}: {field} is {value!r}, not {known[field]}"
            seen.add(field)
    assert known.keys() - seen == {"adapters"} & known.keys(), name  # of a model that has some


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    monkeypatch.chdir(folder)

    def ask(*arguments: str) -> Any:
        status = main([*arguments, "--json"])
        (line,) = capsys.readouterr().out.splitlines()
        assert status in (0, 1)
        return json.loads(line)

    return ask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HuggingFace model, its checkpoint and two nodes' folders of it; two steps of another model; saves of a dead
    process.
    """
    made = tmp_path_factory.mktemp("json")
    hf = make_hf_folder(made / "hf", "llama")
    shutil.move(make_checkpoint(made / "made", hf, tp=2).parent.parent, made / "of_hf")
    (role_dir,) = (made / "of_hf").glob("*/*/")
    divide(role_dir, [made / "node0", made / "node1"])
    with pytest.MonkeyPatch.context() as patched:
        for step in (90, 100):
            patched.setattr(small_model, "STEP", step)
            tensors = tensors_of()
            if step == 100:
                tensors["output_layer.weight"][0, 0] += 1
                tensors["new"] = torch.ones(3)
            make(made / "checkpoints", tensors, aliased=step == 100)
    for step in (2, 3):
        make_version(file_names.step_dir(made / "versions", step) / "actor", step)
    dead, _ = stage(file_names.step_dir(made / "checkpoints", 110) / "actor", 1)
    own(dead, dead_owner(2**22 + 1))
    return made


def test_every_command_is_documented() -> None:
    from tests.cli.test_command_line import parsers

    assert FIELDS.keys() == parsers().keys() - {"completion"}
    for name in parsers():
        assert f"| `{name}` |" in DOCUMENT.read_text()


def test_reading(answer: Any) -> None:
    check("list", answer("list", "checkpoints"), answer("list", "node0"))
    tensor = ("--tensor", "decoder.final_layernorm.weight")
    ours = answer("inspect", "checkpoints")
    check("inspect", answer("inspect", "checkpoints", "--tensors", *tensor), ours, answer("inspect", "node0"))
    check(
        "diff",
        answer("diff", "checkpoints/global_steps_90", "checkpoints"),
        answer("diff", "versions/global_steps_2", "versions/global_steps_3"),
        answer("diff", "checkpoints/global_steps_90/actor", "of_hf"),
    )
    check("prune", answer("prune", "checkpoints", "--max-to-keep", "1", "--dry-run"))
    check("doctor", answer("doctor", ".", "--megabytes", "0"))
    small = ("bench", ".", "--megabytes", "2")
    check("bench", answer(*small), answer(*small, "--model", "1e6", "--real", "3"))


def test_watching(answer: Any, folder: Path) -> None:
    from mcore_ckpt.steps.trainer_lock import TrainerLock

    lock = TrainerLock(folder / "checkpoints", "actor")
    lock.take(patience_s=1.0)
    try:
        check("watch", answer("watch", "checkpoints", "--once"), answer("watch", "node0", "--once"))
    finally:
        lock.release()


def test_damage(answer: Any, folder: Path) -> None:
    source = folder / "checkpoints" / "global_steps_90" / "actor"
    copy = shutil.copytree(source, folder / "damaged" / "global_steps_90" / "actor")
    path = copy / file_names.model_file(0, 0)
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    check(
        "verify",
        answer("verify", "damaged"),
        answer("verify", "checkpoints/global_steps_90"),
        answer("verify", "node0"),
    )


def test_writing(answer: Any) -> None:
    check("merge", answer("merge", "of_hf", "merged"))
    check("test", answer("test", "merged", "--reference", "hf"), answer("test", "merged", "--reference", other_model()))
    check(
        "convert",
        answer("convert", "--hf_model_path", "hf", "--output_path", "converted"),
        answer("convert", "of_hf", "--format", "torch_dist", "--output_path", "back"),
    )
    check("reshard", answer("reshard", "of_hf", "resharded", "--pp", "2"))
    check("branch", answer("branch", "versions", "2", "forked"))
    check("collect", answer("collect", "node0", "node1", "collected"), answer("collect", "node1", "collected"))


def other_model() -> str:
    from safetensors.torch import load_file, save_file

    shutil.copytree("hf", "other_hf")
    path = Path("other_hf", "model.safetensors")
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, {"format": "pt"})
    return "other_hf"


def test_the_demo(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "global_steps_8" / "actor"
    step.mkdir(parents=True)
    (step.parent.parent / file_names.TRACKER_FILE).write_text("8")
    losses = {1: 0.5, 2: 0.25}
    trainings = (Training("uninterrupted", losses), Training("killed", losses))
    resumed = Training("resumed", losses, resumed_from=4, held_out_loss=2.0)
    outcome = Outcome(Plan(tmp_path, steps=8, kill_after=6), *trainings, resumed, Generated(2.0, "def "))
    check("demo", json.loads(json.dumps(demo_as_json(outcome))))
