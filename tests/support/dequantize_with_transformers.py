"""Loads quantized folders as transformers does without a GPU, and saves them with plain weights.

python dequantize_with_transformers.py DTYPE FOLDER ...

The plain model of FOLDER comes into FOLDER/plain. One process for all folders: importing transformers takes longer.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from transformers.utils import logging

CONFIGS = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config, "compressed-tensors": CompressedTensorsConfig}


def dequantize(folder: Path, dtype: torch.dtype) -> None:
    """Saves the plain model of one folder."""
    config = AutoConfig.from_pretrained(folder)
    wanted = CONFIGS[config.quantization_config["quant_method"]](dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=wanted, output_loading_info=True
    )
    assert not any(info.values()), f"{folder}: {info}"
    # transformers cannot undo the conversion of all forms, so a model that was never quantized is saved.
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder / "plain")


if __name__ == "__main__":
    logging.set_verbosity_error()
    for each in sys.argv[2:]:
        dequantize(Path(each), getattr(torch, sys.argv[1]))
