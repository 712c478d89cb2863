import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.sh"
NO_SANITIZERS = 77


@pytest.mark.full
def test_the_native_code_is_sound_under_sanitizers() -> None:
    done = subprocess.run([SCRIPT, "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200)
    if done.returncode == NO_SANITIZERS:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
