"""Loads a folder with whatever transformers is on the path, and prints what came of it as one JSON object.

python load_with_transformers.py FOLDER [PROMPT]
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer


def main(folder: str, prompt: str | None = None) -> None:
    is_value = transformers.AutoConfig.from_pretrained(folder).architectures[0].endswith("ForTokenClassification")
    auto = AutoModelForTokenClassification if is_value else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    model.eval()
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        logits = model(tokens).logits.double()
    result = {
        "version": transformers.__version__,
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "wrong": {what: sorted(map(str, names)) for what, names in info.items() if names},
        "mean": logits.mean().item(),
        "std": logits.std().item(),
    }
    if prompt is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        written = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
        result["text"] = tokenizer.decode(written[0])
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
