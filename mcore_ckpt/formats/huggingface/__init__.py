"""Folders of HuggingFace models: safetensors weights, configuration and tokenizer files."""
