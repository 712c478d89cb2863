"""Registers our engines when verl is imported (entry point `verl.plugins`).

It does so only if VERL_ENGINE_VENDOR names them, because importing them takes seconds.
"""

from __future__ import annotations

import os

from mcore_ckpt.integrations.verl.vendor import VENDOR

if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    from mcore_ckpt.integrations.verl import engines  # noqa: F401  (registers them)
