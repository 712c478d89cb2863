"""The sizes of elements, which are written down so that nobody needs torch for them."""

from collections.abc import Callable

import pytest
import torch

from mcore_ckpt.checkpoint.dtypes import dtype_name, torch_dtype
from mcore_ckpt.checkpoint.element_sizes import ITEM_BYTES, item_bytes


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_sizes_are_those_of_torch(name: str) -> None:
    assert torch_dtype(name).itemsize == item_bytes(name)
    assert dtype_name(torch_dtype(name)) == name


@pytest.mark.parametrize("find", [item_bytes, torch_dtype])
def test_other_names_are_refused(find: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="dtype 'quint8' is not one of float64, "):
        find("quint8")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.quint8 cannot be stored"):
        dtype_name(torch.quint8)
