"""docs/comparison.md compares every system at every point, and says where each claim comes from."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "comparison.md").read_text()
BENCHMARKS = (REPOSITORY / "docs" / "benchmarks.md").read_text()

SYSTEMS = ("mcore_ckpt", "Megatron", "DCP", "NVRx", "ByteCheckpoint", "Orbax", "verl", "AReaL", "ROLL")

SOURCES = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", PAGE, re.MULTILINE))
CITED = re.compile(r"\]\[([\w-]+)\]")
# A document of this repository, or a test of it. tests/test_documents.py checks that they are there.
OURS = re.compile(r"\]\((?!https?:)[\w./]*\.md#?[\w-]*\)|`[\w/]*test_\w+\.py`")
# Of others: a cited source, a file of megatron-core, what is said of another row, or that nothing is known.
THEIRS = re.compile(r"\]\[[\w-]+\]|`megatron/core/[\w/]+\.py`|^as (Megatron|the wrapped)|not checked")


def points() -> dict[str, list[tuple[str, str]]]:
    """For each point, the system (or systems) and the claim of each row."""
    part = PAGE.partition("## Point by point")[2].partition("\n## ")[0]
    sections = re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", part, re.MULTILINE | re.DOTALL)
    return {
        title: [(system, claim) for system, claim in re.findall(r"^\| ([^|]+?) \| (.*) \|$", text, re.MULTILINE)][1:]
        for title, text in sections
    }


POINTS = points()


def test_there_are_points() -> None:
    assert len(POINTS) >= 12


@pytest.mark.parametrize("title", POINTS)
def test_every_system_has_one_row_at_each_point(title: str) -> None:
    named = [name for systems, _ in POINTS[title] for name in systems.split(", ")]
    assert sorted(named) == sorted(SYSTEMS)


@pytest.mark.parametrize("title", POINTS)
def test_every_claim_says_where_it_comes_from(title: str) -> None:
    for system, claim in POINTS[title]:
        wanted = OURS if system == "mcore_ckpt" else THEIRS
        assert wanted.search(claim), f"{system}: {claim}"


def test_every_source_is_cited_and_every_citation_has_a_source() -> None:
    assert set(CITED.findall(PAGE)) == set(SOURCES)


def test_each_system_has_a_version_that_was_looked_at() -> None:
    part = PAGE.partition("## What was looked at")[2]
    versions = dict(re.findall(r"^\| ([^|]+?) \| (.*) \|$", part, re.MULTILINE))
    assert set(SYSTEMS) <= set(versions)
    for system in SYSTEMS[1:]:
        assert re.search(r"\d+\.\d+|\d{4}-\d\d-\d\d", versions[system]), system


def test_measured_figures_are_those_of_the_benchmarks() -> None:
    part = PAGE.partition("## Measured here")[2].partition("\n## ")[0]
    figures = re.findall(r"(?<=[| ])\d+(?:\.\d+)?(?= \||,)", part)
    assert len(figures) >= 6
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", BENCHMARKS), figure
