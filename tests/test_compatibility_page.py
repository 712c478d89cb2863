"""docs/compatibility.md has a row for each framework that has tests, and no failed cell."""

from tests.support import compatibility


def rows() -> list[list[str]]:
    """The table of the results, its header first."""
    lines = compatibility.PAGE.read_text().partition("<!-- written by")[2].splitlines()
    table = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table]


def test_every_framework_has_a_row() -> None:
    header, *found = rows()
    assert header[2:] == list(compatibility.COLUMNS)
    for framework in (*compatibility.PACKAGES, *compatibility.RECORDS):
        of_framework = [row for row in found if row[0].startswith(f"{framework} ")]
        assert of_framework, framework
        assert all(row[header.index("resume")] for row in of_framework), framework


def test_no_cell_has_failed() -> None:
    assert [row for row in rows() if "failed" in row] == []
