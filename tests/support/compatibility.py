"""What the tests show of each framework: the marks `shows`, their results, and the page that is made of both.

A test says `@pytest.mark.shows("slime", "resume", "async")`. With COMPATIBILITY_FOLDER in the environment each process
of pytest writes down which of these have passed, with the version of the framework that it had
(scripts/compatibility.py).
"""

import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "compatibility.md"
FOLDER = "COMPATIBILITY_FOLDER"

COLUMNS = (
    "save",
    "resume",
    "async",
    "retention",
    "other layout",
    "moving over",
    "going back",
    "LoRA",
    "offload",
    "precision-aware",
    "parts",
)
# The name of a framework's real package, or of the record of its sources.
PACKAGES = {
    "verl": "verl",
    "AReaL": "areal",
    "Megatron-Bridge": "megatron-bridge",
    "SkyRL": "skyrl",
    "ms-swift": "ms-swift",
}
RECORDS = {"ROLL": "roll", "slime": "slime", "miles": "miles", "NeMo-RL": "nemo_rl", "Megatron-LM": "megatron"}


def write_down(item: pytest.Item, passed: bool) -> None:
    """Appends the result of a test that shows something, if somebody asks."""
    folder = os.environ.get(FOLDER)
    # The pytest that launched the ranks writes down what they showed.
    if folder is None or item.config.pluginmanager.hasplugin("rank_server"):
        return
    for framework, *columns in (mark.args for mark in item.iter_markers("shows")):
        assert set(columns) <= set(COLUMNS), columns
        test = item.nodeid.partition("[")[0]
        line = {"framework": framework, "version": version_of(framework), "columns": columns, "test": test}
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({**line, "passed": passed}) + "\n")


def version_of(framework: str) -> str:
    """The version of the package that this process has, or the date of the sources that the stand-in goes by."""
    if framework in RECORDS:
        path = REPOSITORY / "tests" / "integrations" / "facts" / f"{RECORDS[framework]}.json"
        return f"of {json.loads(path.read_text())['version']['date']}"
    # Of several on the path, the first, as for an import. SkyRL is on the path only of programs that a test starts.
    path = [*sys.path, str(REPOSITORY / ".venv" / "skyrl")]
    return next(iter(distributions(name=PACKAGES[framework], path=path))).version
