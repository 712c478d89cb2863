"""The packages that are not in the tests' environment, and one training whose events all listeners are shown."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_ckpt import Event, SaveReport
from tests.support.told_events import train

REPOSITORY = Path(__file__).parents[3]
PACKAGES = Path(os.environ.get("MCORE_CKPT_MONITORING", REPOSITORY / ".venv" / "monitoring"))


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], list[SaveReport]]:
    """The events of a training (told_events.train), and the reports of its good saves."""
    events: list[Event] = []
    return events, train(tmp_path_factory.mktemp("training"), events.append)


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets tensorboard be imported, from beside the environment, for the length of a test."""
    if not PACKAGES.is_dir():
        pytest.skip(f"no tensorboard in {PACKAGES}")
    monkeypatch.syspath_prepend(str(PACKAGES))
    before = set(sys.modules)
    yield
    # What else runs in this process must not find tensorboard or protobuf.
    for name in set(sys.modules) - before:
        if name.startswith("torch.utils.tensorboard") or str(PACKAGES) in str(
            getattr(sys.modules[name], "__file__", "")
        ):
            del sys.modules[name]
