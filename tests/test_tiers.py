"""What the tiers leave out (tests/conftest.py): --quick what has the marker `slow`, and CI some examples."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.conftest import LONG, draw_fewer_examples, is_slow, pytest_ignore_collect

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))

# What trains, or starts Python and lets it import torch.
HELPERS = re.compile(
    r"\b(run_python|job_server|inner_pytest|crash_worker)\b|tests\.support\.forks|tests\.distributed|megatron_on_cpu"
)


def is_left_out(file: Path) -> bool:
    return any(is_slow(path) for path in (file, *file.parents) if path.is_relative_to(TESTS))


def test_every_marker_is_in_the_form_that_is_read() -> None:
    """A file is read and not imported, so a marker in another form would go unseen."""
    own = (TESTS / "conftest.py", Path(__file__))
    naming = [file for file in FILES if "mark.slow" in file.read_text() and file not in own]
    assert len(naming) > 40
    assert [file for file in naming if not is_slow(file.parent if file.name == "conftest.py" else file)] == []


def test_what_begins_first_is_there() -> None:
    """A file that was renamed would begin among the last, and run on alone."""
    assert set(LONG) - {file.name for file in FILES} == set()


def test_a_marker_is_set_once() -> None:
    """A file in a slow room needs none of its own."""
    assert [file for file in FILES if file.name != "conftest.py" and is_slow(file) and is_left_out(file.parent)] == []


def test_what_trains_or_starts_python_is_slow() -> None:
    using = [file for file in FILES if file.name.startswith("test_") and HELPERS.search(file.read_text())]
    assert len(using) > 50
    assert [file for file in using if not is_left_out(file) and file != Path(__file__)] == []


def test_quick_alone_leaves_out_what_is_slow(tmp_path: Path) -> None:
    room, file, other = tmp_path / "room", tmp_path / "test_slow.py", tmp_path / "test_other.py"
    room.mkdir()
    for path in (room / "conftest.py", file):
        path.write_text("import pytest\n\npytestmark = pytest.mark.slow\n")
    other.write_text("import pytest\n\npytestmark = [pytest.mark.full]\n")

    def ignored(is_quick: bool) -> list[Path]:
        config: Any = SimpleNamespace(getoption={"quick": is_quick}.get)
        return [path for path in (room, file, other) if pytest_ignore_collect(path, config)]

    assert ignored(True) == [room, file]
    assert ignored(False) == []


def test_the_marker_of_a_room_is_that_of_its_tests(request: pytest.FixtureRequest) -> None:
    marked = {item.path for item in request.session.items if item.get_closest_marker("slow")}
    assert marked == {item.path for item in request.session.items if is_left_out(item.path)}


@pytest.mark.parametrize(("whole", "fewer"), [(300, 75), (100, 25), (25, 10), (5, 5)])
def test_ci_draws_a_quarter_of_the_examples(whole: int, fewer: int) -> None:
    drawn = []

    @hypothesis.settings(max_examples=whole)
    @hypothesis.given(st.integers())
    def test(number: int) -> None:
        drawn.append(number)

    draw_fewer_examples([test, print])
    test()
    assert len(drawn) == fewer
