"""What ROLL's sources say, as it was recorded (facts/roll.json), is what ours goes by, and the tests' stand-in."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.integrations.source_facts import Facts, signature_in, signature_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
STAND_IN = HERE / "roll_stand_in"

STRATEGY = "roll/distributed/strategy/megatron_strategy.py:MegatronTrainStrategy"
UPLOADER = "roll/utils/upload_utils.py:FileSystemUploader"
PIPELINE = "roll/pipeline/base_pipeline.py:BasePipeline"


@pytest.fixture(scope="module")
def facts() -> Facts:
    return Facts.of("roll")


@pytest.fixture(scope="module")
def integration() -> Iterator[ModuleType]:
    """Ours, on the stand-in; no other test of this process is to take that for ROLL."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(STAND_IN)
        from mcore_ckpt.integrations import roll

        yield roll
    for name in [name for name in sys.modules if name == "roll" or name.startswith("roll.")]:
        del sys.modules[name]
    del sys.modules["mcore_ckpt.integrations.roll"]


def recorded(facts: Facts, name: str) -> str:
    return facts.signature(name)


def test_the_stand_in_is_called_as_roll_is(facts: Facts) -> None:
    for name in facts.functions:
        path, qualname = name.split(":")
        assert signature_in((STAND_IN / path).read_text(), qualname) == facts.signature(name), name


def test_what_is_overridden_has_rolls_signature(facts: Facts, integration: ModuleType) -> None:
    for name in ("save_checkpoint", "load_checkpoint"):
        assert signature_of(getattr(integration.CheckpointStrategy, name)) == recorded(facts, f"{STRATEGY}.{name}")
    for name in ("__init__", "upload", "get_latest_ckpt"):
        assert signature_of(getattr(integration.CheckpointUploader, name)) == recorded(facts, f"{UPLOADER}.{name}")
    for name in ("__init__", "set_checkpoint_clusters", "run", "_cleanup_old_checkpoints"):
        assert signature_of(getattr(integration.CheckpointPipeline, name)) == recorded(facts, f"{PIPELINE}.{name}")


def test_the_type_is_registered_and_takes_all_of_checkpoint_config(integration: ModuleType, tmp_path: Path) -> None:
    from roll.utils import checkpoint_manager, upload_utils

    config = {"type": "mcore_ckpt", "output_dir": str(tmp_path), "async_upload": False}
    assert upload_utils.uploader_registry["mcore_ckpt"] is integration.CheckpointUploader
    assert isinstance(checkpoint_manager.CheckpointManager(config).uploader, integration.CheckpointUploader)
    assert checkpoint_manager.get_latest_ckpt(config) is None
    # A type other than file_system gets no timestamp, or nothing would ever be found again.
    assert integration.TYPE != "file_system"


def test_every_class_is_one_of_rolls(facts: Facts, integration: ModuleType) -> None:
    for name, (_, module, base) in integration._CLASSES.items():
        assert f"{module}:{base}" in facts.classes["names"], name
    made = integration.RLVRActorWorker
    assert made is integration.RLVRActorWorker
    assert (made.__module__, made.__qualname__) == ("mcore_ckpt.integrations.roll", "RLVRActorWorker")
    with pytest.raises(AttributeError, match="NoWorker"):
        _ = integration.NoWorker


def test_without_roll_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import mcore_ckpt.integrations.roll"], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode != 0
    assert "needs ROLL: install it from https://github.com/alibaba/ROLL" in done.stderr
