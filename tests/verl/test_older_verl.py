"""With each older verl that this package knows, in the place of 0.9: its trainers, workers and engines."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.megatron_versions import check_version

HERE = Path(__file__).parent
VENV = HERE.parent.parent / ".venv"


@dataclass(frozen=True)
class Older:
    """A version of verl.

    Attributes:
        in_ci: what CI runs with it, of tests that each version passes. `--full` runs all of them.
        megatron: a version of megatron-core that it runs with.
        is_of_transformers_4: whether it runs with transformers 4 alone.
    """

    in_ci: str
    megatron: str = "0.16"
    is_of_transformers_4: bool = False

    def path(self, version: str) -> list[Path]:
        """The folders for PYTHONPATH. What verl needs is in that of 0.9, so its own must come first."""
        transformers = [VENV / "transformers4"] if self.is_of_transformers_4 else []
        megatron = [VENV / f"megatron-{self.megatron}", VENV / "triton"]
        return [VENV / f"verl-{version}", *transformers, VENV / "verl", *megatron]


# Between them CI has both kinds of workers and the SFT trainer, saves that the trainer waits for and others,
# offloading, and retention after a restart.
VERSIONS = {
    # megatron-core 0.16 has taken away what verl 0.6 makes its optimizer with (`get_megatron_optimizer`).
    "0.6": Older("test_ppo and killed_run", "0.15", is_of_transformers_4=True),
    "0.7": Older("test_ppo and tracker", is_of_transformers_4=True),
    "0.8": Older("test_sft and killed_run"),
}


# CI has the oldest, and the newest verl runs all tests.
@pytest.mark.parametrize("version", [pytest.param(v, marks=() if v == "0.6" else pytest.mark.full) for v in VERSIONS])
def test_with_older_verl(
    version: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    run_python: Callable[..., str],
    inner_pytest: list[str],
) -> None:
    older = VERSIONS[version]
    if missing := [str(folder) for folder in older.path(version) if not folder.is_dir()]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    try:
        check_version(older.megatron)
    except UnsupportedError as error:
        pytest.skip(str(error))
    files = [HERE / "with_verl" / f"test_{name}.py" for name in ("sft", "ppo", "for_trainers", "older_verl_switch")]
    chosen = [] if request.config.getoption("full") else ["-k", older.in_ci]
    options = ["--disable-warnings", "--basetemp", tmp_path / "inner", *chosen]
    run_python(*inner_pytest, *options, *files, path=older.path(version))
