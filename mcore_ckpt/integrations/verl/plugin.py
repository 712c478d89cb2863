"""verl imports this when it is imported itself (entry point `verl.plugins`).

Nothing comes of it but where VERL_ENGINE_VENDOR asks for our engines: they take seconds to import.
"""

from __future__ import annotations

import os

from mcore_ckpt.integrations.verl.vendor import VENDOR

if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    from mcore_ckpt.integrations.verl import engines  # noqa: F401  (registers them)
