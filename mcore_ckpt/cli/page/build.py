"""Builds the page of `mcore-ckpt inspect --html`: one file that contains style, scripts and data.

The page needs no network. The template is in the same folder. Scripts share one scope, in the order of `SCRIPTS`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

# Each page begins with this text, and other files do not.
_TITLE = b"<title>mcore_ckpt</title>"
_HEAD_BYTES = 2048
SCRIPTS = (
    "format.js",
    "geometry.js",
    "checkpoint.js",
    "widgets.js",
    "tensors.js",
    "ranks.js",
    "timeline.js",
    "files.js",
    "differences.js",
    "main.js",
)


def build_page(data: Mapping[str, Any]) -> bytes:
    """Returns the page that shows `data` (`Overview.to_json` in `tools/examine/overview.py`).

    The data are compressed and in base 64, so no name in a checkpoint can close the HTML element that holds the data.
    The page puts names into text nodes only. A policy in the page's head forbids loading anything and running any other
    script.
    """
    style, script = _part("page.css"), f"(() => {{\n'use strict';\n{''.join(map(_part, SCRIPTS))}}})();\n"
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)
    page = Template(_part("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        style=style,
        script=script,
        data=base64.b64encode(packed).decode(),
    )
    return page.encode()


def is_page(path: Path) -> bool:
    """Returns True if a file is a page of this command. Raises OSError."""
    with path.open("rb") as file:
        return _TITLE in file.read(_HEAD_BYTES)


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
