"""Adds pages for files outside docs/ to the documentation site, and leads links to them (a hook of MkDocs).

Documents link to each other by their places in the repository, so that links work in a checkout. The site has only what
is below docs/. So README, CONTRIBUTING and CHANGELOG become pages of its section "Project", each source file that a
document links to becomes a page that shows it, and links are rewritten to these pages. A link that shows the name of a
document shows the title of its page, because a reader of the site knows no files.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parent.parent
DOCS = "docs"
# The pages of documents at the root of the repository. MkDocs would make a README.md the index of its folder.
PROJECT = {
    "README.md": "project/overview.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
NAMED = re.compile(r"(?<=\[)[\w/]+\.md(?=\]\(([^)#\s]+))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    documents = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    for source, page in PROJECT.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text()))
    for source in sorted({target for document in (*documents, *PROJECT) for target in _source_files(document)}):
        files.append(_listing(config, source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page to files outside docs/, and all of a page whose document stands outside docs/.

    Links that show the name of a document get the title of its page.
    """
    folder = posixpath.dirname(page.file.src_uri)
    origin = {uri: source for source, uri in PROJECT.items()}.get(page.file.src_uri, f"{DOCS}/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        target = _target(origin, link[1])
        return link[1] if target is None else posixpath.relpath(_page_of(target), folder or ".")

    titles = dict(_titles(config.nav))

    def titled(name: re.Match[str]) -> str:
        target = _target(origin, name[1])
        return name[0] if target is None else titles.get(_page_of(target), name[0])

    return LINK.sub(rewritten, NAMED.sub(titled, markdown))


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """Yields place and title of each page that the navigation names."""
    for entry in nav or ():
        for title, below in entry.items() if isinstance(entry, dict) else ():
            yield from [(below, title)] if isinstance(below, str) else _titles(below)


def _source_files(document: str) -> Iterator[str]:
    """Yields the files outside docs/ that a document links to, other than documents."""
    for link in LINK.findall((REPOSITORY / document).read_text()):
        target = _target(document, link)
        if target is not None and not target.startswith(f"{DOCS}/") and target not in PROJECT:
            yield target


def _target(document: str, link: str) -> str | None:
    """Returns the path in the repository of the file that a link leads to. None if there is no such file."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(document), link))
    return target if not target.startswith("..") and (REPOSITORY / target).is_file() else None


def _page_of(target: str) -> str:
    """Returns the place in the site of a file of the repository."""
    if target.startswith(f"{DOCS}/"):
        return target.removeprefix(f"{DOCS}/")
    return PROJECT.get(target, f"project/source/{target}.md")


def _listing(config: MkDocsConfig, source: str) -> File:
    language = os.path.splitext(source)[1].lstrip(".")
    text = (REPOSITORY / source).read_text()
    content = f"# `{source}`\n\n````{language}\n{text}````\n"
    return File.generated(config, _page_of(source), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
