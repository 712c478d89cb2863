"""Loads folders with whatever transformers is on the path, and prints what came of each as one JSON object per line.

python load_with_transformers.py FOLDER ...

One process for all of them: importing transformers takes longer than the tiny models. A folder that cannot be loaded
has an "error" in its line, and the others are loaded nevertheless.
"""

import json
import logging
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

PROMPT = "def f(x):"
SPECIAL = ("<|end|>", "<|turn|>")
NEW_TOKENS = 4


class Warnings(logging.Handler):
    """What transformers complains of, such as weights that it has made up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def load(folder: Path) -> dict[str, Any]:
    """What one folder's model is, and what it computes."""
    config = AutoConfig.from_pretrained(folder)
    # With all defaults, as the class of this version has them: before the model changes anything.
    read = json.loads(config.to_json_string(use_diff=False))
    # Qwen2_5_VLConfig of 4.57 hides its own field behind that of its text_config, which has none.
    is_value = (config.architectures or [""])[0].endswith("ForTokenClassification")
    auto = AutoModelForTokenClassification if is_value else AutoModelForCausalLM
    has_tower = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if has_tower else auto
    model, info = auto.from_pretrained(folder, dtype="auto", output_loading_info=True, attn_implementation="eager")
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        # The tokens behind stand for images in vision-language models.
        logits = model(torch.randint(3, 127 if has_tower else 131, (2, 16))).logits
    different, absent = compare(model, folder)
    rotary = getattr(model.model.language_model if has_tower else model.model, "rotary_emb", None)
    return {
        "config": read,
        "class": type(model).__name__,
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "wrong": {what: sorted(map(str, names)) for what, names in info.items() if names},
        "different": different,
        "absent": absent,
        "inv_freq": [] if rotary is None else rotary.inv_freq.double().tolist(),
        "attention_scaling": None if rotary is None else rotary.attention_scaling,
        "logits": logits.double().flatten().tolist(),
        "written": None if is_value else generate(model, folder),
    }


def compare(model: Any, folder: Path) -> tuple[list[str], list[str]]:
    """The file's tensors that are not bit for bit in the model, and those that it has not under this name."""
    inside = model.state_dict()
    files = {
        # What Nemotron-H's files call "backbone", transformers 5 calls "model" in memory.
        re.sub(r"^backbone\.", "model.", name): tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    if hasattr(model.config, "vision_config"):
        # transformers cuts and turns some tensors of Kimi-K2.5's tower. It tells which ones it lacks.
        of_kimi = ("vision_tower.", "mm_projector.")
        files = {name_inside(name): tensor for name, tensor in files.items() if not name.startswith(of_kimi)}
    different = [name for name, tensor in files.items() if name in inside and not same(inside[name], tensor)]
    return sorted(different), sorted(files.keys() - inside.keys())


def name_inside(name: str) -> str:
    """The name that a tensor of a vision-language model has in memory. Qwen2.5-VL's files have the first names."""
    if name.startswith("language_model."):  # Kimi-K2.5
        return name.replace("language_model.model.", "model.language_model.").removeprefix("language_model.")
    if name.startswith("visual."):
        return f"model.{name}"
    is_first = name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual."))
    return name.replace("model.", "model.language_model.", 1) if is_first else name


def same(inside: torch.Tensor, stored: torch.Tensor) -> bool:
    # transformers 5 turns the stacked experts of Qwen3-VL-MoE.
    return torch.equal(inside, stored.transpose(1, 2) if stored.dim() == 3 and inside.shape != stored.shape else stored)


def generate(model: Any, folder: Path) -> dict[str, Any]:
    """What the model writes after a prompt, with the tokenizer beside it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        # The end of a text must not be what ends a test of generating.
        lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        # Only tokens of bytes have a text of their own.
        others = list(range(256, model.config.get_text_config().vocab_size))
        written = model.generate(**inputs, **lengths, do_sample=False, pad_token_id=0, suppress_tokens=others)
    special = tokenizer(f"a{SPECIAL[0]}{SPECIAL[1]}b")["input_ids"]
    return {"tokens": written[0].tolist(), "text": tokenizer.decode(written[0]), "special": special}


def main(folders: list[str]) -> None:
    torch.set_num_threads(1)  # tiny models are slower on more
    transformers_logging.disable_progress_bar()
    warnings = Warnings()
    transformers_logging.get_logger("transformers").addHandler(warnings)
    for folder in folders:
        warnings.messages.clear()
        try:
            result = load(Path(folder))
        except Exception:
            result = {"error": traceback.format_exc()}
        result |= {"version": transformers.__version__, "warnings": list(warnings.messages)}
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
