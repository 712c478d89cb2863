"""What the documents name is there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])

# Of a table's cell: `steps/test_listing.py`, `tests/steps/test_listing.py::test_name`, and what a test launches.
NAMED = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py|integrations/areal/\w+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_tests_that_a_document_names_are_there(document: Path) -> None:
    known = {path.relative_to(REPOSITORY / "tests").as_posix() for path in (REPOSITORY / "tests").rglob("*.py")}
    by_name = {name.rpartition("/")[2] for name in known}
    for path, function in NAMED.findall(document.read_text()):
        assert path in (known if "/" in path else known | by_name), f"{document.name} names {path}"
        if function:
            assert f"def {function}(" in (REPOSITORY / "tests" / path).read_text(), f"{document.name} names {function}"
