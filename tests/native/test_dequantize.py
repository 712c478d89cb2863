"""The values of quantized weights, held against torch: each code's value times the scale of its block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.io import _native

POISON = -12345.0


def call(
    codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, /, **arguments: int
) -> None:
    bits = 4 if len(table) == 16 else 8
    _native.dequantize(
        **{  # type: ignore[arg-type]
            "codes": codes.data_ptr(),
            "row_bytes": codes.stride(0),
            "bits": bits,
            "rows": codes.shape[0],
            "columns": codes.shape[1] * 8 // bits,
            "first_row": 0,
            "first_column": 0,
            "table": table.data_ptr(),
            "scales": scales.data_ptr(),
            "scale_rows": scales.shape[0],
            "row_scales": scales.shape[1],
            "block_rows": 1,
            "block_columns": 1,
            "values": values.data_ptr(),
            "row_elements": values.stride(0),
            "bfloat16": values.dtype == torch.bfloat16,
            "threads": 2,
            **arguments,
        }
    )


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes.long()
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).long()


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(1, 70),
    nbytes=st.integers(1, 150),
    block=st.tuples(st.sampled_from([1, 3, 33, 64, 200]), st.sampled_from([1, 2, 32, 64, 100, 400])),
    start=st.tuples(st.integers(0, 40), st.integers(0, 100)),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_each_code_is_multiplied_by_the_scale_of_its_block(
    rows: int,
    nbytes: int,
    block: tuple[int, int],
    start: tuple[int, int],
    bits: int,
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = nbytes * 8 // bits
    codes = torch.randint(0, 256, (rows, nbytes + 3), dtype=torch.uint8, generator=generator)[:, :nbytes]
    table = torch.randn(2**bits, generator=generator) * 100
    grid = [-(-(at + length) // size) for at, length, size in zip(start, (rows, columns), block, strict=True)]
    scales = torch.randn(*grid, generator=generator)
    memory = torch.full((rows, columns + 5), POISON, dtype=dtype)
    call(
        codes,
        table,
        scales,
        memory[:, :columns],
        columns=columns,
        first_row=start[0],
        first_column=start[1],
        block_rows=block[0],
        block_columns=block[1],
        threads=threads,
    )
    of_rows = (start[0] + torch.arange(rows)) // block[0]
    of_columns = (start[1] + torch.arange(columns)) // block[1]
    wanted = (table[unpacked(codes, bits)] * scales[of_rows][:, of_columns]).to(dtype)
    assert torch.equal(memory[:, :columns], wanted)
    assert (memory[:, columns:] == POISON).all()


@pytest.mark.parametrize("columns", [1, 256], ids=["by product", "by table"])
def test_special_values_are_rounded_as_torch_rounds_them(columns: int) -> None:
    """Each 32-bit pattern of a sample as a value: ties, subnormals, infinities and NaN."""
    patterns = [
        upper << 16 | lower for upper in range(0, 1 << 16, 7) for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    ]
    floats = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    floats = torch.cat((floats, torch.tensor([torch.inf, -torch.inf, torch.nan])))
    codes, one = torch.zeros(1, columns, dtype=torch.uint8), torch.ones(1, 1)
    table, values = torch.zeros(256), torch.zeros(1, columns, dtype=torch.bfloat16)
    for chunk in floats.split(256) if columns == 256 else floats[::97].split(1):
        table[: len(chunk)] = chunk
        codes[0, : len(chunk)] = torch.arange(len(chunk))
        call(codes, table, one, values, block_columns=columns)
        found, wanted = values[0, : len(chunk)], chunk.to(torch.bfloat16)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num().view(torch.int16), wanted.nan_to_num().view(torch.int16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 5}, "bits"),
        ({"block_rows": 0}, "block"),
        ({"block_columns": 0}, "block"),
        ({"threads": 0}, "threads"),
        ({"codes": 0}, "null"),
        ({"values": 0}, "null"),
        ({"row_bytes": 3}, "rows of codes overlap"),
        ({"row_elements": 3}, "rows of values overlap"),
        ({"first_column": 1}, "columns without scales"),
        ({"first_row": 1}, "rows without scales"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    values = torch.full((2, 4), POISON)
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(256), torch.zeros(2, 4), values, **arguments)
    assert (values == POISON).all()
