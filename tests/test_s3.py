"""Launches tests/s3, which need s3fs and a store of their own: these are installed beside the environment."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parent.parent
PACKAGES = Path(os.environ.get("MCORE_CKPT_REMOTE", REPOSITORY / ".venv" / "remote"))


@pytest.mark.skipif(not PACKAGES.is_dir(), reason=f"no s3fs in {PACKAGES}")
def test_s3(run_python: Callable[..., str], inner_pytest: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCORE_CKPT_S3", "1")
    run_python(*inner_pytest, "tests/s3", path=[PACKAGES])
