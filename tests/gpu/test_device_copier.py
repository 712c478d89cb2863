import random
from collections.abc import Iterator

import pytest
import torch

from mcore_ckpt.io import _native

POISON = 0xA5
MEBIBYTE = 1 << 20


@pytest.fixture
def copier() -> Iterator[_native.DeviceCopier]:
    copier = _native.DeviceCopier(torch.cuda.current_device(), torch.cuda.Stream().cuda_stream)
    yield copier
    copier.close(60.0)


class Host:
    """A poisoned pinned buffer, and a tensor of its bytes."""

    def __init__(self, nbytes: int, pinned: bool = True) -> None:
        self.buffer = _native.HostBuffer(nbytes, device=torch.cuda.current_device() if pinned else None)
        self.bytes = torch.frombuffer(self.buffer, dtype=torch.uint8).fill_(POISON)


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def start(
    copier: _native.DeviceCopier, host: Host, starts: list[int], tensors: list[torch.Tensor], group_bytes: int
) -> list[tuple[int, _native.DeviceEvent]]:
    return copier.start(
        host.buffer,
        starts,
        [tensor.data_ptr() for tensor in tensors],
        [tensor.nbytes for tensor in tensors],
        current_stream(),
        group_bytes,
    )


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_only_the_destinations_change(copier: _native.DeviceCopier, seed: int) -> None:
    order = random.Random(seed)
    source = torch.randint(0, 256, (24 * MEBIBYTE,), dtype=torch.uint8, device="cuda")
    sizes = [
        order.choice([0, 1, order.randint(2, 200), order.randint(200, 70_000), 65_535, 65_536]) for _ in range(400)
    ]
    sizes.insert(order.randrange(len(sizes)), 5 * MEBIBYTE + 3)
    tensors, starts, end = [], [], order.randint(0, 16)
    for size in sizes:
        at = order.randint(0, source.numel() - size)
        tensors.append(source[at : at + size])
        starts.append(end)
        end += size + order.choice([0, 1, 8, order.randint(0, 64)])
    host = Host(end + 64)
    expected = bytearray(host.bytes.numpy().tobytes())
    for at, tensor in zip(starts, tensors, strict=True):
        expected[at : at + tensor.numel()] = as_bytes(tensor)
    groups = start(copier, host, starts, tensors, order.choice([1, 100_000, MEBIBYTE, 1 << 40]))
    copier.wait(60.0)
    assert copier.done()
    assert groups[-1][0] == len(tensors)
    assert host.bytes.numpy().tobytes() == bytes(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("apart", range(16))
def test_every_alignment_of_the_two_ends(copier: _native.DeviceCopier, dtype: torch.dtype, apart: int) -> None:
    numbers = torch.randint(0, 2, (40_000,), device="cuda").to(dtype)
    host = Host(numbers.nbytes + 32)
    small = numbers.view(torch.uint8)[:60_001]
    start(copier, host, [apart], [small], 1)
    copier.wait(60.0)
    assert host.bytes.numpy().tobytes()[apart : apart + small.numel()] == as_bytes(small)
    assert host.bytes[:apart].eq(POISON).all()
    assert host.bytes[apart + small.numel() :].eq(POISON).all()


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("sizes", [[1000] * 300, [4 * MEBIBYTE] * 4, [100, 4 * MEBIBYTE] * 3], ids=str)
def test_old_values_arrive_a_thousand_times(copier: _native.DeviceCopier, sizes: list[int], own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device="cuda")
    tensors = list(flat.split(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    host = Host(flat.numel())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for round in range(1000):
            flat.fill_(round % 200)
            start(copier, host, starts, tensors, MEBIBYTE)
            copier.hold(current_stream(), 60.0)
            flat.fill_(255)
            copier.wait(60.0)
            assert bool((host.bytes == round % 200).all()), round


def test_start_and_hold_do_not_wait_for_the_gpu(copier: _native.DeviceCopier) -> None:
    tensors = [torch.zeros(MEBIBYTE, dtype=torch.uint8, device="cuda") for _ in range(8)]
    host = Host(8 * MEBIBYTE)
    starts = [i * MEBIBYTE for i in range(8)]
    start(copier, host, starts, tensors, MEBIBYTE)  # makes its events
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second
    before = torch.cuda.Event()
    before.record()
    groups = start(copier, host, starts, tensors, MEBIBYTE)
    copier.hold(current_stream(), 60.0)
    assert not before.query()
    assert not copier.done()
    assert [count for count, _ in groups] == list(range(1, 9))
    copier.wait(60.0)
    assert before.query()


def test_closing_waits_for_the_copies() -> None:
    copier = _native.DeviceCopier(torch.cuda.current_device(), torch.cuda.Stream().cuda_stream)
    tensor = torch.zeros(64 * MEBIBYTE, dtype=torch.uint8, device="cuda")
    host = Host(tensor.nbytes)
    torch.cuda._sleep(100_000_000)
    tensor.fill_(3)
    start(copier, host, [0], [tensor], 1)
    copier.close(60.0)
    assert bool((host.bytes == 3).all())
    with pytest.raises(ValueError, match="closed"):
        copier.done()


def test_memory_of_the_wrong_kind_is_refused(copier: _native.DeviceCopier) -> None:
    on_gpu = torch.zeros(8, device="cuda")
    with pytest.raises(ValueError, match="not pinned"):
        start(copier, Host(32, pinned=False), [0], [on_gpu], 1)
    with pytest.raises(ValueError, match="in GPU memory"):
        start(copier, Host(32), [0], [torch.zeros(8)], 1)
    with pytest.raises(ValueError, match="copy 1: the tensor is not"):
        start(copier, Host(96), [0, 32, 64], [on_gpu, torch.zeros(8), on_gpu], 1)
    with pytest.raises(ValueError, match="copy 1: 32 bytes at offset 65"):
        start(copier, Host(96), [0, 65, 64], [on_gpu] * 3, 1)
    torch.cuda.synchronize()  # the GPU can still be used
