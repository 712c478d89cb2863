"""The fill of one tensor: which dtypes are taken, what is rounded, and what is refused."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.locate import Located, Wanted
from mcore_ckpt.load.tensor_fills import describe_rounding, not_there, plan_fill, refuse_rounding, replicas_of
from mcore_ckpt.ranks.topology import Replicas, Topology
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support.stored_tensors import MODEL_FILE, checkpoint, locator_of, lone_trainer, shard

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
WANTED = Wanted(ShardKey("a.weight", MODEL), Region.whole((2, 3)), "model/own.pt")
# Chosen so that all exponents, subnormals, and the largest numbers of each dtype are there.
BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32)


def located(dtype: torch.dtype, outside: int = 0, file: str | None = None) -> Located:
    reads: Any = () if file is None else (SimpleNamespace(stored=SimpleNamespace(file=file)),)
    return Located(reads, dtype, outside)


def plan(stored: torch.dtype, kept: torch.dtype, **more: Any) -> str | None:
    """What the fill says of rounding."""
    return plan_fill(WANTED, kept, located(stored), lambda: torch.zeros(2, 3), **more).rounding


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
def test_the_same_dtype_is_taken_as_it_is(dtype: torch.dtype) -> None:
    target = torch.zeros(2, 3)
    fill = plan_fill(WANTED, dtype, located(dtype), lambda: target)
    assert (fill.dtype, fill.padded, fill.rounding, fill.encode, fill.finish) == (dtype, False, None, None, None)
    assert fill.target() is target


@pytest.mark.parametrize(
    ("stored", "kept"),
    [(torch.int64, torch.float32), (torch.float32, torch.int64), (torch.int64, torch.int32), (torch.uint8, torch.bool)],
)
@pytest.mark.parametrize(("file", "named"), [("optim/theirs.pt", "optim/theirs.pt"), (None, "model/own.pt")])
def test_integers_are_not_converted(stored: torch.dtype, kept: torch.dtype, file: str | None, named: str) -> None:
    words = f"{named}: tensor a.weight: wanted dtype {kept}, found {stored}"
    with pytest.raises(CheckpointMismatchError, match=f"^{re.escape(words)}$"):
        plan_fill(WANTED, kept, located(stored, file=file), lambda: torch.zeros(2, 3))


def test_scaled_values_are_floats_whatever_their_elements_are() -> None:
    assert plan(torch.float32, torch.uint8, scaled=True) == "model: float32 to scaled uint8"
    assert plan(torch.float16, torch.float16, scaled=True) == "model: float16 to scaled float16"
    with pytest.raises(CheckpointMismatchError, match=r"wanted dtype torch\.uint8, found torch\.int32"):
        plan(torch.int32, torch.uint8, scaled=True)
    with pytest.raises(CheckpointMismatchError, match=r"wanted dtype torch\.uint8, found torch\.float32"):
        plan(torch.float32, torch.uint8)


@pytest.mark.parametrize(("outside", "padded"), [(0, False), (1, True), (7, True)])
def test_elements_beyond_the_stored_tensor_are_padding(outside: int, padded: bool) -> None:
    fill = plan_fill(WANTED, torch.float32, located(torch.float32, outside), lambda: torch.zeros(2, 3))
    assert fill.padded is padded


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a dtype: all of those of 8 and 16 bits, and of wider ones each exponent and the finest fractions."""
    if dtype.itemsize <= 2:
        found = BITS.to(torch.int16 if dtype.itemsize == 2 else torch.int8).view(dtype)
    else:
        info = torch.finfo(dtype)
        one = 1 + torch.tensor([0, info.eps], dtype=dtype)
        powers = torch.tensor(
            [2.0**power for power in range(-1074 if dtype == torch.float64 else -149, 1024)], dtype=dtype
        )
        found = torch.cat([(powers[:, None] * one).view(-1), torch.tensor([info.max, -info.max], dtype=dtype)])
    return found[found.isfinite()] if dtype.itemsize > 1 else found[found.float().isfinite()]


@pytest.mark.parametrize(("stored", "kept"), list(itertools.product(FLOATS, FLOATS)))
def test_rounding_is_said_if_and_only_if_a_value_changes(stored: torch.dtype, kept: torch.dtype) -> None:
    values = values_of(stored)
    changes = not torch.equal(values.to(kept).to(torch.float64), values.to(torch.float64))
    wanted = f"exp_avg: {dtype_name(stored)} to {dtype_name(kept)}" if changes else None
    assert describe_rounding("exp_avg", stored, kept, scaled=False) == wanted


def test_strict_dtypes_refuse_any_rounding() -> None:
    roundings = ["param: b", None, "exp_avg: a", "param: b"]
    refuse_rounding(lone_trainer(torch.nn.Module(), None), roundings)
    strict = lone_trainer(torch.nn.Module(), None, strict_dtypes=True)
    refuse_rounding(strict, [None, None])
    with pytest.raises(CheckpointMismatchError, match=r"^strict_dtypes is set, .* round values: exp_avg: a, param: b;"):
        refuse_rounding(strict, roundings)


def test_a_missing_tensor_is_named_with_its_region() -> None:
    text = str(not_there(WANTED))
    assert text.startswith("model/own.pt: tensor a.weight: wanted global shape [2, 3], found no such tensor in the ")
    assert "skip_frozen" not in text
    assert str(not_there(WANTED, could_be_skipped=True)).endswith("were saved, set skip_frozen=True")


@pytest.mark.parametrize(
    ("how", "expert", "etp", "wanted"),
    [
        ("read", False, 1, ()),
        ("read", True, 2, ()),
        ("broadcast", False, 1, (0, 1)),
        ("broadcast", False, 2, (0, 1)),
        ("broadcast", True, 1, (0, 1)),  # experts that are cut as dense tensors are
        ("broadcast", True, 2, (0, 2, 4)),
    ],
)
def test_replicas(how: str, expert: bool, etp: int, wanted: tuple[int, ...]) -> None:
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(load_replicas=how),
        replicas=Replicas((0, 1), (0, 2, 4)),
        topology=Topology(world_size=8, etp=etp),
    )
    assert replicas_of(trainer, expert) == wanted


def test_what_is_located_is_what_is_read(tmp_path: Path) -> None:
    """The whole way with a real checkpoint: a bf16 tensor into fp32."""
    tensor = torch.arange(6).view(2, 3).to(torch.bfloat16)
    locator = locator_of(checkpoint(tmp_path / "actor", {MODEL_FILE: [shard("a.weight", tensor)]}))
    found = locator.find(WANTED)
    assert found is not None
    fill = plan_fill(WANTED, torch.float32, found, lambda: torch.zeros(2, 3))
    assert (fill.dtype, fill.rounding, [read.stored.file for read in fill.reads]) == (
        torch.bfloat16,
        None,
        [MODEL_FILE],
    )
