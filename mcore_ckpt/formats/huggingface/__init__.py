"""Reads and writes folders of HuggingFace models: safetensors weights, configuration and tokenizer files."""
