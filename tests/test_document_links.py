"""The links and the module paths in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "tests").rglob("*.md")]
)

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
# Documents name modules by their rooms, `save/plan.py`, and tests by theirs.
MODULE = re.compile(r"`((?:mcore_ckpt/)?(?:[a-z_]+/)+[a-z_]+\.(?:py|cpp|h|cu|sh))`")


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = [line.lstrip("# ") for line in document.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_somewhere(document: Path) -> None:
    for path, anchor in LINK.findall(document.read_text()):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {path}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_every_module_that_a_document_names_is_there(document: Path) -> None:
    for path in MODULE.findall(document.read_text()):
        # Of Megatron-LM's own files there is nothing to see here.
        if not path.startswith("megatron/"):
            places = [REPOSITORY / folder / path for folder in ("", "mcore_ckpt", "tests")]
            assert any(place.exists() for place in places), f"{document.name} names {path}"
