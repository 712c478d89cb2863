"""What is recorded of the frameworks' sources: complete, told in the documents, and what the sources say."""

import dataclasses
import os
from pathlib import Path

import pytest

from tests.integrations.source_facts import FACTS, Facts

REPOSITORY = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in FACTS.glob("*.json"))
# Wheels that the tests have beside the environment: their record is compared with them each time.
WHEELS = {"bridge": REPOSITORY / ".venv" / "bridge", "swift": REPOSITORY / ".venv" / "swift"}


def source_of(name: str) -> Path | None:
    """Where the framework's sources are: as the environment says (SLIME_SOURCE=~/slime), or a wheel's."""
    given = os.environ.get(f"{name.upper()}_SOURCE")
    wheel = WHEELS.get(name)
    return Path(given).expanduser() if given else wheel if wheel and wheel.is_dir() else None


@pytest.mark.parametrize("name", NAMES)
def test_the_documents_say_which_version_was_read(name: str) -> None:
    version = Facts.of(name).version
    said = version["version"] if "version" in version else f"{version['date']}, {version['commit'][:9]}"
    assert said in (REPOSITORY / "docs" / "integrations.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_complete(name: str) -> None:
    facts = Facts.of(name)
    assert all(facts.functions.values())
    assert all(facts.texts.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_what_the_sources_say(name: str) -> None:
    source = source_of(name)
    if source is None:
        pytest.skip(f"no sources of {name} here: set {name.upper()}_SOURCE to a checkout")
    facts = Facts.of(name)
    # Newer sources may say the same.
    again = dataclasses.replace(facts.read_again(source), version=facts.version)
    assert vars(again) == vars(facts)
