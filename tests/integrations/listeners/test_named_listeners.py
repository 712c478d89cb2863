"""Frameworks whose options are text name listeners by their path."""

from typing import Any

import pytest

from mcore_ckpt import Event
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError, InvalidTypeError
from mcore_ckpt.integrations.listeners import LoggingListener
from mcore_ckpt.integrations.verl.options import read_options

LOGGING = "mcore_ckpt.integrations.listeners.LoggingListener"
NOT_CALLABLE = 3
made: list[Any] = []


def make_listener() -> Any:
    made.append(lambda event: None)
    return made[-1]


def test_a_name_becomes_one_listener_of_the_process() -> None:
    here = f"{__name__}.make_listener"
    first, again = (CheckpointConfig.from_dict({"listeners": [LOGGING, here]}, "options") for _ in range(2))
    assert isinstance(first.listeners[0], LoggingListener)
    assert first.listeners[1] is made[0]
    # ROLL reads its options at each save. Another listener would have another writer or file.
    assert first.listeners == again.listeners
    assert len(made) == 1
    assert read_options({"listeners": [here]}) == {"listeners": (made[0],)}


def test_objects_stay_as_they_are() -> None:
    def listener(event: Event) -> None: ...

    assert CheckpointConfig.from_dict({"listeners": (listener,)}, "options").listeners == (listener,)
    assert read_options({"listeners": [listener]}) == {"listeners": (listener,)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module.listener", "options has the listener 'no_such_module.listener', which cannot be imported"),
        (f"{LOGGING}s", "cannot be imported"),
        ("not a path", "cannot be imported"),
        (f"{__name__}.NOT_CALLABLE", "which is 3: use the path of a class or function"),
    ],
)
def test_a_name_that_leads_nowhere_is_named(name: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        CheckpointConfig.from_dict({"listeners": [name]}, "options")


def test_a_single_name_is_not_a_list() -> None:
    with pytest.raises(InvalidTypeError, match="use a list"):
        CheckpointConfig.from_dict({"listeners": LOGGING}, "options")
