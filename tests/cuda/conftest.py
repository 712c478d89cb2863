"""The tests of this room compile an extension, and train."""

import pytest

pytestmark = pytest.mark.slow
