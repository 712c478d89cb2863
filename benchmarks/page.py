"""Measures the page of `mcore-ckpt inspect --html` for 10,000 tensors x 64 ranks: making it, its size, opening it.

    python benchmarks/page.py --folder /dev/shm --json result.json

Chromium and its driver must be there (apt-get install chromium chromium-driver). The checkpoint has real indexes, in
sparse files without tensor bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from simulated import Layout, Model, write_checkpoint

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import StageRecord, encode_manifest
from mcore_ckpt.checkpoint.timeline import SaveTimeline
from mcore_ckpt.cli.main import main as mcore_ckpt

TENSORS, HIDDEN = 10_000, 1024
LAYOUT = Layout(tp=4, pp=2, dp=8)
OPENINGS = 9


def write_large(root: Path) -> Path:
    """Writes the checkpoint, with a timeline, and returns the role's folder."""
    model = Model.of_tensors(TENSORS, HIDDEN)
    role_dir = file_names.step_dir(root, 1) / "actor"
    role_dir.mkdir(parents=True)
    manifest = write_checkpoint(role_dir, model, LAYOUT)
    nbytes = [0] * LAYOUT.world
    for file in manifest.files:
        nbytes[file.rank] += file.size
    each = model.layers // LAYOUT.pp
    stages = tuple(StageRecord(pp, 0, tuple(range(pp * each, (pp + 1) * each)), ()) for pp in range(LAYOUT.pp))
    manifest = replace(manifest, stages=stages, save_timeline=_timeline(nbytes))
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return role_dir


def _timeline(nbytes: list[int]) -> SaveTimeline:
    """Returns a timeline of ranks that copy 10 GB and write 2 GB a second."""
    planned = tuple(50_000 - 100 * rank for rank in range(len(nbytes)))
    copied = tuple(start + size // 10_000 for start, size in zip(planned, nbytes, strict=True))
    written = tuple(start + size // 2_000 for start, size in zip(planned, nbytes, strict=True))
    called = (0,) * len(nbytes)
    return SaveTimeline(
        nbytes=tuple(nbytes),
        plan=(called, planned),
        copy=(planned, copied),
        write=(planned, written),
        commit=(written[0], max(written) + 50_000),
        stall=copied,
    )


def measure(folder: Path) -> dict[str, float]:
    """Returns the figures. Times are in seconds."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.support import browser

    role_dir, page = write_large(folder), folder / "page.html"
    start, cpu = time.perf_counter(), time.process_time()
    if mcore_ckpt(["inspect", str(role_dir), "--html", str(page), "--json"]):
        raise SystemExit(1)
    made, used = time.perf_counter() - start, time.process_time() - cpu
    with browser.started(folder / "profile") as driver:
        opened = sorted(browser.opened(driver, page) for _ in range(OPENINGS))
        elements = browser.run(driver, "return document.querySelectorAll('*').length")
    return {
        "tensors": TENSORS,
        "ranks": LAYOUT.world,
        "made_s": made,
        "made_cpu_s": used,
        "page_bytes": page.stat().st_size,
        "opened_s": statistics.median(opened),
        "opened_longest_s": opened[-1],
        "elements": elements,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint (the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder))
    for name, value in found.items():
        print(f"{name}: {value:,.3f}" if isinstance(value, float) else f"{name}: {value:,}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
