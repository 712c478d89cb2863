"""Describes the demo's model for HuggingFace, and runs the exported model with transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_ckpt.cli.demo.text import SEQUENCE_LENGTH, VOCAB_SIZE, HeldOutText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

PROMPT = "def "
_NEW_TOKENS = 60


@dataclass(frozen=True)
class Generated:
    """Results of transformers with an exported model: the loss on held-out text, and the continued prompt."""

    loss: float
    text: str


def hf_config(num_layers: int = 8) -> Qwen3Config:
    """Returns the transformers config of the model that `training.build_training_state` builds."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=SEQUENCE_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each byte of UTF-8. The token's number is the byte.

    As in GPT-2's and Qwen's tokenizers, the name of each token is a printable character. A byte that is a printable
    character of Latin-1 has that character as its name. The other bytes have the characters from number 256 on, in
    order. With these names, decoding replaces only the bytes that are not UTF-8. With names such as "<0x0A>" (byte
    fallback), one byte that is not UTF-8 would make the whole text unreadable.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = {chr(byte): byte for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, VOCAB_SIZE))}
    others = sorted(set(range(VOCAB_SIZE)) - set(printable.values()))
    vocabulary = printable | {chr(256 + number): byte for number, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def load_and_generate(folder: Path) -> Generated:
    """Loads an exported folder with transformers only, computes the held-out loss, and generates some text.

    Raises:
        ValueError: transformers reports tensors that are missing or unexpected, or have the wrong shapes.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {what: names for what, names in info.items() if names}
    if wrong:
        raise ValueError(f"{folder}: transformers does not find the tensors that it expects: {wrong}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.eval()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), following.flatten())
            for tokens, following in HeldOutText(torch.device("cpu"))
        ]
        prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
        # Sample, because after so few steps of training the likeliest byte is always a space.
        torch.manual_seed(0)
        written = model.generate(**prompt, max_new_tokens=_NEW_TOKENS, do_sample=True, pad_token_id=0)
    return Generated(float(torch.stack(losses).mean()), tokenizer.decode(written[0]))
