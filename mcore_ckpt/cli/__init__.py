"""The `mcore-ckpt` command."""
