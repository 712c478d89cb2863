"""Turns events into OpenTelemetry spans and metrics. Needs only opentelemetry-api; the trainer sets up the SDK.

Names follow OpenTelemetry's conventions: metrics and attributes of this package begin with `mcore_ckpt.`, durations
are in seconds and end in `.duration`, sizes are in `By`, failures have `error.type`, and a failed span has the event
`exception`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_ckpt.events import Committed, Deleted, ErrorText, Event, Failed, Loaded, Phase, Skipped, Started, Uploaded

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
except ImportError as error:
    raise ImportError(
        f"OpenTelemetryListener needs opentelemetry-api: pip install opentelemetry-api ({error})"
    ) from error

_SCOPE = "mcore_ckpt"
# Boundaries of buckets. OpenTelemetry's defaults suit milliseconds, but durations here are in seconds.
_SECONDS = (0.001, 0.01, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_BYTES = tuple(float(10**power) for power in range(3, 14))

Attributes = dict[str, str | int | float]


class OpenTelemetryListener:
    """Records metrics, and one span for each save, load, upload and deletion, with a child span for each phase.

    Spans are recorded when the work has ended, with the times at which it began and ended. Each span begins its own
    trace, because a save outlives the trainer's span in which it was called.

    Args:
        tracer_provider: where spans go. None: the global provider, which `opentelemetry.trace.set_tracer_provider`
            sets.
        meter_provider: where metrics go. None: the global provider.

    Example:
        >>> listener = OpenTelemetryListener()
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)

        def duration(name: str, description: str) -> metrics.Histogram:
            return meter.create_histogram(
                f"mcore_ckpt.{name}.duration", "s", description, explicit_bucket_boundaries_advisory=_SECONDS
            )

        def size(name: str, description: str) -> metrics.Histogram:
            return meter.create_histogram(
                f"mcore_ckpt.{name}.size", "By", description, explicit_bucket_boundaries_advisory=_BYTES
            )

        self._durations = {
            "save": duration("save", "Time from the call of a save to its commit or failure."),
            "load": duration("load", "Time from the call of a load to its end."),
            "upload": duration("upload", "How long one try to upload a checkpoint took."),
            "delete": duration("delete", "How long the deletion of an old step took."),
        }
        self._sizes = {
            "save": size("save", "Bytes that this rank wrote in a save."),
            "load": size("load", "Bytes that this rank read in a load."),
            "upload": size("upload", "The size of an uploaded checkpoint's files."),
        }
        self._stall = duration("save.stall", "How long a save held up the training.")
        self._phase = duration("save.phase", "How long one phase of a committed save took.")
        self._active = meter.create_up_down_counter("mcore_ckpt.save.active", "{save}", "Saves that are under way.")
        self._skipped = meter.create_counter("mcore_ckpt.save.skipped", "{save}", "Saves that were skipped.")
        self._step = meter.create_gauge("mcore_ckpt.committed_step", "{step}", "The step that was committed last.")

    def __call__(self, event: Event) -> None:
        """Records one event."""
        common: Attributes = {"mcore_ckpt.role": event.role, "mcore_ckpt.rank": event.rank}
        match event:
            case Started():
                self._active.add(1, common)
            case Committed():
                self._active.add(-1, common)
                self._stall.record(event.stall_s, common)
                self._step.set(event.step or 0, common)
                for phase in event.phases:
                    self._phase.record(phase.seconds, common | {"mcore_ckpt.phase": phase.name})
                self._done("save", event, common)
            case Skipped():
                self._active.add(-1, common)
                self._skipped.add(1, common)
            case Loaded():
                self._done("load", event, common)
            case Uploaded():
                self._done("upload", event, common)
            case Deleted():
                self._done("delete", event, common | {"mcore_ckpt.place": event.place})
            case Failed():
                if event.operation == "save":
                    self._active.add(-1, common)
                self._durations[event.operation].record(event.seconds, common | {"error.type": event.error.type})
                self._span(event.operation, event, common, event.phases, event.error)

    def _done(self, operation: str, event: Committed | Loaded | Uploaded | Deleted, common: Attributes) -> None:
        self._durations[operation].record(event.seconds, common)
        phases = event.phases if isinstance(event, Committed) else ()
        if not isinstance(event, Deleted):
            self._sizes[operation].record(event.nbytes, common)
            common = common | {"mcore_ckpt.size": event.nbytes}
        self._span(operation, event, common, phases)

    def _span(
        self,
        operation: str,
        event: Committed | Loaded | Uploaded | Deleted | Failed,
        attributes: Attributes,
        phases: Sequence[Phase],
        error: ErrorText | None = None,
    ) -> None:
        step: Attributes = {} if event.step is None else {"mcore_ckpt.step": event.step}
        span = self._tracer.start_span(
            f"{operation} checkpoint",
            context=Context(),
            start_time=_nanoseconds(event.time - event.seconds),
            attributes={**attributes, **step, "mcore_ckpt.path": str(event.path)},
        )
        for phase in phases:
            child = self._tracer.start_span(
                phase.name, context=trace.set_span_in_context(span, Context()), start_time=_nanoseconds(phase.start)
            )
            if error is not None and phase is phases[-1]:
                _mark_failed(child, error)
            child.end(_nanoseconds(phase.start + phase.seconds))
        if error is not None:
            _mark_failed(span, error)
            span.add_event("exception", _exception(error), _nanoseconds(event.time))
        span.end(_nanoseconds(event.time))


def _mark_failed(span: trace.Span, error: ErrorText) -> None:
    span.set_attribute("error.type", error.type)
    span.set_status(trace.Status(trace.StatusCode.ERROR, error.message))


def _exception(error: ErrorText) -> Attributes:
    """Returns the attributes that OpenTelemetry's conventions have for an exception."""
    found: Attributes = {"exception.type": error.type, "exception.message": error.message}
    return found | ({"exception.stacktrace": error.stacktrace} if error.stacktrace else {})


def _nanoseconds(moment: float) -> int:
    return round(moment * 1e9)
