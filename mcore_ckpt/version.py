"""The version of the package. pyproject.toml and `mcore_ckpt.__version__` read it from here."""

__version__ = "0.1.0"
