"""Reads pickles that may be hostile. A pickle can call only functions that the caller lists.

The unpicklers of Python and torch (2.13, under `weights_only`) are not safe enough. Under torch's unpickler, a pickle
can call `bytearray` and all tensor classes, which allocate any amount of memory. Python's unpickler sizes its memo by
the largest index in the pickle, so a few bytes can allocate any amount of memory, too. In both unpicklers, hashing a
tuple of tuples as the key of a dict can take forever, or overflow the stack of the process. `benchmarks/pickles.py`
shows what hostile files do to `torch.load`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from mcore_ckpt.io import limits

# Types of values that have no parts.
_ATOMS = (type(None), bool, int, float, complex, str, bytes)

# How many parts a key can have, including the parts of nested tuples. The keys in checkpoints are names and numbers, so
# few parts are enough.
MOST_KEY_PARTS = 64
_MOST_DEPTH = 100
# How many values a pickle can have for each of its bytes. There can be several values for each byte, because a
# reference of two bytes can stand for an earlier tuple of a few numbers.
_MOST_VALUES_PER_BYTE = 16
# The values of a pickle may take `_MOST_MEMORY_PER_BYTE` bytes of memory for each byte that has been read, and
# `_ANY_MEMORY` bytes in addition. The metadata of a torch_dist checkpoint with many chunks takes 17 bytes of memory for
# each byte of its pickle, so the limit is larger.
_MOST_MEMORY_PER_BYTE = 24
_ANY_MEMORY = 256 << 10
# The memory that values take, in bytes: a place in a list; a number; a text without its characters; a tuple, list or
# object; an item of a dict; a dict; a set.
_SLOT, _NUMBER, _TEXT, _OBJECT, _ITEM, _DICT, _SET = 9, 40, 64, 72, 52, 104, 225
# A pickle numbers the values in its memo. If a value's number skips numbers that are still free, this many bytes of
# memory are counted for the value. The value takes less memory, but few pickles have such a value, so counting too much
# does no harm.
_OUT_OF_ORDER = 400
_TEXTS, _CONTAINERS = (str, bytes), (list, tuple, set, frozenset, dict)


class PickleError(ValueError):
    """A pickle is damaged, or does something that is not allowed."""


class Call:
    """A function or class that a pickle may call. It must check all arguments, because the pickle chooses them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


Find = Callable[[str, str], Any]
"""Resolves a global name (module, name) to a `Call` or a value. Raises PickleError for an unexpected name."""

Build = Callable[[Any, Any], None]
"""Sets the state of a new object: (object, state). Raises PickleError for anything unexpected."""


def refuse_global(module: str, name: str) -> PickleError:
    """Returns the error for a global name that a pickle may not use."""
    # A terminal would obey control characters in the name, so `ascii` escapes them.
    shown = ascii(f"{module}.{name}"[:200])[1:-1]
    return PickleError(
        f"{shown} does not belong in such a file. Nothing in the file was executed; find out who wrote it"
    )


def check_key(key: Any) -> None:
    """Raises PickleError unless a key can be hashed quickly.

    The allowed keys are atoms (see `_ATOMS`), tuples of a few atoms, and objects that a `Call` has made. The fields of
    a dataclass are counted as parts of the key, because a dataclass is hashed like the tuple of its fields.
    """
    if type(key) in _ATOMS:
        return
    parts, seen = [key], 0
    while parts:
        part = parts.pop()
        seen += 1
        if seen > MOST_KEY_PARTS:
            raise PickleError(f"a key in the pickle has more than {MOST_KEY_PARTS} parts")
        if isinstance(part, tuple):
            parts += part
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            parts += vars(part).values()
        elif isinstance(part, frozenset):
            raise PickleError("a key in the pickle is a set")


def check_extent(value: Any, nbytes: int, parts_of: Callable[[Any], Iterable[Any]] = lambda value: ()) -> None:
    """Raises PickleError for a value with many more parts than its pickle has bytes (`nbytes`).

    A list can contain itself. A list can also contain another list twice, which contains a third list twice, and so on.
    A program that walks through such a value would never finish. `parts_of` returns the parts of an object that is not
    a container.
    """
    most = _MOST_VALUES_PER_BYTE * nbytes + MOST_KEY_PARTS
    levels: list[Iterator[Any]] = [iter((value,))]
    seen = 0
    while levels:
        for item in levels[-1]:
            seen += 1
            if seen > most:
                raise PickleError(f"the pickle of {nbytes} bytes has more than {most} values")
            if type(item) not in _ATOMS:
                levels.append(_parts_of(item, parts_of))
                break
        else:
            levels.pop()
        if len(levels) > _MOST_DEPTH:
            raise PickleError(f"the values in the pickle are nested more than {_MOST_DEPTH} deep")


def _parts_of(item: Any, parts_of: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    if isinstance(item, dict):
        return chain(item.keys(), item.values())
    return iter(item if isinstance(item, _CONTAINERS) else parts_of(item))


def as_bytes(text: Any, encoding: Any) -> bytes:
    """Replaces `_codecs.encode`, which pickles of protocol 2 call to make bytes. Accepts only latin1."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise PickleError("the pickle has bytes in an encoding other than latin1")
    return text.encode("latin1")


def ordered_dict(*nothing: Any) -> OrderedDict[Any, Any]:
    """Replaces `OrderedDict`. Returns an empty OrderedDict, to which the pickle then adds items, key by key."""
    if nothing and nothing != ([],):
        raise PickleError("the pickle creates an OrderedDict with items in it")
    return OrderedDict()


def as_set(items: Any = ()) -> set[Any]:
    """Replaces `set`. Raises PickleError unless `items` is a list or tuple of values that can be hashed quickly."""
    if not isinstance(items, (list, tuple)):
        raise PickleError("a set in the pickle is not made from a list or tuple")
    for item in items:
        check_key(item)
    return set(items)


def as_complex(real: Any, imaginary: Any) -> complex:
    """Replaces `complex`. Raises PickleError unless both arguments are floats."""
    if type(real) is not float or type(imaginary) is not float:
        raise PickleError("a complex number in the pickle is not made from two floats")
    return complex(real, imaginary)


def as_shape(lengths: Any = ()) -> tuple[int, ...]:
    """Replaces `torch.Size`. Raises PickleError unless `lengths` is a list or tuple of integers."""
    if not isinstance(lengths, (list, tuple)) or any(type(length) is not int for length in lengths):
        raise PickleError("a shape in the pickle is not a list of integers")
    return tuple(lengths)


# Pickles of protocol 2 call the module `builtins` by its name in Python 2, `__builtin__`.
PLAIN_GLOBALS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): Call(as_bytes),
    ("collections", "OrderedDict"): Call(ordered_dict),
    ("torch", "Size"): Call(as_shape),
    **{(module, "set"): Call(as_set) for module in ("builtins", "__builtin__")},
    **{(module, "complex"): Call(as_complex) for module in ("builtins", "__builtin__")},
}
"""The global names that pickles of containers and numbers use."""


def find_plain(module: str, name: str) -> Any:
    """Resolves a global name that pickles of containers and numbers use. Raises PickleError for any other name."""
    try:
        return PLAIN_GLOBALS[module, name]
    except KeyError:
        raise refuse_global(module, name) from None


def _no_reference(reference: Any) -> Any:
    raise PickleError("the pickle refers to data outside of the pickle, which is not allowed here")


def refuse_state(made: Any, state: Any) -> None:
    """Raises PickleError for any object. This is the `Build` for pickles of plain values, which set no states."""
    raise PickleError(f"the pickle sets the state of a {type(made).__name__}, which is not allowed here")


class Unpickler:
    """Reads one pickle of protocol 2 to 5.

    Args:
        data: the pickle.
        find: resolves a global name.
        persistent: resolves a reference to data outside of the pickle, such as the bytes of a tensor.
        build: sets the state of a new object, and must refuse objects that it does not know.
    """

    def __init__(
        self,
        data: bytes,
        find: Find = find_plain,
        persistent: Callable[[Any], Any] = _no_reference,
        build: Build = refuse_state,
    ) -> None:
        self._data, self._find, self._persistent, self._build = data, find, persistent, build
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        # The programs that write pickles number the values in the memo from 0 on, so a list can hold the values. A list
        # takes a tenth of the memory of a dict. `_others` holds values with numbers beyond the end of the list.
        self._memo: list[Any] = []
        self._others: dict[int, Any] = {}
        # How many bytes of memory the values take, including copies that calls make. Without a limit, each byte of a
        # pickle could make a list, and every two bytes could pass the same long text to another call.
        self._taken = 0

    def load(self) -> Any:
        """Returns the value of the pickle.

        Raises PickleError, and any exception that `find`, `persistent`, `build` or a `Call` raises.
        """
        if len(self._data) > limits.PICKLE_BYTES:
            raise PickleError(f"the pickle has {len(self._data)} bytes, more than {limits.PICKLE_BYTES}")
        try:
            return self._run()
        except (IndexError, KeyError) as error:
            raise PickleError(f"the pickle is damaged: at byte {self._at} a value is missing ({error!r})") from None

    def _run(self) -> Any:
        data, actions = self._data, _ACTIONS
        while True:
            opcode = data[self._at]
            self._at += 1
            if opcode == _STOP:
                return self._stack.pop()
            found = actions.get(opcode)
            if found is None:
                raise PickleError(f"opcode {bytes([opcode])!r} at byte {self._at - 1} of the pickle is not allowed")
            action, memory = found
            self._charge(memory)
            action(self)

    # -- reading ---------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._data):
            raise PickleError(
                f"the pickle was cut: {nbytes} bytes are needed at byte {self._at}, but it ends at byte "
                f"{len(self._data)}"
            )
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise PickleError(f"the name at byte {self._at} of the pickle has no end")
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _popped(self) -> list[Any]:
        """Removes and returns the values that were put on the stack since the last mark."""
        items, self._stack = self._stack, self._below.pop()
        return items

    # -- opcodes ---------------------------------------------------------------------------------------------

    def _skip(self, nbytes: int) -> None:
        self._take(nbytes)

    def _mark(self) -> None:
        if len(self._below) > 10 * _MOST_DEPTH:
            raise PickleError("the pickle has too many marks")
        self._below.append(self._stack)
        self._stack = []

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("an empty stack")
        items = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._stack.append(items)

    def _long(self, form: struct.Struct) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(form)), "little", signed=True))

    def _text(self, form: struct.Struct) -> None:
        # Python writes pickles with surrogatepass, because its strings can have code points that UTF-8 does not allow.
        self._stack.append(str(self._take(self._number(form)), "utf-8", "surrogatepass"))

    def _put(self, number: int) -> None:
        value = self._stack[-1]
        if number == len(self._memo):
            if self._memo and self._memo[-1] is value:
                # Count extra memory. Programs that write pickles never put a value into the memo twice in a row, so the
                # extra count limits only hostile pickles.
                self._charge(_OBJECT)
            self._memo.append(value)
        elif number < len(self._memo):
            self._memo[number] = value
        else:
            self._charge(_OUT_OF_ORDER)
            self._others[number] = value

    def _get(self, number: int) -> None:
        self._push(self._memo[number] if number < len(self._memo) else self._others[number])

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError(f"the pickle appends items to a {type(target).__name__}")
        target += items

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise PickleError(f"the pickle adds {len(items)} keys and values to a {type(target).__name__}")
        self._charge(_ITEM // 2 * len(items))
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    def _set(self) -> None:
        self._stack.append(set())

    def _add_items(self) -> None:
        items, target = self._popped(), self._stack[-1]
        if type(target) is not set:
            raise PickleError(f"the pickle adds set items to a {type(target).__name__}")
        target |= as_set(items)

    def _frozen_set(self) -> None:
        self._stack.append(frozenset(as_set(self._popped())))

    def _pair(self) -> list[Any]:
        value, key = self._stack.pop(), self._stack.pop()
        return [key, value]

    def _global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("the pickle has a global name that is not text")
        self._stack.append(self._find(module, name))

    def _stack_global(self) -> None:
        self._global(*self._pair())

    def _call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Call) or not isinstance(args, tuple):
            raise PickleError(f"the pickle calls a {type(function).__name__}, or passes arguments that are not a tuple")
        self._charge_for(args)
        self._stack.append(function(*args))

    def _charge_for(self, arguments: tuple[Any, ...]) -> None:
        texts = sum(len(value) for value in arguments if isinstance(value, _TEXTS))
        self._charge(texts + _SLOT * sum(len(value) for value in arguments if isinstance(value, _CONTAINERS)))

    def _charge(self, nbytes: int) -> None:
        """Counts `nbytes` more bytes of memory. Raises PickleError if the sum is too much for the bytes read so far."""
        self._taken += nbytes
        if self._taken > _MOST_MEMORY_PER_BYTE * self._at + _ANY_MEMORY:
            raise PickleError(f"the first {self._at} bytes of the pickle have more values than their size allows")

    def _state(self) -> None:
        state = self._stack.pop()
        made = self._stack[-1]
        if type(made) is OrderedDict and isinstance(state, dict):
            return  # torch stores the versions of modules in this state; nothing needs them
        self._charge_for((state, *(state if isinstance(state, tuple) else ())))
        self._build(made, state)


_B1, _B2, _B4 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")

_Action = Callable[[Unpickler], None]

# The action of each opcode, and the memory, in bytes, that the opcode's value takes. The first three opcodes are PROTO,
# FRAME and MARK (their names in Python's `pickle`). Then come the opcodes for constants, numbers, text, bytes, tuples,
# containers and the memo. At the end are the opcodes for global names, calls, states and references. POP and POP_MARK
# are left out, because Python writes them only for values that contain themselves. The opcodes for text and bytes of
# more than 4 GiB are left out, because a pickle has at most PICKLE_BYTES bytes.
_ACTIONS: dict[int, tuple[_Action, int]] = {
    opcode[0]: (action, memory)
    for opcode, action, memory in (
        (b"\x80", lambda p: p._skip(1), 0),
        (b"\x95", lambda p: p._skip(8), 0),
        (b"(", Unpickler._mark, 0),
        (b"N", lambda p: p._push(None), _SLOT),
        (b"\x88", lambda p: p._push(True), _SLOT),
        (b"\x89", lambda p: p._push(False), _SLOT),
        (b"K", lambda p: p._push(p._number(_B1)), _SLOT),
        (b"M", lambda p: p._push(p._number(_B2)), _NUMBER),
        (b"J", lambda p: p._push(p._number(_I4)), _NUMBER),
        (b"G", lambda p: p._push(p._number(_F8)), _NUMBER),
        (b"\x8a", lambda p: p._long(_B1), _NUMBER),
        (b"X", lambda p: p._text(_B4), _TEXT),
        (b"\x8c", lambda p: p._text(_B1), _TEXT),
        (b"C", lambda p: p._push(p._take(p._number(_B1))), _TEXT),
        (b"B", lambda p: p._push(p._take(p._number(_B4))), _TEXT),
        (b")", lambda p: p._push(()), _SLOT),
        (b"\x85", lambda p: p._tuple(1), _OBJECT),
        (b"\x86", lambda p: p._tuple(2), _OBJECT),
        (b"\x87", lambda p: p._tuple(3), _OBJECT),
        (b"t", lambda p: p._push(tuple(p._popped())), _OBJECT),
        (b"]", lambda p: p._push([]), _OBJECT),
        (b"}", lambda p: p._push({}), _DICT),
        (b"\x8f", Unpickler._set, _SET),
        (b"a", lambda p: p._append([p._stack.pop()]), _SLOT),
        (b"e", lambda p: p._append(p._popped()), 0),
        (b"s", lambda p: p._set_items(p._pair()), 0),
        (b"u", lambda p: p._set_items(p._popped()), 0),
        (b"\x90", Unpickler._add_items, 0),
        (b"\x91", Unpickler._frozen_set, _SET),
        (b"q", lambda p: p._put(p._number(_B1)), _SLOT),
        (b"r", lambda p: p._put(p._number(_B4)), _SLOT),
        (b"\x94", lambda p: p._put(len(p._memo) + len(p._others)), _SLOT),
        (b"h", lambda p: p._get(p._number(_B1)), _SLOT),
        (b"j", lambda p: p._get(p._number(_B4)), _SLOT),
        (b"c", lambda p: p._global(p._line(), p._line()), _SLOT),
        (b"\x93", Unpickler._stack_global, _SLOT),
        (b"R", Unpickler._call, _OBJECT),
        (b"\x81", Unpickler._call, _OBJECT),
        (b"b", Unpickler._state, 0),
        (b"Q", lambda p: p._push(p._persistent(p._stack.pop())), _OBJECT),
    )
}
