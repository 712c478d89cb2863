"""Shows pickled events to WandbListener in a real run without network, and writes the rows of the run's file as JSON.

python wandb_run.py <folder>     reads <folder>/events, writes <folder>/rows

A process of its own, because wandb is installed beside the environment and starts a service.
"""

import json
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

from mcore_ckpt.integrations.listeners import WandbListener

# The run's file has the form of LevelDB's log: blocks with records, of which each has a header with CRC, length, type.
FILE_HEADER, BLOCK, RECORD_HEADER = 7, 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4


def records(data: bytes) -> Iterator[bytes]:
    parts, at = [], FILE_HEADER
    while at < len(data):
        if BLOCK - at % BLOCK < RECORD_HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size
        parts.append(data[at : at + length])
        at += length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def rows(file: Path) -> Iterator[dict[str, Any]]:
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def main(folder: Path) -> None:
    settings = wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True)
    run = wandb.init(mode="offline", dir=str(folder), project="mcore_ckpt", settings=settings)
    listener = WandbListener()
    for number, event in enumerate(pickle.loads((folder / "events").read_bytes())):
        listener(event)
        run.log({"loss": 1.0}, step=number)  # as a trainer does, with its own count
    run.finish()
    wandb.teardown()  # only now the service has written all
    (file,) = folder.rglob("*.wandb")
    (folder / "rows").write_text(json.dumps(list(rows(file))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
