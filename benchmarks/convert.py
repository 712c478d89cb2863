"""Compares converting a model in block FP8 with a raw copy of its files, and measures the memory of the conversion.

    python benchmarks/convert.py [--gigabytes 8] [--pairs 9] [--folder DIR] [--json]

The folder has the tensors of a Qwen3 as such models are published: linear layers in float8 with a float32 scale for
each 128 x 128 block, filled with random bytes. The checkpoint has the weights in bfloat16, so it is nearly twice as
large as the raw copy. Before each measurement the files to read are dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from measuring import Contender, Findings, common_arguments, compare, peak_memory, reset_peak_memory, run
from references import deleting, drop_caches, extra_memory, quickest_raw_copy
from synthetic_checkpoint import qwen3_of_size

from mcore_ckpt.formats.huggingface.export_plan import FileTensor, QuantizedPart
from mcore_ckpt.formats.huggingface.fp8_blocks import CODES, Fp8Blocks
from mcore_ckpt.formats.huggingface.safetensors_files import encode_header, encode_index, file_name
from mcore_ckpt.models.mapping import HfTensor, hf_tensors
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.ranks.meeting import single_process_agreement
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.convert.to_native import convert_to_native

CHILD = "convert.print_peak_memory"
FILE_BYTES = 4_000_000_000
TILE_BYTES = 64 << 20


def main() -> None:
    parser = common_arguments(__doc__)
    parser.set_defaults(ranks=1, gigabytes=8.0)
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    source = write_folder(arguments.folder / "source", arguments.gigabytes)
    files = sorted(source.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    findings.facts["bytes"] = nbytes
    extra = extra_memory(CHILD, source, arguments.folder / "child", "")
    findings.at_most("extra memory", extra / 1e6, 1000, "MB")
    copying = quickest_raw_copy(files, arguments.folder / "raw", source, findings)
    found = compare(converting(source, arguments.folder / "converted"), copying, arguments.pairs, nbytes)
    findings.comparisons.append(found)
    findings.at_least(f"{found.what} / {found.reference}, speed", found.ratio, 0.5)


def write_folder(folder: Path, gigabytes: float) -> Path:
    """Writes the model and returns its folder."""
    folder.mkdir(parents=True)
    # The config's size is that in bfloat16.
    config = qwen3_of_size(2 * gigabytes)
    blocks = Fp8Blocks()
    tensors = list(hf_tensors(model_from_config(config)))
    config["quantization_config"] = blocks.config(tensor for tensor in tensors if not blocks.takes(tensor))
    (folder / "config.json").write_text(json.dumps(config))
    parts = list(_in_files([each for tensor in tensors for each in _stored(tensor, blocks)]))
    where = {}
    for number, part in enumerate(parts):
        name = file_name(number, len(parts))
        where |= {each.name: name for each in part}
        with (folder / name).open("wb") as file:
            file.write(encode_header((each.name, each.dtype, each.shape) for each in part))
            for each in part:
                for start in range(0, each.nbytes, TILE_BYTES):
                    file.write(_random(each.dtype)[: each.nbytes - start])
    (folder / "model.safetensors.index.json").write_bytes(encode_index(where, 0))
    return folder


def _stored(tensor: HfTensor, blocks: Fp8Blocks) -> list[FileTensor]:
    if not blocks.takes(tensor):
        return [FileTensor(tensor, torch.bfloat16)]
    codes, scales = (QuantizedPart(blocks, is_scales, torch.bfloat16) for is_scales in (False, True))
    return [FileTensor(tensor, torch.float32, scales), FileTensor(tensor, CODES, codes)]


def _in_files(tensors: list[FileTensor]) -> Iterator[list[FileTensor]]:
    part: list[FileTensor] = []
    for tensor in tensors:
        if part and sum(each.nbytes for each in part) + tensor.nbytes > FILE_BYTES:
            yield part
            part = []
        part.append(tensor)
    yield part


@cache
def _random(dtype: torch.dtype) -> memoryview:
    """Returns TILE_BYTES of numbers."""
    if dtype == CODES:
        # Codes above are negative, but for the two that are NaN.
        values = torch.randint(0, 127, (TILE_BYTES,), dtype=torch.uint8)
    else:
        values = torch.empty(TILE_BYTES // dtype.itemsize, dtype=dtype).uniform_(0.001, 0.02)
    return memoryview(values.view(torch.uint8).numpy())


def converting(source: Path, target: Path) -> Contender:
    return Contender(
        "convert", lambda: convert(source, target), before=lambda: drop_caches(source), after=deleting(target)
    )


def convert(source: Path, target: Path) -> None:
    convert_to_native(source, target, WantedLayout(tp=2, pp=2), single_process_agreement("convert", 3600.0))


def print_peak_memory(source: str, target: str, name: str) -> None:
    before = reset_peak_memory()
    convert(Path(source), Path(target))
    print(peak_memory() - before)


if __name__ == "__main__":
    main()
