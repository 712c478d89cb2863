"""Lets the API reference show the examples of docstrings as code (an extension of griffe).

griffe knows the section only as "Examples:", and takes "Example:" for an admonition, where `>>>` becomes a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Calls the section by the name that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
