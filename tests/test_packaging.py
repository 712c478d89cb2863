"""The source distribution has all that a build needs."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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


def test_a_built_package_has_the_template_of_the_page(tmp_path: Path) -> None:
    """A wheel has what `build_py` copies, and pages are made from files that are no modules."""
    built = tmp_path / "built"
    shutil.copytree(
        REPOSITORY / "mcore_ckpt", tmp_path / "mcore_ckpt", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / "csrc", tmp_path / "csrc")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", built]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    wanted = files_below(Path("mcore_ckpt/cli/page"))
    assert {path.relative_to(built).as_posix() for path in (built / "mcore_ckpt/cli/page").iterdir()} == wanted
    assert (built / "mcore_ckpt" / "py.typed").exists()


def test_the_source_distribution_has_nothing_that_was_built(sdist: set[str]) -> None:
    assert [name for name in sdist if name.endswith((".so", ".o", ".pyc")) or name.startswith("tests/")] == []
