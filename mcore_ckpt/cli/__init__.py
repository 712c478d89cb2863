"""The `mcore-ckpt` command."""


class UsageError(Exception):
    """The arguments cannot be used as they are: exit status 2."""
