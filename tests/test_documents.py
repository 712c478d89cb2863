"""What the documents name is there, and the tests have every example of the documents that we were built from."""

import os
import re
from pathlib import Path

import pytest

from tests.support import document_examples

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "tests").rglob("*.md")]
)

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


# The folder of the documents of others, which are no part of this repository.
OF_OTHERS = Path(os.environ.get("MCORE_CKPT_DOCUMENTS", "/nowhere"))

# What an example's line looks like in a page's text: a command and its continuations, a usage, an assignment, an
# import, a call, and a field of YAML whose value is no sentence.
_EXAMPLE = re.compile(
    r"python .*|usage: .*|\[--.*|--\w.*(\\|/path/to/\w+|  # .*)|\w+ = .*|from \w+ import .*|\"/.*\"|\)"
    r"|[a-z_]+:|[a-z_]+: *(?!.*\b(the|to be|are)\b)[^ ]+( +#.*)?|# [A-Z]\w+ \w+ (configuration|parameters|defaults).*"
)
# Prose of that form.
_NO_EXAMPLES = re.compile(r"[a-z_]+: [A-Z].*|options:")


@pytest.mark.parametrize("name", document_examples.BY_DOCUMENT)
def test_every_example_of_a_document_is_a_test(name: str) -> None:
    if not OF_OTHERS.is_dir():
        pytest.skip("MCORE_CKPT_DOCUMENTS does not name the folder of the documents")
    lines = [line.strip() for line in (OF_OTHERS / name).read_text().splitlines()]
    examples = [line.strip() for text in document_examples.BY_DOCUMENT[name] for line in text.splitlines()]
    assert [line for line in examples if line not in lines] == [], "the examples are as the document prints them"
    found = [line for line in lines if _EXAMPLE.fullmatch(line) and not _NO_EXAMPLES.fullmatch(line)]
    assert found
    assert [line for line in found if line not in examples] == []
