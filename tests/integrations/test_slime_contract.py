"""What slime's and miles' sources say, as it was recorded, is what ours goes by, and the stand-ins."""

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_ckpt.integrations.miles.adapters import AdapterCheckpoints
from mcore_ckpt.integrations.slime.data_position import data_file
from mcore_ckpt.integrations.slime.replacing import ActorCheckpoints
from tests.integrations.source_facts import Facts, signature_in, signature_of

HERE = Path(__file__).parent
FORKS = ("slime", "miles")


@pytest.mark.parametrize("fork", FORKS)
def test_the_stand_in_is_called_as_the_fork_is(fork: str) -> None:
    facts = Facts.of(fork)
    for name in facts.functions:
        path, qualname = name.split(":")
        source = HERE / f"{fork}_stand_in" / path
        assert signature_in(source.read_text(), qualname) == facts.signature(name), name


@pytest.mark.parametrize("fork", FORKS)
def test_a_replaced_function_takes_what_the_fork_passes(fork: str) -> None:
    """The calls are those of the stand-in, whose functions are called as the fork's are."""
    folder = HERE / f"{fork}_stand_in" / fork / "backends" / "megatron_utils"
    calls = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    passed = {
        keyword.arg
        for node in calls
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "save_checkpoint"
        for keyword in node.keywords
    }
    assert passed <= set(signature_of(ActorCheckpoints.save_checkpoint).strip("()").replace("=", ", ").split(", "))


def test_adapters_are_loaded_as_miles_loads_them() -> None:
    recorded = Facts.of("miles").signature("miles/backends/megatron_utils/lora_utils.py:load_lora_adapter")
    assert signature_of(AdapterCheckpoints.load_lora_adapter) == recorded.replace("(", "(self, ", 1)


@pytest.mark.parametrize("fork", FORKS)
def test_the_data_position_is_where_the_fork_writes_it(fork: str) -> None:
    texts = Facts.of(fork).texts[f"{fork}/rollout/data_source.py"]
    name = data_file(Path("root"), 7).relative_to("root").as_posix().replace("7", "{rollout_id}")
    assert f'os.path.join(self.args.save, f"{name}")' in texts


@pytest.mark.parametrize("fork", FORKS)
def test_without_the_fork_it_says_so(fork: str, monkeypatch: pytest.MonkeyPatch) -> None:
    integration = import_module(f"mcore_ckpt.integrations.{fork}")
    monkeypatch.setitem(sys.modules, fork, None)
    with pytest.raises(ImportError, match=rf"mcore_ckpt\.integrations\.{fork} needs {fork} and Megatron-LM"):
        integration.install(SimpleNamespace())


def test_a_step_and_a_role_of_ours_are_told_from_a_huggingface_folder(tmp_path: Path) -> None:
    is_ours = ActorCheckpoints.is_megatron_checkpoint(object.__new__(ActorCheckpoints), lambda path: False)
    role = tmp_path / "global_steps_1" / "actor"
    role.mkdir(parents=True)
    assert not is_ours(str(role.parent))
    (role / "manifest.json").touch()
    assert is_ours(str(role.parent))
    assert is_ours(str(role))
    assert not is_ours(str(tmp_path))
