"""Checks the fields of frozen dataclasses against the fields' types, and reads such fields from a plain mapping.

A configuration comes from code, from YAML or from the environment. In YAML and in the environment, `false` and
`"false"` look alike, but the text counts as true. So a value of another type than the field's is refused, with a
message that shows the right spelling. Nothing is converted.

Why not pydantic or msgspec: importing pydantic and making one dataclass with it takes 0.11 s of CPU, four times as long
as importing `config.py` with all that it imports. A command has 0.3 s to start. Pydantic's strict mode says "input
should be a valid boolean", but not what to write instead. msgspec checks only what it decodes, not what Python code
passes, and its structs would take the place of the frozen dataclasses. The version of either package would have to
agree with the version that a framework pins (verl, NeMo and vLLM pin pydantic). The checks here follow the annotations,
so a new field needs no extra code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mcore_ckpt.errors import InvalidArgumentError, InvalidTypeError
from mcore_ckpt.redaction import redacted

T = TypeVar("T")

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NO_LIMITS: Mapping[str, Any] = types.MappingProxyType({})
_NONES = ("none", "null", "~", "")


def limited(
    default: Any, least: float | None = None, above: float | None = None, or_none: str = "", of: str = ""
) -> Any:
    """Makes a field that is a number, or None if the field's type allows None.

    Args:
        default: the field's default.
        least: the least number that is allowed.
        above: numbers must be larger than this.
        or_none: what None means, for messages: "to keep every checkpoint".
        of: what is counted, for messages: "seconds".
    """
    return dataclasses.field(default=default, metadata={"least": least, "above": above, "or_none": or_none, "of": of})


def one_of(default: str, *others: str) -> Any:
    """Makes a field that is one of several words."""
    return dataclasses.field(default=default, metadata={"choices": (default, *others)})


def checked(cls: type[T]) -> type[T]:
    """Makes a dataclass suggest the closest name for an unknown field, and hide secrets in its repr.

    Use this decorator above `@dataclass`. The class must call `check_fields` in `__post_init__`.
    """
    make, shown = cls.__init__, cls.__repr__

    @functools.wraps(make)
    def init(self: Any, *values: Any, **named: Any) -> None:
        known = [field.name for field in dataclasses.fields(self) if field.init]
        if unknown := [name for name in named if name not in known]:
            raise InvalidTypeError(f"{cls.__name__} has {unknown_text(unknown, known)}")
        make(self, *values, **named)

    cls.__init__ = init  # type: ignore[method-assign]
    cls.__repr__ = lambda self: redacted(shown(self))  # type: ignore[method-assign]
    return cls


def unknown_text(unknown: Collection[object], known: Collection[str]) -> str:
    """Describes options that do not exist: "no option 'max_to_kep': did you mean 'max_to_keep'?"."""
    import difflib  # commands start faster if `difflib` is not imported at their start

    first = sorted(map(str, unknown))
    close = difflib.get_close_matches(first[0], known, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(sorted(known))}"
    return f"no option {' and no option '.join(map(repr, first))}: {advice}"


def check_fields(owner: Any, of: str = "", before: str = "") -> None:
    """Checks the numbers, words, texts and booleans of a dataclass.

    Args:
        owner: the dataclass.
        of: the text after a field's name in messages, such as " of the fast tier".
        before: the text before a field's name in messages.

    Raises InvalidArgumentError: a value has another type than its field, or is out of range.
    """
    hints = _hints(cast("Hashable", type(owner)))
    for field in dataclasses.fields(owner):
        check_value(before + field.name + of, getattr(owner, field.name), hints[field.name], field.metadata)


def check_value(name: str, value: Any, hint: Any, limits: Mapping[str, Any] = _NO_LIMITS) -> None:
    """Checks one value that is, or should be, a number, a boolean or a text. Values of other types are not checked.

    Raises InvalidArgumentError: the value has another type than `hint`, or is out of range. The message begins with
    `name`.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = next((each for each in (bool, int, float, str) if each in kinds), None)
    if kind is None or len([each for each in kinds if each is not type(None)]) > 1:
        return
    if value is None and type(None) in kinds:
        return
    if "choices" in limits:
        if not isinstance(value, str) or value not in limits["choices"]:
            raise InvalidArgumentError(f"{name} is {value!r}: use one of {', '.join(map(repr, limits['choices']))}")
        return
    if not _has_type(value, kind):
        raise InvalidArgumentError(f"{name} is {value!r}: {_advice(value, kind, type(None) in kinds, limits)}")
    if kind in (int, float) and not _is_in_range(value, kind, limits):
        raise InvalidArgumentError(f"{name} is {value!r}: use {_wanted(value, kind, type(None) in kinds, limits)}")


def _has_type(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_in_range(value: Any, kind: type, limits: Mapping[str, Any]) -> bool:
    least, above = limits.get("least"), limits.get("above")
    return _is_finite(value, kind) and (least is None or value >= least) and (above is None or value > above)


def _is_finite(value: Any, kind: type) -> bool:
    # Compare instead of calling math.isfinite(), which raises OverflowError for a whole number that no float holds.
    return abs(value) <= sys.float_info.max if kind is float else abs(value) < math.inf


def _advice(value: Any, kind: type, optional: bool, limits: Mapping[str, Any]) -> str:
    """Says what to write instead: the right spelling of the value, if there is one, or else the allowed values."""
    meant = _meant(value, kind, optional) if isinstance(value, str) else _of_python(value)
    if kind is int and isinstance(meant, float) and meant.is_integer():
        meant = int(meant)
    fits = _has_type(meant, kind) or (meant is None and optional)
    if kind is not str and fits and (kind is bool or meant is None or _is_in_range(meant, kind, limits)):
        in_yaml = {True: " (in YAML: true)", False: " (in YAML: false)", None: " (in YAML: null)"}
        spelled = in_yaml[meant] if meant is None or isinstance(meant, bool) else ""
        if isinstance(value, str):
            return f"use {meant!r}{spelled}, without quotes"
        is_known = type(value) in (bool, int, float)
        return f"use {meant!r}{spelled}" if is_known else f"use {meant!r} (a Python {kind.__name__})"
    return f"use {_wanted(meant, kind, optional, limits)}"


def _meant(text: str, kind: type, optional: bool) -> Any:
    """Returns the value that a word from YAML or the environment stands for; otherwise the word itself."""
    word = text.strip().lower()
    if optional and word in _NONES:
        return None
    if kind is bool:
        return _BOOLS.get(word, {"1": True, "0": False}.get(word, text))
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return text


def _of_python(value: Any) -> Any:
    """Returns the number or boolean that a scalar of NumPy or torch holds. Returns other values unchanged."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return value


def _wanted(value: Any, kind: type, optional: bool, limits: Mapping[str, Any]) -> str:
    """Describes the values that a field may have instead: "1 or more, or None to keep every checkpoint"."""
    least, above, of = limits.get("least"), limits.get("above"), limits.get("of", "")
    text = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text"}[kind]
    of = f" {of}" if of else ""
    known = "" if _has_type(value, kind) and _is_finite(value, kind) else f"{text}: "
    if least is not None:
        text = f"{known}{least:g} or more{of}"
    elif above is not None:
        text = f"{known}more than {above:g}{of}"
    return text + (f", or None {limits.get('or_none', '')}".rstrip() if optional else "")


@functools.cache
def _hints(cls: Hashable) -> Mapping[str, Any]:
    return get_type_hints(cls)


def plain(value: Any, where: str) -> Any:
    """Returns a mapping as a dict and a sequence as a list, at any depth. This includes OmegaConf's containers.

    Raises InvalidArgumentError: a value of OmegaConf is missing (`???`), or refers to a value that does not exist.
    """
    try:
        if isinstance(value, Mapping):
            return {name: plain(each, where) for name, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return [plain(each, where) for each in value]
    except (InvalidArgumentError, InvalidTypeError):
        raise
    except Exception as error:
        raise InvalidArgumentError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    return value


def options_of(
    given: object,
    known: Sequence[str],
    where: str,
    read: Mapping[str, Callable[[Any], Any]],
) -> dict[str, Any]:
    """Returns the options in a mapping, as arguments of a dataclass.

    Args:
        given: the mapping: a dict or OmegaConf's DictConfig.
        known: the names of all options.
        where: the name of the mapping, for messages.
        read: for each option that is not a plain value, a function that reads the value; by the option's name.

    Raises InvalidArgumentError: `given` is not a mapping, an option is unknown, or a value cannot be read.
    """
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} is {given!r}: use a mapping of options, such as {{{known[0]!r}: ...}}")
    found = plain(given, where)
    if unknown := [name for name in found if name not in known]:
        raise InvalidArgumentError(f"{where} has {unknown_text(unknown, known)}")
    return {name: read[name](value) if name in read else value for name, value in found.items()}
