"""Limits on the sizes of files that are read whole.

A damaged or forged file can have any size, so a file above its limit is refused before memory is allocated for it. All
sizes are in bytes. A manifest has about 200 bytes per file and per tensor. An index has about 500 bytes per tensor, and
11 per MiB of payload. A pickle has about 300 bytes per tensor.
"""

from __future__ import annotations

MANIFEST_BYTES = 128 << 20
# How many tensors the files of a manifest can list together. A reader's table of these tensors takes 4 bytes per
# tensor, and 20 while the table is being built.
MANIFEST_HELD = 100_000_000
INDEX_BYTES = 256 << 20
DIRECTORY_BYTES = 256 << 20
PICKLE_BYTES = 1 << 30
# `common.pt`, random number generator states and the trainer's extra state. A save refuses to write larger files.
PLAIN_BYTES = 4 << 30
# The files of one part of a step on one rank. Each file takes about 150 bytes of the manifest.
PART_FILES = 10_000
PART_RANKS = 1 << 20
# config.json and the index of HuggingFace weights.
HF_JSON_BYTES = 256 << 20
# Tokenizers and other files that are copied with HuggingFace weights: the size of one, the size of all, and how many.
HF_ASSET_BYTES = 128 << 20
HF_ASSETS_BYTES = 256 << 20
HF_ASSETS = 10_000
# The tracker, owner files and lock files.
SMALL_BYTES = 4096
