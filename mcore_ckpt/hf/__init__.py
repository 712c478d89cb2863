"""HuggingFace <-> mcore."""
