"""The parts of the full tests (scripts/test.sh --part)."""

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts" / "test.sh"


def test_an_unknown_part_is_refused_with_the_names_of_all() -> None:
    done = subprocess.run(["bash", SCRIPT, "--part", "nothing"], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2
    assert done.stderr == "--part is one of: ranks saves files tools frameworks native power versions rest chaos\n"


def test_no_folder_is_missing_or_in_two_parts() -> None:
    """What a part does not name is in `rest`, so nothing is left out unless a folder has been renamed."""
    text = SCRIPT.read_text()
    named = re.findall(r'^    \[\w+\]="(.*)"$', text, re.MULTILINE)
    folders = [folder for line in named for folder in line.split()]
    assert len(folders) == len(set(folders)) > 20
    assert all((REPOSITORY / folder).exists() for folder in folders)
