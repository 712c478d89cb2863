"""The source distribution has all that a build needs."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# What a build and a reader need. Tests run from a checkout and are not published.
TOP_LEVEL = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in", "pyproject.toml", "setup.py")
PARTS = ("csrc", "docs", "mcore_ckpt")


def files_below(folder: Path) -> set[str]:
    """The paths of the files in a folder of the repository, without those that a build makes."""
    return {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc", ".o")
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths of the files in a source distribution that is made of a copy of the repository."""
    made = tmp_path_factory.mktemp("sdist")
    copy = made / "copy"
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TOP_LEVEL:
        shutil.copy(REPOSITORY / name, copy / name)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").touch()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", made / "dist"],
        cwd=copy,
        check=True,
        capture_output=True,
    )
    (archive,) = (made / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames() if tar.getmember(name).isfile()}


def test_the_source_distribution_has_all_that_a_build_needs(sdist: set[str]) -> None:
    wanted = set(TOP_LEVEL).union(*(files_below(REPOSITORY / part) for part in PARTS))
    assert wanted - sdist == set()
    for needed in ("csrc/device_copy_none.cpp", "csrc/gather.cu", "csrc/write_job.h"):
        assert needed in sdist
    for needed in ("mcore_ckpt/py.typed", "mcore_ckpt/io/_native.pyi"):
        assert needed in sdist


def test_the_source_distribution_has_nothing_that_was_built(sdist: set[str]) -> None:
    assert [name for name in sdist if name.endswith((".so", ".o", ".pyc")) or name.startswith("tests/")] == []
