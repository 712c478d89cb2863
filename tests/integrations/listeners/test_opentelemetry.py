"""Spans and metrics, read back from the in-memory exporters of OpenTelemetry's SDK."""

import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from mcore_ckpt import Event, SaveReport
from mcore_ckpt.events import Committed, Failed, Skipped, Started
from mcore_ckpt.integrations.listeners import OpenTelemetryListener
from tests.support.told_events import BAD, DISK_ERROR, GOOD, NEWEST

DOCS = Path(__file__).parents[3] / "docs"
# OpenTelemetry's syntax of an instrument's name.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-/]{0,254}")
UCUM = {"s", "By", "{save}", "{step}"}
COMMON = {"mcore_ckpt.role": "actor", "mcore_ckpt.rank": 0}


class Recorded:
    """What the SDK has recorded of all events."""

    def __init__(self, events: list[Event]) -> None:
        exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(exporter))
        listener = OpenTelemetryListener(tracers, MeterProvider([reader]))
        for event in events:
            listener(event)
        self.spans: tuple[ReadableSpan, ...] = exporter.get_finished_spans()
        data: Any = reader.get_metrics_data()
        (scope,) = data.resource_metrics[0].scope_metrics
        self.scope = scope.scope.name
        self.metrics = {metric.name: metric for metric in scope.metrics}

    def root(self, name: str, step: int, **special: str) -> ReadableSpan:
        wanted = {"step": step, **special}
        attributes = {f"mcore_ckpt.{key}": value for key, value in wanted.items()}.items()
        (found,) = [s for s in self.spans if s.name == name and (s.attributes or {}).items() >= attributes]
        assert found.parent is None
        return found

    def children(self, root: ReadableSpan) -> list[ReadableSpan]:
        found = [s for s in self.spans if s.parent is not None and s.parent.span_id == root.context.span_id]
        assert all(span.context.trace_id == root.context.trace_id for span in found)
        return found

    def points(self, name: str) -> dict[frozenset[tuple[str, Any]], HistogramDataPoint | NumberDataPoint]:
        """The points of a metric by what is special in their attributes."""
        found = {}
        for point in self.metrics[name].data.data_points:
            assert point.attributes.items() >= COMMON.items()
            found[frozenset(point.attributes.items() - COMMON.items())] = point
        return found


@pytest.fixture(scope="module")
def recorded(told: tuple[list[Event], list[SaveReport]]) -> Recorded:
    common = {"step": NEWEST + 1, "role": "actor", "rank": 0, "path": "steps", "time": 1.0}
    skipped = [Started(**common), Skipped(**common, reason="an earlier save is under way", seconds=0.1)]
    return Recorded([*told[0], *skipped])


def the(kind: type[Event], step: int, told: tuple[list[Event], list[SaveReport]]) -> Any:
    (found,) = [event for event in told[0] if type(event) is kind and event.step == step]
    return found


def nanoseconds(moment: float) -> Any:
    return pytest.approx(moment * 1e9, abs=1000)


def test_a_good_save_is_a_span_with_its_phases(recorded: Recorded, told: Any) -> None:
    span, committed = recorded.root("save checkpoint", GOOD), the(Committed, GOOD, told)
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time == nanoseconds(the(Started, GOOD, told).time)
    assert span.end_time == nanoseconds(committed.time)
    assert dict(span.attributes or {}) == {
        **COMMON,
        "mcore_ckpt.step": GOOD,
        "mcore_ckpt.path": str(committed.path),
        "mcore_ckpt.size": committed.nbytes,
    }
    children = recorded.children(span)
    assert [child.name for child in children] == ["wait", "plan", "copy", "write", "commit"]
    for child, phase in zip(children, committed.phases, strict=True):
        assert child.start_time == nanoseconds(phase.start)
        assert child.end_time == nanoseconds(phase.start + phase.seconds)
        assert child.status.status_code is StatusCode.UNSET
    assert span.events == ()


def test_a_failed_save_is_a_span_with_an_error(recorded: Recorded, told: Any) -> None:
    span, failed = recorded.root("save checkpoint", BAD), the(Failed, BAD, told)
    assert span.status.status_code is StatusCode.ERROR
    assert DISK_ERROR in (span.status.description or "")
    assert (span.attributes or {})["error.type"] == "mcore_ckpt.errors.CommitError"
    (exception,) = span.events
    assert exception.name == "exception"
    assert exception.timestamp == span.end_time == nanoseconds(failed.time)
    attributes = exception.attributes or {}
    assert attributes["exception.type"] == "mcore_ckpt.errors.CommitError"
    assert DISK_ERROR in str(attributes["exception.message"])
    assert "Traceback" in str(attributes["exception.stacktrace"])
    *others, last = recorded.children(span)
    assert [child.name for child in others] == ["wait", "plan", "copy"]
    assert {child.status.status_code for child in others} == {StatusCode.UNSET}
    assert (last.name, last.status.status_code) == ("write", StatusCode.ERROR)


def test_loads_uploads_and_deletions_are_spans(recorded: Recorded) -> None:
    deletions = [recorded.root("delete checkpoint", GOOD, place=place) for place in ("local", "remote")]
    others = (("load", NEWEST), ("upload", GOOD), ("upload", NEWEST))
    for span in (*deletions, *(recorded.root(f"{name} checkpoint", step) for name, step in others)):
        assert (span.start_time or 0) < (span.end_time or 0)
        assert not recorded.children(span)
    errors = {span.name for span in recorded.spans if span.status.status_code is StatusCode.ERROR}
    assert errors == {"save checkpoint", "write", "load checkpoint"}


def test_the_metrics_have_names_and_units_of_the_conventions(recorded: Recorded) -> None:
    assert recorded.scope == "mcore_ckpt"
    for name, metric in recorded.metrics.items():
        assert NAME.fullmatch(name)
        assert name.startswith("mcore_ckpt.")
        assert metric.unit in UCUM, name
        assert metric.description
        assert name.endswith(".duration") == (metric.unit == "s")
        assert name.endswith(".size") == (metric.unit == "By")


def test_the_figures_of_the_metrics(recorded: Recorded, told: tuple[list[Event], list[SaveReport]]) -> None:
    reports, good = told[1], frozenset[tuple[str, Any]]()
    failed = frozenset({("error.type", "mcore_ckpt.errors.CommitError")})
    saves: Any = recorded.points("mcore_ckpt.save.duration")
    assert saves.keys() == {good, failed}
    assert (saves[good].count, saves[failed].count) == (2, 1)
    assert saves[good].sum == pytest.approx(sum(report.seconds for report in reports))
    assert max(saves[good].explicit_bounds) >= 1000
    assert min(saves[good].explicit_bounds) <= 0.01
    stall: Any = recorded.points("mcore_ckpt.save.stall.duration")[good]
    assert stall.sum == pytest.approx(sum(report.stall_s for report in reports))
    phases: Any = recorded.points("mcore_ckpt.save.phase.duration")
    assert phases[frozenset({("mcore_ckpt.phase", "write")})].sum == pytest.approx(sum(r.write_s for r in reports))
    sizes: Any = recorded.points("mcore_ckpt.save.size")[good]
    assert sizes.sum == sum(report.nbytes for report in reports)
    active: Any = recorded.points("mcore_ckpt.save.active")[good]
    assert active.value == 0
    skipped: Any = recorded.points("mcore_ckpt.save.skipped")[good]
    assert skipped.value == 1
    step: Any = recorded.points("mcore_ckpt.committed_step")[good]
    assert step.value == NEWEST
    deletions: Any = recorded.points("mcore_ckpt.delete.duration")
    places = [frozenset({("mcore_ckpt.place", place)}) for place in ("local", "remote")]
    assert [deletions[place].count for place in places] == [1, 1]
    for operation, count in (("load", 1), ("upload", 2)):
        point: Any = recorded.points(f"mcore_ckpt.{operation}.duration")[good]
        assert point.count == count
    not_found = frozenset({("error.type", "mcore_ckpt.errors.CheckpointNotFoundError")})
    assert not_found in recorded.points("mcore_ckpt.load.duration")


def test_the_document_lists_exactly_these_metrics(recorded: Recorded) -> None:
    _, _, text = (DOCS / "monitoring.md").read_text().partition("\n## OpenTelemetry\n")
    rows = [
        line.split("|")[1:4] for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `mcore_ckpt.")
    ]
    listed = {
        name: unit.strip(" `") for names, _, unit in rows for name in re.findall(r"`(mcore_ckpt\.[a-z._]+)`", names)
    }
    listed.pop("mcore_ckpt.phase")  # an attribute
    assert listed == {name: metric.unit for name, metric in recorded.metrics.items()}


def test_without_an_sdk_nothing_happens(told: tuple[list[Event], list[SaveReport]]) -> None:
    listener = OpenTelemetryListener()
    for event in told[0]:
        listener(event)
