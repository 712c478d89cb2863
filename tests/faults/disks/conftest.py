"""The tests of this room start processes, on disks that fail."""

import pytest

pytestmark = pytest.mark.slow
