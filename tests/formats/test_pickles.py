"""Foreign pickles open as data, or not at all."""

import argparse
import os
import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.enums import ModelType
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.foreign_pickles import load_metadata, load_safely


class Hostile:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_what_megatron_stores(tmp_path: Path) -> None:
    state = {"args": argparse.Namespace(lr=0.1), "np": np.random.get_state(), "tensor": torch.arange(3)}
    torch.save(state, tmp_path / "common.pt")
    loaded = load_safely(tmp_path / "common.pt", "common.pt")
    assert loaded["args"].lr == 0.1
    assert np.array_equal(loaded["np"][1], np.random.get_state()[1])
    assert torch.equal(loaded["tensor"], torch.arange(3))


def test_code_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    torch.save({"args": Hostile(trace)}, tmp_path / "common.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(trace)))
    with pytest.raises(CheckpointCorruptError, match=r"common\.pt: .*holds more than data"):
        load_safely(tmp_path / "common.pt", "common.pt")
    with pytest.raises(CheckpointCorruptError, match=r"\.metadata: .*mkdir does not belong"):
        load_metadata(tmp_path / ".metadata")
    assert not trace.exists()
    assert pickle.loads(pickle.dumps(Hostile(trace))) is None
    assert trace.exists(), "the payload is not hostile: this test tests nothing"


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.load", "torch.serialization.load"])
def test_classes_that_do_not_belong(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(CheckpointCorruptError, match=attribute):
        load_metadata(tmp_path / ".metadata")


def test_metadata_of_torch(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, None, {})))
    assert load_metadata(tmp_path / ".metadata") == Metadata({}, None, {})


@pytest.mark.parametrize("data", [b"", b"not a pickle", b"\x80\x04"])
def test_damaged(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="file"):
        load_metadata(tmp_path / "file")
    with pytest.raises(CheckpointCorruptError, match="file"):
        load_safely(tmp_path / "file", "file")
    with pytest.raises(CheckpointCorruptError, match="missing"):
        load_safely(tmp_path / "missing", "missing")


class OldPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_enums_of_the_first_releases_of_python_3_11(tmp_path: Path) -> None:
    metadata = Metadata({"weight": TensorProperties(memory_format=torch.channels_last)}, None, {})  # type: ignore[dict-item]
    with (tmp_path / ".metadata").open("wb") as file:
        OldPickler(file).dump(metadata)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert load_metadata(tmp_path / ".metadata") == metadata

    pickling = SimpleNamespace(__name__="pickle", Pickler=OldPickler)
    torch.save({"model_type": ModelType.encoder_or_decoder}, tmp_path / "common.pt", pickling)
    assert load_safely(tmp_path / "common.pt", "common.pt") == {"model_type": ModelType.encoder_or_decoder}


@pytest.mark.parametrize(("of", "name"), [(OrderedDict, "fromkeys"), (ModelType, "__class__"), (ModelType, "mro")])
def test_other_attributes_are_not_taken(of: type, name: str, tmp_path: Path) -> None:
    class Attribute:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (of, name)

    torch.save(Attribute(), tmp_path / "common.pt")
    with pytest.raises(CheckpointCorruptError, match="an attribute of something that is not an enum"):
        load_safely(tmp_path / "common.pt", "common.pt")


def test_paths_of_python_3_13(tmp_path: Path) -> None:
    meta = StorageMeta(checkpoint_id=tmp_path)
    pickled = pickle.dumps(Metadata({}, None, {}, storage_meta=meta), protocol=2)
    newer = pickled.replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")
    assert newer != pickled
    (tmp_path / ".metadata").write_bytes(newer)
    assert load_metadata(tmp_path / ".metadata").storage_meta == meta
