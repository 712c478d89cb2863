"""Quantizes weights to float8 with a scale for each block, the form in which DeepSeek-V3 is published.

A weight `X` becomes `X` in float8_e4m3fn and `X_scale_inv`. A value is approximately its code times the scale of its
block.

The fields of the model's `quantization_config` decide the blocks, the form of the scales and which modules are left
out. In all other modules, the weights that have the names of linear layers are quantized.

The codes and the scales of a weight are two tensors. Computing either tensor needs whole rows of blocks, so the source
is read twice. Keeping the scales from the first reading would be possible only if one process wrote all files.

The largest value of a block gets the largest code (if scales are powers of two: a code above half of the largest code).
So a published model that is dequantized and quantized again gets the same codes bit for bit, and the same scales within
the rounding of bfloat16. Adapters that the same command merges are added first, and the sum is rounded to the model's
dtype. So the result is the same as if the merged model were quantized later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.huggingface.quantized import DEFAULT_BLOCK, is_block
from mcore_ckpt.io.json_fields import shown
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.mapping import HfTensor
from mcore_ckpt.models.quantization import quantization_of
from mcore_ckpt.models.table import HF_EMBEDDING
from mcore_ckpt.sharding.regions import Shape

SCALE_SUFFIX = "_scale_inv"
CODES = torch.float8_e4m3fn
_LARGEST = torch.finfo(CODES).max
# The limit for the rows and the columns of a block. It bounds memory, because each block is padded to its whole size
# before quantization.
_LARGEST_BLOCK = 1 << 16

# The linear layers of attention and experts, by the ends of their HuggingFace names. Publishers quantize neither the
# matrix of multi-token prediction (eh_proj) nor the matrix that weighs the heads of a sparse attention's indexer
# (weights_proj).
_LINEAR = re.compile(r".*\.layers\.\d+\..*\b(?!eh_proj|weights_proj)(\w+_proj|kv_a_proj_with_mqa|w[123])\.weight")


@dataclass(frozen=True)
class Fp8Blocks:
    """Says which weights are quantized, and how.

    Attributes:
        block: the rows and columns that share a scale. Blocks at the edges of a weight are smaller.
        powers_of_two: True if scales are powers of two, stored as float8_e8m0fnu. False if scales are arbitrary
            numbers, stored as float32.
        kept: names of modules that are not quantized, as in `modules_to_not_convert` of a `config.json`.
        fields: the `quantization_config` of the published model; empty if there is none.
    """

    block: tuple[int, int] = DEFAULT_BLOCK
    powers_of_two: bool = False
    kept: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def like(config: HfConfig) -> Fp8Blocks:
        """Returns the form in `config.json` if the model was published with float8 blocks, otherwise the default form.

        Raises UnsupportedError if `config.json` describes another form of quantization.
        """
        published = quantization_of(config)
        if published is None or published.method != "fp8":
            return Fp8Blocks()
        fields = published.fields
        block = fields.get("weight_block_size") or DEFAULT_BLOCK
        kept = fields.get("modules_to_not_convert") or fields.get("ignored_layers") or []
        if not is_block(block) or max(block) > _LARGEST_BLOCK:
            raise UnsupportedError(
                f"config.json: weight_block_size is {shown(block)}, but must be two positive integers of at most "
                f"{_LARGEST_BLOCK}"
            )
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise UnsupportedError(f"config.json: modules_to_not_convert is {shown(kept)}, but must be a list of names")
        return Fp8Blocks((block[0], block[1]), fields.get("scale_fmt") == "ue8m0", tuple(kept), fields)

    def takes(self, tensor: HfTensor) -> bool:
        """Returns True if an export in this form quantizes a tensor.

        Raises UnsupportedError for experts that are stacked in one tensor, because no published model has quantized
        experts in this form.
        """
        if len(tensor.shape) == 3 and ".experts." in tensor.name:
            raise UnsupportedError(
                f"tensor {tensor.name}: block FP8 has no form for experts that are stacked in one tensor: merge "
                "without --quantize"
            )
        module = tensor.name.removesuffix(".weight")
        return (
            len(tensor.shape) == 2
            and _LINEAR.fullmatch(tensor.name) is not None
            and not any(module.startswith((name, f"{name}.")) or module.endswith(name) for name in self.kept)
        )

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Returns the rows and columns of the scales of a weight."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of the scales."""
        return torch.float8_e8m0fnu if self.powers_of_two else torch.float32

    def config(self, plain: Iterable[HfTensor]) -> dict[str, Any]:
        """Returns the `quantization_config` of a model. `plain` are the model's tensors that are not quantized."""
        matrices = (each.name for each in plain if len(each.shape) == 2 and each.name != HF_EMBEDDING)
        own = {name.removesuffix(".weight") for name in matrices}
        kept = [*self.kept, *sorted(own - {*self.kept})]
        fields = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            **{name: value for name, value in self.fields.items() if name != "ignored_layers"},
            "weight_block_size": list(self.block),
        }
        return fields | ({"modules_to_not_convert": kept} if kept else {})

    def quantize(self, values: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes whole blocks of a weight.

        The beginning of this module says which code the largest value of a block gets.

        Args:
            values: a matrix of any floating-point dtype. Its first element is the first element of a block.

        Returns:
            The codes, of the shape of `values`, and the scales of its blocks.

        Raises CheckpointMismatchError: a value is NaN or infinite.
        """
        (rows, columns), (height, width) = values.shape, self.block
        grid = self.grid((rows, columns))
        padded = pad(values.to(torch.float32), (0, grid[1] * width - columns, 0, grid[0] * height - rows))
        blocks = padded.view(grid[0], height, grid[1], width)
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=(1, 3))
        if not largest.isfinite().all():
            raise CheckpointMismatchError(
                f"tensor {name}: has a value that is NaN or infinite, which cannot be quantized: merge without "
                "--quantize, or use an older checkpoint"
            )
        # In a block of zeros, the largest value is 0. A scale of 0 could not divide, so such a block gets the scale 1.
        scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
        # A scale below the normal numbers of float32 would have too few digits, and a power of two below them would
        # have no exponent.
        scales = scales.clamp_(min=torch.finfo(torch.float32).tiny)
        if self.powers_of_two:
            scales = torch.exp2(scales.log2().ceil())
        codes = (blocks / scales[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(CODES)
        return codes.view(padded.shape)[:rows, :columns].contiguous(), scales.to(self.scale_dtype)
