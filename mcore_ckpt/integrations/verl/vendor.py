"""The name under which verl's registry knows our engines."""

VENDOR = "mcore_ckpt"
