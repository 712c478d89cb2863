"""Ready-made listeners, which bring the events of a CheckpointManager to logs, dashboards and traces.

    CheckpointConfig(listeners=[LoggingListener(), PrometheusListener("/var/lib/node_exporter")])

A listener's package is imported when the listener is made, so only the packages that are used must be installed.
docs/monitoring.md says what each listener writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.integrations.listeners.logging import LoggingListener
    from mcore_ckpt.integrations.listeners.opentelemetry import OpenTelemetryListener
    from mcore_ckpt.integrations.listeners.prometheus import PrometheusListener
    from mcore_ckpt.integrations.listeners.tensorboard import TensorBoardListener
    from mcore_ckpt.integrations.listeners.wandb import WandbListener

__all__ = ["LoggingListener", "OpenTelemetryListener", "PrometheusListener", "TensorBoardListener", "WandbListener"]

__getattr__ = lazy_names(
    __name__,
    {
        "logging": ("LoggingListener",),
        "opentelemetry": ("OpenTelemetryListener",),
        "prometheus": ("PrometheusListener",),
        "tensorboard": ("TensorBoardListener",),
        "wandb": ("WandbListener",),
    },
)
