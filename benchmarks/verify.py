"""Compares verifying a checkpoint with raw reads of its files.

    python benchmarks/verify.py [--gigabytes 8] [--pairs 9] [--folder DIR] [--json]

Before each measurement the files are dropped from the page cache. The raw reference reads them whole into one warm
buffer and bypasses the page cache.
"""

from __future__ import annotations

import argparse

from measuring import Contender, Findings, common_arguments, compare, peak_memory, reset_peak_memory, run
from references import HostBuffer, best_threads, drop_caches, padded, raw_read
from synthetic_checkpoint import qwen3_of_size, write_checkpoint

from mcore_ckpt.tools.examine.verify import verify_role


def main() -> None:
    parser = common_arguments(__doc__)
    parser.set_defaults(ranks=1, gigabytes=8.0)
    run(parser, __file__, measure)


def measure(arguments: argparse.Namespace, findings: Findings) -> None:
    source = write_checkpoint(arguments.folder / "source", qwen3_of_size(arguments.gigabytes))
    files = sorted(path for path in source.rglob("*.pt") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    findings.facts["bytes"] = sum(sizes)

    def verify() -> None:
        assert not verify_role(source).damages

    drop_caches(source)
    before = reset_peak_memory()
    verify()
    findings.at_most("extra memory of verifying", (peak_memory() - before) / 1e6, 512, "MB")
    buffer = HostBuffer(padded(max(sizes)))
    reading = lambda threads: raw_read(files, buffer, threads, lambda: drop_caches(source))  # noqa: E731
    threads = best_threads(reading, rounds=1)
    findings.facts["raw_read_threads"] = threads
    ours = Contender("verify", verify, before=lambda: drop_caches(source))
    found = compare(ours, reading(threads), arguments.pairs, sum(sizes))
    findings.comparisons.append(found)
    findings.at_least(f"{found.what} / {found.reference}, speed", found.ratio, 0.8)


if __name__ == "__main__":
    main()
