"""Each field is checked by its type, wherever its value comes from: a new field is held to it at once."""

from __future__ import annotations

import dataclasses
import types
from collections import UserDict, UserList
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from mcore_ckpt import CheckpointConfig, FastTier
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from mcore_ckpt.field_checks import check_value
from mcore_ckpt.integrations.verl.options import read_options as read_verl
from mcore_ckpt.recover import recover, resumable_steps
from mcore_ckpt.schedule import Frequency, Schedule
from mcore_ckpt.steps import PreservationPolicy
from mcore_ckpt.urls import checked_url, local_path

CLASSES: dict[type, dict[str, Any]] = {
    CheckpointConfig: {"max_to_keep": 3},  # keep_every needs it
    FastTier: {"folder": "/dev/shm/run"},
    Frequency: {},
    PreservationPolicy: {"max_to_keep": 3},
}
# By type: what is refused, and words of the message. "{good}" is a value that the field may have.
NUMBER = [
    *(("{good}", "use {good}, without quotes"), (True, "use a .* number"), ([1], "use a .* number")),
    *(({}, "use a .* number"), (float("nan"), "use a .* number")),
]
BAD: dict[type, list[tuple[Any, str]]] = {
    bool: [
        *(("False", "use False (in YAML: false), without quotes"), ("yes", "use True (in YAML: true), without quotes")),
        *(("0", "use False"), (0.5, "use True or False"), (1, "use True or False"), (None, "use True or False")),
    ],
    int: [*NUMBER, (2.0, "use 2"), (1.5, "use a whole number"), ("many", "use "), ("10 ", "use 10, without quotes")],
    float: [
        *NUMBER,
        ("600s", "use "),
        (float("inf"), "use a finite number"),
        (-1.0, "use "),
        (10**400, "use a finite"),
    ],
    str: [(3, "use "), (True, "use "), ("s3:/bucket", "use "), (["a"], "use ")],
    tuple: [
        ("text", "is the string 'text': use a list"),
        (3, "use a list"),
        ({"a"}, "use a list"),
        ([3], "has 3|\\[0\\]"),
        ([], "is empty|use "),
    ],
}
MAY_BE_EMPTY = {"parts"}
OWN = {"folder", "domain", "fast", "listeners", "keep_best"}  # test_config.py, and steps/test_retention_model.py


def kind_of(hint: Any) -> tuple[type, bool]:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    named = [get_origin(kind) or kind for kind in kinds if kind is not type(None)]
    return named[0], type(None) in kinds


def cases() -> Iterator[Any]:
    for cls, needed in CLASSES.items():
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in OWN:
                continue
            kind, optional = kind_of(hints[field.name])
            good = field.default if isinstance(field.default, (int, float)) else 7
            rows = [(value, words) for value, words in BAD[kind] if value is not None or not optional]
            if field.name in MAY_BE_EMPTY:
                rows = [(value, words) for value, words in rows if value != []]
            if optional:
                rows += [("null", "use None \\(in YAML: null\\)")] if kind in (int, float) else []
            elif kind is not bool:
                rows.append((None, "use "))
            for value, words in rows:
                value = value.format(good=good) if isinstance(value, str) else value
                words = words.format(good=good).replace(" (in YAML: ", " \\(in YAML: ").replace("e),", "e\\),")
                yield pytest.param(cls, {**needed, field.name: value}, field.name, words, id=f"{field.name}-{value!r}")


@pytest.mark.parametrize(("cls", "given", "name", "words"), list(cases()))
def test_a_value_of_another_type_is_refused(cls: Any, given: dict[str, Any], name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name}.*({words})"):
        cls(**given)
    if cls is CheckpointConfig:
        with pytest.raises(CheckpointError, match=rf"{name}.*({words})"):
            CheckpointConfig.from_dict(given)


@pytest.mark.parametrize(
    ("value", "hint", "advice"),
    [
        (np.int64(3), int | None, "use 3 (a Python int)"),
        (np.int64(0), int | None, "use 1 or more, or None"),
        (torch.tensor(3), int, "use 3 (a Python int)"),
        (np.float32(5), float, "use 5.0 (a Python float)"),
        (np.float32("inf"), float, "use a finite number: 1 or more"),
        (np.array([3, 4]), int, "use a whole number: 1 or more"),
        (np.True_, bool, "use True (a Python bool)"),
    ],
)
def test_a_scalar_of_numpy_or_torch_is_answered_with_python_s_own(value: Any, hint: Any, advice: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_value("keep", value, hint, {"least": 1})
    assert str(refused.value) == f"keep is {value!r}: {advice}"


@pytest.mark.parametrize("cls", CLASSES)
def test_an_unknown_field_is_answered_with_the_closest_name(cls: Any) -> None:
    name = dataclasses.fields(cls)[-1].name
    with pytest.raises(InvalidTypeError, match=rf"{cls.__name__} has no option '{name}s': did you mean '{name}'\?"):
        cls(**{**CLASSES[cls], f"{name}s": 1})
    with pytest.raises(TypeError, match="no option 'xyzzy': the options are .*" + name):
        cls(**{**CLASSES[cls], "xyzzy": 1})


NESTED: dict[str, Any] = {
    "max_to_keep": 2,
    "save_contents": ["model", "extra"],
    "roles": ["actor"],
    "timeout_s": 60,
    "listeners": ["mcore_ckpt.integrations.listeners.LoggingListener"],
    "fast": {"folder": "/dev/shm/run", "durable_every": None, "domain": "socket.gethostname"},
}


def omega(given: Mapping[str, Any]) -> Any:
    return pytest.importorskip("omegaconf").OmegaConf.create(dict(given))


def duck(given: Mapping[str, Any]) -> Any:
    """Containers that are neither dict nor list, as OmegaConf's are."""
    made = UserDict(given)
    for name, value in given.items():
        if isinstance(value, dict):
            made[name] = duck(value)
        elif isinstance(value, list):
            made[name] = UserList(value)
    return made


@pytest.mark.parametrize("make", [dict, duck, omega])
def test_a_nested_mapping_describes_a_configuration(make: Callable[[Mapping[str, Any]], Any]) -> None:
    config = CheckpointConfig.from_dict(make(NESTED))
    assert (config.save_contents, config.roles, config.timeout_s) == (("model", "extra"), ("actor",), 60)
    assert config.fast is not None
    assert (config.fast.folder, config.fast.durable_every) == ("/dev/shm/run", None)
    assert callable(config.fast.domain)
    with pytest.raises(InvalidArgumentError, match="options has no option 'fsat': did you mean 'fast'"):
        CheckpointConfig.from_dict(make({"fsat": None}), "options")
    with pytest.raises(InvalidArgumentError, match="fast of options has no option 'folders': did you mean 'folder'"):
        CheckpointConfig.from_dict(make({"fast": {"folders": "/a"}}), "options")
    with pytest.raises(InvalidArgumentError, match="keep of the fast tier is '2': use 2, without quotes"):
        CheckpointConfig.from_dict(make({"fast": {"folder": "/a", "keep": "2"}}))
    with pytest.raises(InvalidArgumentError, match="has 'max_to_keep', which the framework"):
        CheckpointConfig.from_dict(make(NESTED), but=("max_to_keep",))


def test_what_omegaconf_misses_is_named() -> None:
    for value in ("???", "${nothing.there}"):
        with pytest.raises(InvalidArgumentError, match="options cannot be read"):
            CheckpointConfig.from_dict(omega({"timeout_s": value}), "options")


@pytest.mark.parametrize("given", ["max_to_keep=2", None, [], 3])
def test_what_is_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="use a mapping of options"):
        CheckpointConfig.from_dict(given)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:/bucket/run", "use 's3://bucket/run'"),
        ("s3:///bucket", "use 's3://bucket'"),
        ("gs:/bucket", "use 'gs://bucket'"),
        ("file:/mnt/x", "use 'file:///mnt/x'"),
        ("file://mnt/x", "use an absolute path, such as 'file:///mnt/x'"),
        ("/mnt/x", "use 'file:///mnt/x'"),
        ("bucket/run", "use a URL such as"),
        ("s3://", "use a URL such as"),
        ("simplecache::s3://bucket", "use a URL such as"),
        (" s3://bucket", "use a URL such as"),
        (Path("/mnt/x"), "use 'file:///mnt/x'"),
        (3, "remote is 3: use a URL"),
        ("", "use a URL such as"),
    ],
)
def test_urls_have_the_right_spelling(url: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        checked_url(url)
    with pytest.raises(CheckpointError, match=words):
        CheckpointConfig(remote=url)


def test_urls_that_are_some() -> None:
    for url in ("s3://bucket/run", "file:///mnt/x", "hdfs:///user/x", "hdfs://host:9000/x", "memory://x", "az://c/x"):
        assert checked_url(url) == url
    with pytest.raises(InvalidArgumentError) as raised:
        checked_url("s3:/user:hunter2@bucket")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("s3://bucket/run", "is the URL 's3://bucket/run': use the path of a folder"),
        ("file:/mnt", "is the URL"),
        (3, "path is 3: use a path"),
        (b"/mnt", "use a path"),
        ("", "path is empty"),
        (None, "use a path"),
    ],
)
def test_a_path_is_no_url(path: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        local_path(path, "path")


class Managers(list[Any]):
    role, root = "actor", Path("/nothing")


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        (True, "use 'auto', 'off', a step or a path"),
        (None, "use 'auto', 'off'"),
        ("", "use 'auto', 'off'"),
        (-1, "use 0 or more"),
        (1.0, "use 'auto', 'off'"),
        ("100", "use 100, without quotes"),
        ("True", "use 'auto'"),
        ("latest", "use 'auto'"),
        ("AUTO", "use 'auto'"),
        ("false", "use 'off'"),
        ("none", "use 'auto', 'off'"),
    ],
)
def test_ways_to_resume(resume: Any, words: str) -> None:
    manager: Any = Managers()
    with pytest.raises(InvalidArgumentError, match=f"resume is {resume!r}: {words}"):
        recover([manager], resume)


def test_other_arguments(tmp_path: Path) -> None:
    manager: Any = Managers()
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: recover([manager], retries="3"), "retries is '3': use 3, without quotes"),  # type: ignore[arg-type]
        (lambda: recover([manager], retries=-1), "retries is -1: use 0 or more"),
        (lambda: resumable_steps(tmp_path, ["actor"], "7"), "step is '7': use 7"),  # type: ignore[arg-type]
        (lambda: resumable_steps("s3://bucket", ["actor"]), "root is the URL"),
        (lambda: Schedule(Frequency(steps=1)).due(steps="1"), "steps is '1': use 1"),  # type: ignore[arg-type]
        (lambda: read_verl({"timeuot_s": 3}), "no option 'timeuot_s': did you mean 'timeout_s'"),
    ]
    for call, words in calls:
        with pytest.raises(InvalidArgumentError, match=words):
            call()
