"""One load: choose a checkpoint, find its bytes, check that it fits, fill the live tensors."""
