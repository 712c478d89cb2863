"""The fast tier in a framework's configuration: read from nested options."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, FastTier
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.integrations.verl.options import read_options

FAST: dict[str, Any] = {"folder": "/dev/shm/run", "durable_every": 5}


def rack() -> str:
    return "rack 7"


def test_nested_options_describe_a_fast_tier() -> None:
    wanted = FastTier("/dev/shm/run", durable_every=5)
    for fast in (FAST, wanted):
        assert read_options({"fast": fast})["fast"] == wanted
        assert read_options(SimpleNamespace(fast=fast))["fast"] == wanted
        assert CheckpointConfig.from_dict({"fast": fast}, "options").fast == wanted
    assert "fast" not in read_options({"fast": None})


def test_the_function_of_domains_is_named() -> None:
    fast = read_options({"fast": {**FAST, "domain": f"{__name__}.rack"}})["fast"]
    assert fast.domain is rack or fast.domain() == "rack 7"


@pytest.mark.parametrize(
    ("fast", "words"),
    [
        ({"replicas": 2}, "no folder"),
        ({**FAST, "copies": 2}, "no option 'copies'"),
        ("/dev/shm/run", "use a mapping"),
        ({**FAST, "domain": "no.such.function"}, "'no.such.function', which cannot be imported"),
        ({**FAST, "replicas": -1}, "replicas of the fast tier is -1"),
    ],
)
def test_a_mistake_is_named(fast: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(words)):
        read_options({"fast": fast})
