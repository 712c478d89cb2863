"""Pickles from strangers: a machine that runs their opcodes, and of all they name only what it is handed.

Neither Python's nor torch's will do (torch 2.13 under `weights_only`): torch hands out `bytearray` and every storage
class, which take any amount of memory, and Python's allocates what an index into its memo says. In both, a tuple of
tuples as the key of a dict can take for ever to hash, or overflow the stack of the process.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from mcore_ckpt.io import limits

_ATOMS = (type(None), bool, int, float, complex, str, bytes)

# Parts of all tuples of a key together: names and numbers are keys, not data.
_MOST_KEY_PARTS = 64
_MOST_DEPTH = 100
# A reference to something that was there already takes two bytes or more, and may stand for a tuple of a few numbers.
_MOST_VALUES_PER_BYTE = 16
# An empty one takes 216 bytes of memory. Who pickles one remembers it, too, which is a second byte.
_VALUES_PER_SET = 2 * _MOST_VALUES_PER_BYTE
_SIZED = (str, bytes, list, tuple, set, frozenset, dict)


class PickleError(ValueError):
    """A pickle that is damaged, or wants what it may not have."""


class Call:
    """A function or class that a pickle may call. It gets what the pickle hands it: any values, checked by nobody."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


Find = Callable[[str, str], Any]
"""What a module's name stands for: a `Call`, or a value. Raises PickleError for all that is not expected."""

Build = Callable[[Any, Any], None]
"""Gives an object that was made its state. Raises PickleError for all that is not expected."""


def refuse_global(module: str, name: str) -> PickleError:
    # A terminal obeys what is no letter.
    shown = ascii(f"{module}.{name}"[:200])[1:-1]
    return PickleError(f"{shown} does not belong into it: written by whom? Nothing was run")


def check_key(key: Any) -> None:
    """Raises PickleError unless it is quickly hashed: an atom, a tuple of few of them, or what a `Call` has made.

    Of dataclasses, which are hashed as the tuple of their fields, the fields count.
    """
    if type(key) in _ATOMS:
        return
    parts, seen = [key], 0
    while parts:
        part = parts.pop()
        seen += 1
        if seen > _MOST_KEY_PARTS:
            raise PickleError(f"a key of more than {_MOST_KEY_PARTS} parts")
        if isinstance(part, tuple):
            parts += part
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            parts += vars(part).values()
        elif isinstance(part, frozenset):
            raise PickleError("a set as a key")


def check_extent(value: Any, nbytes: int, parts_of: Callable[[Any], Iterable[Any]] = lambda value: ()) -> None:
    """Raises PickleError for a value that is much larger when it is walked through than the pickle it came from.

    A list may hold itself, or hold one that holds one twice ..., each of them twice.

    Args:
        value: what was read.
        nbytes: of its pickle.
        parts_of: the parts of objects that are no containers.
    """
    most = _MOST_VALUES_PER_BYTE * nbytes + _MOST_KEY_PARTS
    seen, level, depth = 0, [value], 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, (list, tuple, set, frozenset)):
                below += item
            elif isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif type(item) not in _ATOMS:
                below += parts_of(item)
            if seen + len(below) > most:
                raise PickleError(f"{nbytes} bytes that stand for more than {most} values")
        seen += len(below)
        depth += 1
        if depth > _MOST_DEPTH:
            raise PickleError(f"values nested more than {_MOST_DEPTH} deep")
        level = below


def as_bytes(text: Any, encoding: Any) -> bytes:
    """`_codecs.encode`, which is how protocol 2 writes bytes: of no other encoding than it uses."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise PickleError("bytes that are no latin1")
    return text.encode("latin1")


def ordered_dict(*nothing: Any) -> OrderedDict[Any, Any]:
    """Empty: what is in it comes after, key by key."""
    if nothing and nothing != ([],):
        raise PickleError("an OrderedDict that is made of something")
    return OrderedDict()


def as_set(items: Any = ()) -> set[Any]:
    if not isinstance(items, (list, tuple)):
        raise PickleError("a set that is not made of a list")
    for item in items:
        check_key(item)
    return set(items)


def as_complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise PickleError("a complex number of no numbers")
    return complex(real, imaginary)


def as_shape(lengths: Any = ()) -> tuple[int, ...]:
    """`torch.Size` of a tuple."""
    if not isinstance(lengths, (list, tuple)) or any(type(length) is not int for length in lengths):
        raise PickleError("a shape of no numbers")
    return tuple(lengths)


# Protocol 2 says `__builtin__`, as Python 2 did.
PLAIN_GLOBALS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): Call(as_bytes),
    ("collections", "OrderedDict"): Call(ordered_dict),
    ("torch", "Size"): Call(as_shape),
    **{(module, "set"): Call(as_set) for module in ("builtins", "__builtin__")},
    **{(module, "complex"): Call(as_complex) for module in ("builtins", "__builtin__")},
}
"""What containers and numbers are made of."""


def find_plain(module: str, name: str) -> Any:
    try:
        return PLAIN_GLOBALS[module, name]
    except KeyError:
        raise refuse_global(module, name) from None


def _no_reference(reference: Any) -> Any:
    raise PickleError("a reference to something outside")


def refuse_state(made: Any, state: Any) -> None:
    raise PickleError(f"a state for a {type(made).__name__}")


class Unpickler:
    """One pickle, of protocol 2 to 5.

    Args:
        data: the pickle.
        find: what its names stand for.
        persistent: what its references to tensors' bytes stand for.
        build: gives an object that was made its state; must refuse what it does not know.
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
        self._memo: dict[int, Any] = {}
        # What sets take, and what calls may copy: a reference of two bytes may stand for a long text, handed over
        # again and again.
        self._left = _MOST_VALUES_PER_BYTE * len(data) + _MOST_KEY_PARTS

    def load(self) -> Any:
        """The value. Raises PickleError; what the functions it was handed raise comes out as it is."""
        if len(self._data) > limits.PICKLE_BYTES:
            raise PickleError(f"has {len(self._data)} bytes, more than {limits.PICKLE_BYTES}")
        try:
            return self._run()
        except (IndexError, KeyError) as error:
            raise PickleError(f"damaged: at byte {self._at} it wants what is not there ({error!r})") from None

    def _run(self) -> Any:
        data, actions = self._data, _ACTIONS
        while True:
            opcode = data[self._at]
            self._at += 1
            if opcode == _STOP:
                return self._stack.pop()
            action = actions.get(opcode)
            if action is None:
                raise PickleError(f"opcode {bytes([opcode])!r} at byte {self._at - 1} does not belong into it")
            action(self)

    # -- reading ---------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._data):
            raise PickleError(f"cut: {nbytes} bytes at byte {self._at} of {len(self._data)}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise PickleError("a name without an end")
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _popped(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        items, self._stack = self._stack, self._below.pop()
        return items

    # -- opcodes ---------------------------------------------------------------------------------------------

    def _skip(self, nbytes: int) -> None:
        self._take(nbytes)

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> None:
        self._popped()

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
        # surrogatepass, as it is written: what Python has as a string may be none.
        self._stack.append(str(self._take(self._number(form)), "utf-8", "surrogatepass"))

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError(f"items for a {type(target).__name__}")
        target += items

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise PickleError(f"{len(items)} keys and values for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    def _set(self) -> None:
        self._charge(_VALUES_PER_SET)
        self._stack.append(set())

    def _add_items(self) -> None:
        items, target = self._popped(), self._stack[-1]
        if type(target) is not set:
            raise PickleError(f"items for a {type(target).__name__}")
        target |= as_set(items)

    def _frozen_set(self) -> None:
        self._charge(_VALUES_PER_SET)
        self._stack.append(frozenset(as_set(self._popped())))

    def _pair(self) -> list[Any]:
        value, key = self._stack.pop(), self._stack.pop()
        return [key, value]

    def _global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("a name that is none")
        self._stack.append(self._find(module, name))

    def _stack_global(self) -> None:
        self._global(*self._pair())

    def _call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Call) or not isinstance(args, tuple):
            raise PickleError(f"a call of a {type(function).__name__}")
        self._spend(args)
        self._stack.append(function(*args))

    def _spend(self, handed: tuple[Any, ...]) -> None:
        self._charge(sum(len(value) for value in handed if isinstance(value, _SIZED)))

    def _charge(self, values: int) -> None:
        """Raises PickleError if calls were handed, or sets take, much more than the pickle has."""
        self._left -= values
        if self._left < 0:
            raise PickleError(f"{len(self._data)} bytes that stand for much more")

    def _state(self) -> None:
        state = self._stack.pop()
        made = self._stack[-1]
        if type(made) is OrderedDict and isinstance(state, dict):
            return  # what a state dict says of the versions of its modules
        self._spend((state, *(state if isinstance(state, tuple) else ())))
        self._build(made, state)


_B1, _B2, _B4, _B8 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")

_Action = Callable[[Unpickler], None]

# By their names in `pickle`, in this order: PROTO, FRAME, MARK, POP_MARK, POP; constants; numbers; text; bytes; tuples;
# containers; the memo; what is named.
_ACTIONS: dict[int, _Action] = {
    opcode[0]: action
    for opcode, action in {
        b"\x80": lambda p: p._skip(1),
        b"\x95": lambda p: p._skip(8),
        b"(": Unpickler._mark,
        b"1": Unpickler._pop_mark,
        b"0": lambda p: p._stack.pop() and None,
        b"N": lambda p: p._push(None),
        b"\x88": lambda p: p._push(True),
        b"\x89": lambda p: p._push(False),
        b"K": lambda p: p._push(p._number(_B1)),
        b"M": lambda p: p._push(p._number(_B2)),
        b"J": lambda p: p._push(p._number(_I4)),
        b"G": lambda p: p._push(p._number(_F8)),
        b"\x8a": lambda p: p._long(_B1),
        b"X": lambda p: p._text(_B4),
        b"\x8c": lambda p: p._text(_B1),
        b"\x8d": lambda p: p._text(_B8),
        b"C": lambda p: p._push(p._take(p._number(_B1))),
        b"B": lambda p: p._push(p._take(p._number(_B4))),
        b"\x8e": lambda p: p._push(p._take(p._number(_B8))),
        b")": lambda p: p._push(()),
        b"\x85": lambda p: p._tuple(1),
        b"\x86": lambda p: p._tuple(2),
        b"\x87": lambda p: p._tuple(3),
        b"t": lambda p: p._push(tuple(p._popped())),
        b"]": lambda p: p._push([]),
        b"}": lambda p: p._push({}),
        b"\x8f": Unpickler._set,
        b"a": lambda p: p._append([p._stack.pop()]),
        b"e": lambda p: p._append(p._popped()),
        b"s": lambda p: p._set_items(p._pair()),
        b"u": lambda p: p._set_items(p._popped()),
        b"\x90": Unpickler._add_items,
        b"\x91": Unpickler._frozen_set,
        b"q": lambda p: p._put(p._number(_B1)),
        b"r": lambda p: p._put(p._number(_B4)),
        b"\x94": lambda p: p._put(len(p._memo)),
        b"h": lambda p: p._push(p._memo[p._number(_B1)]),
        b"j": lambda p: p._push(p._memo[p._number(_B4)]),
        b"c": lambda p: p._global(p._line(), p._line()),
        b"\x93": Unpickler._stack_global,
        b"R": Unpickler._call,
        b"\x81": Unpickler._call,
        b"b": Unpickler._state,
        b"Q": lambda p: p._push(p._persistent(p._stack.pop())),
    }.items()
}
