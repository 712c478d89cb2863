"""Every block of Python in a document is run by a test, or at least compiles and imports what there is.

`tests/test_walks.py` runs the files of docs/get_started, and `tests/distributed/test_pages.py` the blocks of README.md
and docs/how_to. The others are looked at here: what they import of this package, of torch and of megatron-core must be
there. Of frameworks that only some environments have, their own tests import it.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.walk import REPOSITORY, all_blocks

pytestmark = pytest.mark.slow

DOCUMENTS = (REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
# Of other frameworks, and of megatron's training loop, which the wheels have since 0.17.
ELSEWHERE = ("areal", "roll", "megatron.training")
# These import their framework, so only their source is read.
INTEGRATIONS = "mcore_ckpt.integrations."
# What follows this line in a block of CONTRIBUTING.md is from within a dict.
OMITTED = "\n...\n"


def others() -> Iterator[Any]:
    """Yields document and code of the blocks that no test runs."""
    for path in DOCUMENTS:
        name, numbers = path.relative_to(REPOSITORY).as_posix(), itertools.count()
        for block in all_blocks(path.read_text()):
            if block.language == "python" and not block.title and not name.startswith("docs/how_to/"):
                number = next(numbers)
                yield pytest.param(name, block.code, id=f"{name}-{number}")


@pytest.mark.parametrize(("document", "code"), list(others()))
def test_a_block_compiles_and_imports_what_there_is(document: str, code: str) -> None:
    statements, _, rest = code.partition(OMITTED)
    assert not rest or document == "CONTRIBUTING.md"
    for node in ast.walk(ast.parse(statements)):
        if isinstance(node, ast.ImportFrom):
            assert_has(node.module or "", [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert_has(alias.name, [])


def assert_has(module: str, names: list[str]) -> None:
    """There is such a module, and it has these names."""
    if module.startswith(ELSEWHERE):
        return
    if module.startswith(INTEGRATIONS):
        spec = find_spec(module)
        assert spec is not None, module
        assert set(names) <= set(re.findall(r"\w+", Path(str(spec.origin)).read_text())), module
        return
    found = importlib.import_module(module)
    for name in names:
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), f"{module} has no {name}"


def test_files_of_pages_have_names() -> None:
    """`title` says how a reader saves a block, so that a test can."""
    for path in (REPOSITORY / "docs" / "get_started").glob("*.md"):
        titles = [block.title for block in all_blocks(path.read_text()) if block.language == "python" and block.title]
        assert all(Path(title).suffix == ".py" for title in titles)
        assert len(titles) == len(set(titles))
