"""Loads folders with whatever transformers is on the path, and prints what came of each as one JSON object per line.

python load_with_transformers.py FOLDER ...
"""

import json
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

PROMPT = "def f(x):"


def main(folder: str) -> None:
    is_value = AutoConfig.from_pretrained(folder).architectures[0].endswith("ForTokenClassification")
    auto = AutoModelForTokenClassification if is_value else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        logits = model(torch.randint(3, 131, (2, 16))).logits
    result = {
        "version": transformers.__version__,
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "wrong": {what: sorted(map(str, names)) for what, names in info.items() if names},
        "logits": logits.double().flatten().tolist(),
    }
    if not is_value:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
        written = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        result["text"] = tokenizer.decode(written[0])
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(argument)
