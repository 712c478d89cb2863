"""Makes and reads short lists of tensor names, in which ranges stand for the numbers of layers and experts.

`decoder.layers.[0-31].mlp.linear_fc[1-2].weight` stands for 64 names. A list of ten thousand names becomes a list of
about twenty entries, whichever tensors a rank owns. Each number of a name can be a range, and an entry stands for all
combinations of the numbers in its ranges.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, product
from math import prod

from mcore_ckpt.sharding.names import natural_order, natural_orders

# A number in a name. Digits that begin with a zero, and very long numbers, count as text, because a name would change
# if they were read as numbers.
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
_NUMBERS = re.compile(r"(\[[0-9,-]+\]|(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9]))")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
# The character that stands for a number in a pattern.
_ANY = "\0"
# The first character of the entry of a name that contains a bracket. Otherwise the bracket would be read as a range.
_AS_IT_IS = "="
# The most names that lists may stand for together. A manifest can list a sixth of this number. Without a limit, a few
# characters could stand for any number of names.
_MOST_NAMES = 1 << 24
# Used as the last number of a name that has no numbers.
_NONE = "0"

Numbers = tuple[int, ...]
# Names by their pattern and by all their numbers except the last number. Each value is the set of the last numbers of
# these names.
_Found = dict[str, dict[Numbers, set[int]]]
# Entries by their pattern and by all their ranges except the last range. Each value maps these entries to their last
# ranges.
_Alike = dict[tuple[str, tuple[str, ...]], dict[str, str]]
Ranges = tuple[tuple[int, int], ...]


def fold(names: Iterable[str]) -> list[str]:
    """Returns a short list of entries that stands for some names. The same names give the same list.

    Example:
        >>> fold(["layers.0.w", "layers.1.w", "layers.3.w", "head.w"])
        ['head.w', 'layers.[0-1,3].w']
    """
    found: _Found = {}
    for pattern, numbers in map(_split, names):
        found.setdefault(pattern, {}).setdefault(numbers[:-1], set()).update(numbers[-1:])
    return _entries(found)


def join(lists: Iterable[Iterable[str]]) -> list[str]:
    """Returns one list of all the names that several lists stand for.

    Raises ValueError if an entry is malformed, or if the lists stand for too many names.

    Example:
        >>> join([["layers.[0-1].w"], ["layers.1.w", "layers.2.w"]])
        ['layers.[0-2].w']
    """
    return _entries(_found(_alike(lists)))


class OrderedNames:
    """All the names that several lists stand for, in natural order.

    Example:
        >>> ordered = OrderedNames([["layers.[0-1].w"], ["layers.1.w", "head.w"]])
        >>> ordered.names
        ('head.w', 'layers.0.w', 'layers.1.w')
        >>> list(ordered.positions_of(["layers.1.w", "head.w"]))
        [2, 0]
    """

    def __init__(self, lists: Iterable[Iterable[str]]) -> None:
        """Raises ValueError if an entry is malformed, or if the lists stand for too many names."""
        alike = _alike(lists)
        found = _found(alike)
        named = [row for pattern, rows in found.items() for row in _named(pattern, rows)]
        names = list(chain.from_iterable(of_row for of_row, _ in named))
        key_of = dict(zip(names, chain.from_iterable(keys for _, keys in named), strict=True))
        self.names = tuple(sorted(key_of, key=key_of.__getitem__))
        position = {name: number for number, name in enumerate(self.names)}
        positions = map(position.__getitem__, names)
        places = {
            pattern: {
                before: dict(zip(last, islice(positions, len(last)), strict=True)) for before, last in rows.items()
            }
            for pattern, rows in found.items()
        }
        # Use arrays, because Python's garbage collector need not look into arrays.
        self._positions: dict[str, array[int]] = {}
        for (pattern, firsts), entries in alike.items():
            in_rows = [places[pattern][before] for before in product(*map(_numbers, firsts))]
            for entry, last in entries.items():
                numbers = _numbers(last)
                self._positions[entry] = array("I", [row[number] for row in in_rows for number in numbers])

    def positions_of(self, entries: Iterable[str]) -> Iterator[int]:
        """Returns the positions of the names in one of the lists."""
        return chain.from_iterable(map(self._positions.__getitem__, entries))


class NameLists:
    """Finds the lists that contain a name. The lists are not expanded: a damaged file could have ranges of any length.

    Example:
        >>> NameLists([["layers.[0-7].w"], ["layers.[8-15].w", "head.w"]]).lists_with("layers.9.w")
        {1}
    """

    def __init__(self, lists: Iterable[Sequence[str]]) -> None:
        """Raises ValueError if an entry is malformed."""
        self._exact: dict[tuple[str, Numbers], set[int]] = {}
        self._in_ranges: dict[str, list[tuple[tuple[Ranges, ...], int]]] = {}
        for number, entries in enumerate(lists):
            for entry in entries:
                pattern, ranges = _read(entry)
                if all(len(each) == 1 and each[0][0] == each[0][1] for each in ranges):
                    self._exact.setdefault((pattern, tuple(each[0][0] for each in ranges)), set()).add(number)
                else:
                    self._in_ranges.setdefault(pattern, []).append((ranges, number))

    def lists_with(self, name: str) -> set[int]:
        """Returns the indices of the lists that contain a name."""
        pattern, numbers = _split(name)
        found = set(self._exact.get((pattern, numbers), ()))
        found.update(n for ranges, n in self._in_ranges.get(pattern, ()) if all(map(_has, ranges, numbers)))
        return found


def _has(ranges: Ranges, number: int) -> bool:
    return any(first <= number <= last for first, last in ranges)


def _split(name: str) -> tuple[str, Numbers]:
    """Returns a name's pattern, and the numbers that `_ANY` replaces in the pattern."""
    if "[" in name or name.startswith(_AS_IT_IS):
        return _AS_IT_IS + name, ()
    parts = _NUMBER.split(name)
    return _ANY.join(parts[::2]), tuple(map(int, parts[1::2]))


def _read(entry: str) -> tuple[str, tuple[Ranges, ...]]:
    if not isinstance(entry, str):
        raise ValueError(f"wanted a name, found a {type(entry).__name__}")
    pattern, texts = _texts(entry)
    return pattern, tuple(map(_ranges, texts))


# The result is cached, because a rank's files and its param groups have the same entries.
@lru_cache(maxsize=1 << 15)
def _texts(entry: str) -> tuple[str, tuple[str, ...]]:
    """Returns the pattern of an entry, and the text of each number or range in it."""
    if entry.startswith(_AS_IT_IS):
        return entry, ()
    parts = _NUMBERS.split(entry)
    return _ANY.join(parts[::2]), tuple(parts[1::2])


def _alike(lists: Iterable[Iterable[str]]) -> _Alike:
    """Groups entries that differ only in their last ranges, so that the numbers before the last are combined only once.

    With thousands of ranks, most entries differ only in the numbers of experts. Raises ValueError as `join` does.
    """
    found: _Alike = {}
    for entry in set().union(*lists):
        pattern, texts = _texts(entry)
        found.setdefault((pattern, texts[:-1]), {})[entry] = texts[-1] if texts else _NONE
    count = sum(
        prod(map(_count, firsts)) * sum(map(_count, entries.values())) for (_, firsts), entries in found.items()
    )
    if count > _MOST_NAMES:
        raise ValueError(f"lists stand for {count} names, more than {_MOST_NAMES}")
    return found


def _found(alike: _Alike) -> _Found:
    found: _Found = {}
    for (pattern, firsts), entries in alike.items():
        of_pattern, last = found.setdefault(pattern, {}), set().union(*map(_numbers, entries.values()))
        for before in product(*map(_numbers, firsts)):
            of_pattern.setdefault(before, set()).update(last)
    return found


def _named(pattern: str, rows: Mapping[Numbers, Collection[int]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the names that each item of `rows` (see `_Found`) stands for, and the `natural_order` of each name."""
    if _ANY not in pattern or pattern.startswith(_AS_IT_IS):
        name = pattern.removeprefix(_AS_IT_IS)
        yield [name], [natural_order(name)]
        return
    *parts, before_last, end = pattern.split(_ANY)
    for before, last in rows.items():
        start = "".join(f"{part}{number}" for part, number in zip(parts, before, strict=True)) + before_last
        yield [f"{start}{number}{end}" for number in last], natural_orders(start, last, end)


@lru_cache(maxsize=1 << 14)
def _numbers(text: str) -> list[int]:
    return [number for first, last in _ranges(text) for number in range(first, last + 1)]


@lru_cache(maxsize=1 << 14)
def _count(text: str) -> int:
    return sum(max(0, last + 1 - first) for first, last in _ranges(text))


@lru_cache(maxsize=1 << 14)
def _ranges(text: str) -> Ranges:
    found = [_RANGE.fullmatch(part) for part in text.strip("[]").split(",")]
    if None in found:
        raise ValueError(f"no range of numbers: {text}")
    return tuple((int(match[1]), int(match[2] or match[1])) for match in found if match is not None)


def _entries(found: _Found) -> list[str]:
    return sorted(
        _with_numbers(pattern, texts)
        for pattern, by_first in found.items()
        for texts in (_boxes(by_first) if _ANY in pattern else [()])
    )


def _with_numbers(pattern: str, texts: Iterable[str]) -> str:
    if pattern.startswith(_AS_IT_IS):
        return pattern
    first, *rest = pattern.split(_ANY)
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))


def _boxes(by_first: Mapping[Numbers, Iterable[int]]) -> Iterator[tuple[str, ...]]:
    """Divides combinations of numbers into boxes.

    A box is a tuple of texts such as "[0-2,7]", one for each number of a combination. The box stands for every
    combination of the numbers that its texts list.

    `by_first` maps all numbers of a combination except the last to the last numbers.
    """
    firsts: dict[frozenset[int], list[Numbers]] = {}
    for before, last in by_first.items():
        firsts.setdefault(frozenset(last), []).append(before)
    for last, every in firsts.items():
        if every == [()]:
            yield (_text(sorted(last)),)
            continue
        rest: dict[Numbers, set[int]] = {}
        for before in every:
            rest.setdefault(before[:-1], set()).add(before[-1])
        for box in _boxes(rest):
            yield (*box, _text(sorted(last)))


def _text(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as text: "3", or "[0-2,7]"."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"[{','.join(str(first) if first == last else f'{first}-{last}' for first, last in runs)}]"
