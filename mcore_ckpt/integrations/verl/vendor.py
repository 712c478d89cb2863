"""The name by which verl's registry of engines knows ours."""

VENDOR = "mcore_ckpt"
