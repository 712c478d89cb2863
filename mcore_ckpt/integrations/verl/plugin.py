"""Registers our engines when verl is imported (entry point `verl.plugins`).

The engines are imported only if VERL_ENGINE_VENDOR names them, because their import takes seconds.
"""

from __future__ import annotations

import os

from mcore_ckpt.integrations.verl.vendor import VENDOR

if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    from mcore_ckpt.integrations.verl import engines  # noqa: F401  (the import registers them)
