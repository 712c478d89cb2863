"""Every supported version of megatron-core: one case for each reason, and checkpoints that go from one to another.

All other tests run with the newest version (scripts/test.sh). With --full each version has a group of pytest-xdist: one
after the other, all of them would take hours.
"""

import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_cases import CASES, REPOSITORY, VERSIONS, packages

pytestmark = pytest.mark.slow

LAYOUT: dict[str, Any] = {
    # One stage: Megatron itself mixes up the buckets of an embedding that two stages have (test_foreign.py).
    "world": 2,
    "num_layers": 4,
    "mtp_layers": 1,
    "experts": 4,
    "precision": "bf16",
    "padded_vocab": 144,
    "global_batch": 4,
    "dropout": 0.0,
}


# The form in which Megatron saves the optimizer in torch_dist.
FORM = "fully_reshardable"


def version_params(versions: Sequence[str], *, in_ci: str | None = None) -> list[Any]:
    """Versions as parameters, each in its own group. CI has only the one of `in_ci`."""
    return [
        pytest.param(
            version,
            marks=[pytest.mark.xdist_group(version), *([] if version == in_ci else [pytest.mark.full])],
        )
        for version in versions
    ]


def tensor_files(checkpoint: Path) -> dict[str, bytes]:
    files = [*checkpoint.glob("model/*/*.pt"), *checkpoint.glob("optim/*.pt")]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}


def assert_same_bytes(first: Path, second: Path) -> None:
    one, other = (tensor_files(path / "global_steps_2" / "actor") for path in (first, second))
    assert one
    assert one.keys() == other.keys()
    assert [path for path in one if one[path] != other[path]] == []


def python_path(version: str) -> str:
    return os.pathsep.join([str(REPOSITORY), *map(str, packages(version)), os.environ["PYTHONPATH"]])


def move(run_python: Callable[..., str], version: str, root: Path, *stops: Any) -> None:
    root.mkdir(exist_ok=True)
    run_python("tests/distributed/move.py", root, json.dumps(stops), path=packages(version))


@pytest.mark.parametrize(
    "versions",
    [
        pytest.param((VERSIONS[0], VERSIONS[-1]), id="oldest and newest"),
        pytest.param(VERSIONS, id="all", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_goes_round(versions: Sequence[str], tmp_path: Path, run_python: Callable[..., str]) -> None:
    """Each version loads what the one before has saved: the same state, the same next step, the same bytes again.

    Also what Megatron of the version before has saved as torch_dist.
    """
    first, *others = versions
    stops: list[tuple[Any, ...]] = [(LAYOUT, f"train {FORM}", "-", first)]
    stops += [
        (LAYOUT, f"resume {FORM}", before, version, python_path(version)) for before, version in pairwise(versions)
    ]
    # The first version's process is there again at the end, because to import megatron takes longer than to train.
    stops.append((LAYOUT, f"resume {FORM}", others[-1], "round"))
    move(run_python, first, tmp_path, *stops)
    for before, after in pairwise((*versions, "round")):
        assert_same_bytes(tmp_path / before, tmp_path / after)


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint that a version has saved, which its tests share."""
    made: dict[str, Path] = {}

    def saved(version: str) -> Path:
        return made.setdefault(version, tmp_path_factory.mktemp("saved"))

    return saved


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("saved", version_params(VERSIONS))
def test_every_version_loads_every_other(
    saved: str, version: str, saved_by: Callable[[str], Path], run_python: Callable[..., str]
) -> None:
    root = saved_by(saved)
    if not (root / "saved").exists():
        move(run_python, saved, root, (LAYOUT, f"train {FORM}", "-", "saved"))
    move(run_python, version, root, (LAYOUT, f"resume {FORM}", "saved", version))
    assert_same_bytes(root / "saved", root / version)


# CI has the oldest, and the newest runs all tests.
@pytest.mark.parametrize("version", version_params(VERSIONS[:-1], in_ci=VERSIONS[0]))
def test_one_case_for_each_reason(version: str, run_python: Callable[..., str], inner_pytest: list[str]) -> None:
    """With --full, every row of the table in docs/compatibility.md."""
    wanted = [cases for cases in CASES.values() if cases.in_ci or "--full" in inner_pytest]
    chosen = " or ".join(f"({cases.file} and ({cases.chosen}))" for cases in wanted)
    paths = [cases.path for cases in wanted]
    output = run_python(*inner_pytest, "-vv", *paths, "-k", chosen, path=packages(version))
    for path in paths:
        assert f"{path}::" in output, f"no test of {path} was run"
