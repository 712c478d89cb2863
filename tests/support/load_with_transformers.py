"""Loads folders with whatever transformers is on the path, and prints what came of each as one JSON object per line.

python load_with_transformers.py FOLDER ...

One process for all of them: importing transformers takes longer than the tiny models. A folder that cannot be loaded
has an "error" in its line, and the others are loaded nevertheless.
"""

import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
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
    is_value = config.architectures[0].endswith("ForTokenClassification")
    auto = AutoModelForTokenClassification if is_value else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, dtype="auto", output_loading_info=True, attn_implementation="eager")
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        logits = model(torch.randint(3, 131, (2, 16))).logits
    different, absent = compare(model, folder)
    rotary = model.model.rotary_emb
    return {
        "config": read,
        "class": type(model).__name__,
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "wrong": {what: sorted(map(str, names)) for what, names in info.items() if names},
        "different": different,
        "absent": absent,
        "inv_freq": rotary.inv_freq.double().tolist(),
        "attention_scaling": rotary.attention_scaling,
        "logits": logits.double().flatten().tolist(),
        "written": None if is_value else generate(model, folder),
    }


def compare(model: Any, folder: Path) -> tuple[list[str], list[str]]:
    """The file's tensors that are not bit for bit in the model, and those that it has not under this name."""
    inside = model.state_dict()
    files = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    different = [name for name, tensor in files.items() if name in inside and not torch.equal(inside[name], tensor)]
    return sorted(different), sorted(files.keys() - inside.keys())


def generate(model: Any, folder: Path) -> dict[str, Any]:
    """What the model writes after a prompt, with the tokenizer beside it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        # The end of a text must not be what ends a test of generating.
        lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        written = model.generate(**inputs, **lengths, do_sample=False, pad_token_id=0)
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
