"""The version of the package. pyproject.toml and `mcore_ckpt.__version__` have it from here."""

__version__ = "0.1.0"
