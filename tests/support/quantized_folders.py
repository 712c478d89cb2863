"""Rewrites HuggingFace folders as models are published: in block FP8, MXFP4, and compressed-tensors' integers.

The values are what they are; only codes and scales of them are stored, as the publishers' own programs do. What the
folder then holds is for transformers to say (tests/formats/test_quantized_folders.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]

_DEQUANTIZE = Path(__file__).with_name("dequantize_with_transformers.py")
_PACKAGES = Path(__file__).parents[2] / ".venv" / "quantized"
needs_accelerate = pytest.mark.skipif(
    not _PACKAGES.is_dir(), reason=f"no accelerate and compressed-tensors in {_PACKAGES}"
)

FP8_MAX = 448.0
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """True for what publishers quantize: matrices of layers, but not those of routers."""
    return tensor.ndim == 2 and ".layers." in name and "proj" in name and name.endswith(".weight")


def fp8(name: str, weight: torch.Tensor, block: tuple[int, int], scales: str = "float32") -> Parts:
    """Codes and one scale for each block. The last blocks of a row or column can be smaller."""
    rows, columns = weight.shape
    codes, found = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), []
    for row in range(0, rows, block[0]):
        for column in range(0, columns, block[1]):
            part = weight[row : row + block[0], column : column + block[1]].float()
            scale = (part.abs().max() / FP8_MAX).clamp(min=1e-12)
            if scales == "float8_e8m0fnu":
                scale = torch.exp2(scale.log2().ceil())
            codes[row : row + block[0], column : column + block[1]] = (part / scale).to(torch.float8_e4m3fn)
            found.append(scale)
    grid = torch.stack(found).view(-(-rows // block[0]), -1)
    return {name: codes, f"{name}_scale_inv": grid.to(getattr(torch, scales))}


def fp8_values(stored: Parts, block: tuple[int, int]) -> Parts:
    """The tensors of a folder in block FP8, with float32 values of those that are quantized."""
    found = {}
    for name, tensor in stored.items():
        if (scales := stored.get(f"{name}_scale_inv")) is not None:
            each = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            found[name] = tensor.float() * each[: tensor.shape[0], : tensor.shape[1]]
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def mxfp4(name: str, weight: torch.Tensor) -> Parts:
    """Two codes in each byte, 32 codes to a power of two. `weight` is [experts, inputs, outputs]."""
    groups = weight.transpose(1, 2).float().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=1e-20) / 6).log2().ceil()
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).to(torch.uint8)}


def int4(name: str, weight: torch.Tensor, group: int = 32) -> Parts:
    """Eight codes in each int32, `group` codes to a scale."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group)
    scales = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).view(rows, columns).to(torch.int32) + 8
    packed = sum(codes[:, at::8] << 4 * at for at in range(8))
    assert isinstance(packed, torch.Tensor)
    shape = torch.tensor([rows, columns])
    return {f"{name}_packed": packed.to(torch.int32), f"{name}_scale": scales, f"{name}_shape": shape}


def int8(name: str, weight: torch.Tensor) -> Parts:
    """One code for each byte, one scale for each row."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    return {name: (weight.float() / scales.float()).round().clamp(-128, 127).to(torch.int8), f"{name}_scale": scales}


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4_CONFIG = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
INT8_CONFIG = compressed("int-quantized", num_bits=8, type="int", strategy="channel")


def publish(
    folder: Path,
    quantize: Callable[[str, torch.Tensor], Parts],
    config: Mapping[str, Any],
    chosen: Callable[[str, torch.Tensor], bool] = is_linear,
) -> Path:
    """Replaces the chosen tensors of a folder by their codes and scales, and says so in `config.json`."""
    file = folder / "model.safetensors"
    tensors: Parts = {}
    for name, tensor in load_file(file).items():
        tensors |= quantize(name, tensor) if chosen(name, tensor) else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(config)}))
    return folder


def dequantize_with_transformers(dtype: str, *folders: Path) -> None:
    """Saves the plain model of each folder in the folder `plain` below it."""
    environment = {**os.environ, "PYTHONPATH": str(_PACKAGES)}
    command = [sys.executable, str(_DEQUANTIZE), dtype, *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
