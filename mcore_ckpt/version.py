"""The version of the package. pyproject.toml and `mcore_ckpt.__version__` read this number."""

__version__ = "0.1.0"
