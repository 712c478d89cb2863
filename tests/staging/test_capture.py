"""Getting bytes out of the training state: the arena and the copies."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.staging.arena import PAGE_BYTES, Arena
from mcore_ckpt.staging.copy import as_bytes, copy_out

POISON = 0xA5
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int16, torch.int64, torch.complex64)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]

pieces = st.tuples(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "transposed", "strided", "parameter"]),
    st.integers(0, 70),  # free bytes before it: any alignment
)


def make(shape: tuple[int, ...], dtype: torch.dtype, form: str, seed: int) -> torch.Tensor:
    """Random bits in a tensor of `shape`, contiguous or not."""
    wide = (*shape[:-1], shape[-1] * 2) if form == "strided" and shape else shape
    order = wide[::-1] if form == "transposed" else wide
    high = 2 if dtype == torch.bool else 256
    nbytes = math.prod(order) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(order)
    if form == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    if form == "strided" and shape:
        tensor = tensor[..., ::2]
    return torch.nn.Parameter(tensor) if form == "parameter" and dtype.is_floating_point else tensor


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)
@given(layout=st.lists(pieces, max_size=12))
def test_every_tensor_is_row_major_at_its_offset_and_nothing_else_is_touched(
    device: str, layout: list[tuple[tuple[int, ...], torch.dtype, str, int]]
) -> None:
    tensors = [make(shape, dtype, form, seed) for seed, (shape, dtype, form, _) in enumerate(layout)]
    offsets, expected = [], b""
    for tensor, (_, _, _, gap) in zip(tensors, layout, strict=True):
        expected += bytes([POISON]) * gap
        offsets.append(len(expected))
        rows = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        expected += rows.view(-1).view(torch.uint8).numpy().tobytes()
    image = torch.full((len(expected) + 9,), POISON, dtype=torch.uint8)
    copy_out([tensor.to(device) for tensor in tensors], image, offsets)
    assert image.numpy().tobytes() == expected + bytes([POISON]) * 9


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_queued_before_the_copy_is_copied_and_what_follows_is_not(device: str) -> None:
    tensor = torch.zeros(1 << 20, device=device)
    image = torch.empty(tensor.nbytes, dtype=torch.uint8)
    for _ in range(50):
        tensor += 1
    copy_out([tensor], image, [0])
    tensor += 1
    assert (image.view(torch.float32) == 50).all()


def test_as_bytes_is_the_tensors_own_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    as_bytes(parameter)[:] = 0x3F
    assert parameter.view(torch.int16).unique().tolist() == [0x3F3F]
    assert as_bytes(torch.zeros(0, 4)).numel() == 0
    assert as_bytes(torch.tensor(1.0)).numel() == 4


@given(st.lists(st.integers(0, 3 * PAGE_BYTES), min_size=1, max_size=8))
def test_the_arena_starts_on_a_page_and_grows_only_when_it_must(sizes: list[int]) -> None:
    arena = Arena()
    largest, address = -1, 0
    for size in sizes:
        taken = arena.take(size)
        assert (taken.numel(), taken.dtype, taken.device.type) == (size, torch.uint8, "cpu")
        assert not size or taken.data_ptr() % PAGE_BYTES == 0
        if size <= largest and size:
            assert taken.data_ptr() == address, "memory that was there is not used again"
        if size > largest:
            largest, address = size, taken.data_ptr()
        taken.fill_(1)


def test_a_released_arena_starts_anew() -> None:
    arena = Arena()
    arena.take(100).fill_(7)
    arena.release()
    assert arena.take(5).numel() == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_with_a_gpu_the_arena_is_pinned() -> None:
    assert Arena().take(100).is_pinned()


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        copy_out([torch.empty(3, device="meta")], torch.empty(64, dtype=torch.uint8), [0])
