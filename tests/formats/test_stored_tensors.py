"""Which files hold a tensor: what is found is what the manifest's runs say, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.formats.native.stored_tensors import _BLOCK, _Holders

TENSORS = 3 * _BLOCK + 1

held_by_a_file = st.sets(st.integers(0, TENSORS - 1))


def runs_of(held: set[int]) -> list[tuple[int, int]]:
    """Tensors as runs of neighbours, the way a manifest lists them."""
    runs: list[tuple[int, int]] = []
    for number in sorted(held):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


@given(st.lists(held_by_a_file | st.just(set(range(TENSORS))), max_size=5))
def test_the_files_of_a_tensor_are_found_in_order(held: Sequence[set[int]]) -> None:
    files = [FileRecord(str(number), "model", 0, 1, 0, None, Holds(runs_of(each))) for number, each in enumerate(held)]
    holders = _Holders(files, TENSORS)
    for tensor in range(TENSORS):
        assert holders.of(tensor) == [file for file, each in zip(files, held, strict=True) if tensor in each]


def test_a_checkpoint_without_tensors_has_no_holders() -> None:
    _Holders([FileRecord("a", "rng", 0, 1, 0)], 0)
