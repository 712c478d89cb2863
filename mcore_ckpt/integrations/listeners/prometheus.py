"""Writes metrics to a text file that Prometheus's node_exporter reads (its textfile collector).

Training jobs are hard to scrape: they have thousands of processes without fixed ports. A node_exporter runs on each
node already, and reads all files `*.prom` in the folder of `--collector.textfile.directory`.

Each rank writes its own file, so that no two processes write the same file, and a dashboard shows which rank is slow. A
rank has about 30 series. If that is too much for a large job, pass the listener on only one rank of each node.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.events import Committed, Deleted, Event, Failed, Loaded, Skipped, Started, Uploaded

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile
except ImportError as error:
    raise ImportError(f"PrometheusListener needs prometheus_client: pip install prometheus_client ({error})") from error

_DONE, _FAILED, _SKIPPED = "done", "failed", "skipped"


class PrometheusListener:
    """Keeps one text file for each role and rank up to date. Files are replaced as a whole: nobody reads half a file.

    Args:
        directory: the folder that node_exporter reads. It must exist.
        run: the name of the training. It is a label of all metrics and part of the file's name. Two trainings on one
            node need different names.

    Raises:
        InvalidArgumentError: the folder does not exist, or `run` contains a slash.

    Example:
        >>> PrometheusListener("/var/lib/node_exporter", run="llama-8b")  # doctest: +SKIP
    """

    def __init__(self, directory: str | Path, run: str = "") -> None:
        self._directory = Path(directory).expanduser()
        if not self._directory.is_dir():
            raise InvalidArgumentError(
                f"directory {str(directory)!r} is not a folder: make it, and start node_exporter with "
                "--collector.textfile.directory for it"
            )
        if "/" in run:
            raise InvalidArgumentError(f"run is {run!r}: use a name without '/', because it is part of a file's name")
        self._run = run
        self._metrics: dict[tuple[str, int], _Metrics] = {}
        self._lock = threading.Lock()  # managers of several roles may share a listener

    def __call__(self, event: Event) -> None:
        """Updates the metrics, and replaces the file."""
        key = (event.role, event.rank)
        name = "_".join(filter(None, ("mcore_ckpt", self._run, event.role, f"rank{event.rank}")))
        with self._lock:
            if key not in self._metrics:
                self._metrics[key] = _Metrics(self._run, *key)
            metrics = self._metrics[key]
            metrics.update(event)
            write_to_textfile(str(self._directory / f"{name}.prom"), metrics.registry)


class _Metrics:
    """The metrics of one role on one rank, in a separate registry."""

    def __init__(self, run: str, role: str, rank: int) -> None:
        self.registry = CollectorRegistry()
        self._common = {"run": run, "role": role, "rank": str(rank)}
        self._begun: list[int | None] = []  # steps whose saves have begun and not ended
        self._saves = self._counter("saves", "Saves that have ended.", ("outcome",))
        self._under_way = self._gauge("save_under_way", "1 while a save is under way, else 0.")
        self._stall_total = self._counter("save_stall_seconds", "How long saves have held up the training, in all.")
        self._bytes_total = self._counter("save_bytes", "Bytes that this rank has written in committed saves, in all.")
        self._save_s = self._gauge("last_save_seconds", "Time from the call of the last committed save to its commit.")
        self._stall_s = self._gauge("last_save_stall_seconds", "How long the last committed save held up the training.")
        self._phase_s = self._gauge(
            "last_save_phase_seconds", "How long each phase of the last committed save took.", ("phase",)
        )
        self._save_bytes = self._gauge("last_save_bytes", "Bytes that this rank wrote in the last committed save.")
        self._step = self._gauge("last_committed_step", "The step that was committed last.")
        self._committed = self._gauge("last_commit_timestamp_seconds", "When the last checkpoint was committed.")
        self._loads = self._counter("loads", "Loads that have ended.", ("outcome",))
        self._load_s = self._gauge("last_load_seconds", "How long the last successful load took.")
        self._load_bytes = self._gauge("last_load_bytes", "Bytes that this rank read in the last successful load.")
        self._deleted = self._counter("deleted_steps", "Old steps that this rank has deleted.", ("place",))
        self._uploads = self._counter("uploads", "Uploads to the remote store that have ended.", ("outcome",))
        self._upload_s = self._gauge("last_upload_seconds", "How long the last successful upload took.")
        self._upload_bytes = self._gauge("last_upload_bytes", "The size of the checkpoint that was uploaded last.")
        self._uploaded = self._gauge("last_uploaded_step", "The step that was uploaded last.")
        for counter in (self._saves, self._loads, self._uploads):
            # Create the counters now, with the value 0. A counter that begins with 1 would have no increase that an
            # alert could see.
            for outcome in (_DONE, _FAILED):
                counter.labels(**self._common, outcome=outcome)
        self._saves.labels(**self._common, outcome=_SKIPPED)
        for place in ("local", "remote"):
            self._deleted.labels(**self._common, place=place)

    def update(self, event: Event) -> None:
        """Updates the metrics with the figures of one event."""
        match event:
            case Started():
                self._begun.append(event.step)
                self._set(self._under_way, 1)
            case Committed():
                self._ended(event.step)
                self._count(self._saves, _DONE)
                self._committed_save(event)
            case Loaded():
                self._count(self._loads, _DONE)
                self._set(self._load_s, event.seconds)
                self._set(self._load_bytes, event.nbytes)
            case Deleted():
                self._deleted.labels(**self._common, place=event.place).inc()
            case Uploaded():
                self._count(self._uploads, _DONE)
                self._set(self._upload_s, event.seconds)
                self._set(self._upload_bytes, event.nbytes)
                self._set(self._uploaded, event.step or 0)
            case Skipped():
                # The earlier save, for which this save was skipped, goes on.
                self._begun = [step for step in self._begun if step != event.step]
                self._set(self._under_way, 1 if self._begun else 0)
                self._count(self._saves, _SKIPPED)
            case Failed(operation="save"):
                self._ended(event.step)
                self._count(self._saves, _FAILED)
            case Failed(operation="load"):
                self._count(self._loads, _FAILED)
            case Failed(operation="upload"):
                self._count(self._uploads, _FAILED)

    def _ended(self, step: int | None) -> None:
        """Notes that a save has ended. All earlier saves have ended, too, even if their last event was dropped."""
        while step in self._begun:
            self._begun.pop(0)
        self._set(self._under_way, 1 if self._begun else 0)

    def _committed_save(self, event: Committed) -> None:
        self._stall_total.labels(**self._common).inc(event.stall_s)
        self._bytes_total.labels(**self._common).inc(event.nbytes)
        self._set(self._save_s, event.seconds)
        self._set(self._stall_s, event.stall_s)
        self._set(self._save_bytes, event.nbytes)
        self._set(self._step, event.step or 0)
        self._set(self._committed, event.time)
        for phase in event.phases:
            self._phase_s.labels(**self._common, phase=phase.name).set(phase.seconds)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"mcore_ckpt_{name}", text, (*self._common, *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"mcore_ckpt_{name}", text, (*self._common, *labels), registry=self.registry)

    def _set(self, gauge: Gauge, value: float) -> None:
        gauge.labels(**self._common).set(value)

    def _count(self, counter: Counter, outcome: str) -> None:
        counter.labels(**self._common, outcome=outcome).inc()
