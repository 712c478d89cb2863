"""Imports the stand-in of slime or miles, and forgets it afterwards.

Where SLIME_SOURCE or MILES_SOURCE names a checkout, its own data source and samples are taken, with a stand-in for the
data set.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def imported(fork: str, patched: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, `import slime` finds the stand-in, and our modules that derive from its classes are fresh."""
    patched.syspath_prepend(Path(__file__).parent / f"{fork}_stand_in")
    if source := os.environ.get(f"{fork.upper()}_SOURCE"):
        _take_real_modules(fork, Path(source).expanduser())
    try:
        yield
    finally:
        ours = f"mcore_ckpt.integrations.{fork}.data_source"
        for name in [name for name in sys.modules if name == ours or name.partition(".")[0] == fork]:
            del sys.modules[name]


class Options(Namespace):
    """The fork's arguments. Those that a test does not name are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


def _take_real_modules(fork: str, source: Path) -> None:
    misc, data, processing = (ModuleType(f"{fork}.utils.{name}") for name in ("misc", "data", "processing_utils"))
    misc.load_function = misc.decode_int32_meta_array = None  # type: ignore[attr-defined]
    processing.load_tokenizer = processing.load_processor = lambda *args, **more: None  # type: ignore[attr-defined]
    sys.modules |= {module.__name__: module for module in (misc, data, processing)}
    samples: Any = _real(f"{fork}.utils.types", source)

    class Dataset:
        def __init__(self, *args: Any, **more: Any) -> None:
            self.samples = [samples.Sample() for _ in range(1000)]

        def __len__(self) -> int:
            return len(self.samples)

    data.Dataset = Dataset  # type: ignore[attr-defined]
    _real(f"{fork}.rollout.data_source", source)


def _real(name: str, source: Path) -> ModuleType:
    spec = spec_from_file_location(name, source / f"{name.replace('.', '/')}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
