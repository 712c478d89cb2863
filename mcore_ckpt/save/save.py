"""Runs one save, from the trainer's objects to a committed checkpoint, in one function: `save_step`.

An async save runs on three threads. In any other save, the trainer's thread also does the work of the save's thread.

    trainer's thread   plan, open, capture    read the small values, decide what goes where, copy the state
    save's thread      write, commit          write the images, and commit the files of all ranks
    deletion's thread  retire                 delete what the commit has made too old

Each of these threads gives its work on the disk to another thread (`io/disk_watch.py`), and stops waiting for that
thread if the disk hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.errors import HungDiskError, NoRoomError
from mcore_ckpt.interrupts import is_interrupt
from mcore_ckpt.io.disk_space import NOTHING
from mcore_ckpt.processes import Home
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.save.background import BackgroundSaves, SaveHandle
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.destination import Destination, Following, Place
from mcore_ckpt.save.new_manifest import build_manifest
from mcore_ckpt.save.rank_files import RankFiles
from mcore_ckpt.save.rank_reports import RankReport
from mcore_ckpt.save.replica_check import DifferentReplicas, compare_replicas
from mcore_ckpt.save.request import SaveRequest
from mcore_ckpt.save.save_events import SaveEvents
from mcore_ckpt.save.save_times import SaveReport, SaveTimes, timeline_of
from mcore_ckpt.steps.commit import discard
from mcore_ckpt.steps.transaction import Attempt, SkippedSave


def save_step(
    context: SaveContext,
    destination: Destination,
    background: BackgroundSaves,
    request: SaveRequest,
    events: SaveEvents,
) -> SaveHandle:
    """Saves one step. Every rank calls this. Returns once training may go on: see `CheckpointManager.save`."""
    trainer, saving, times = context.trainer, request.saving, SaveTimes(request.called)
    # `finish` must not keep `request` alive, because the extra state of a request may be large.
    roles, metrics, called = request.roles, request.metrics, request.called
    config, topic = trainer.config, f"saving step {saving.step} of {trainer.role}"

    # Plan. While another save is under way, plan nothing, because the host memory belongs to that save.
    folder = destination.folder_of(saving)
    events.started(folder)
    busy, failure = background.earlier_save(waits=config.if_busy == "wait")
    background.wait_for_deletion_of(saving.step)
    times.mark("started")
    files = None if busy or failure else RankFiles(context, request.extra_state, destination, times, events)

    with _failing_commit(context, destination, background, topic, folder), background.raising_earlier_failure():
        # Open, together with all ranks.
        try:
            need = NOTHING if files is None else files.need
            place = destination.open(topic, saving, busy, failure, need, trainer.parts.saved)
        except SkippedSave as skipped:
            events.skipped(skipped.reason)
            return SaveHandle.of_skipped(saving.step, skipped.reason, times.report_of_nothing(saving.step, folder))
        except (NoRoomError, HungDiskError) as error:
            if files is None or not (config.async_save and config.if_failed == "warn"):
                raise
            events.failed(error)
            return background.refuse(SaveHandle(saving.step, files), error)
        assert files is not None, "a rank without files has failed the round, and all ranks have raised"

        # Capture. From here on, a rank that fails still goes on to the commit, and reports its failure there.
        with place.capturing():
            files.capture(place)

        def finish(stall_s: float | None) -> tuple[SaveReport, Following]:
            description = _Description(context, saving.step, roles, metrics, destination.contents, place, files, times)
            try:
                # Write, and commit together.
                place.await_opening(topic)
                files.start_writing(place)
                exported = place.commit(topic, partial(files.write, stall_s=stall_s), description.describe, times)
                description.committed()
                report = times.report(saving.step, place.attempt.role_dir, files.committed(exported), stall_s)
                report = replace(report, different_replicas=tuple(map(str, description.different)))
                events.committed(report, times)
            except BaseException as error:
                events.failed(error, times)
                raise
            finally:
                files.close()
            # Retire.
            return report, place.follow()

        handle = SaveHandle(saving.step, files, finish)
        if saving.policy is not None:
            background.newest_of_step = handle
        return background.finish(handle, called)


class _Description:
    """Builds the manifest, on rank 0."""

    def __init__(
        self,
        context: SaveContext,
        step: int,
        roles: tuple[str, ...],
        metrics: Mapping[str, float],
        contents: tuple[str, ...],
        place: Place,
        files: RankFiles,
        times: SaveTimes,
    ) -> None:
        self._context, self._step, self._roles, self._metrics = context, step, roles, metrics
        self._contents, self._place, self._files, self._times = contents, place, files, times
        self._stamped: list[Manifest] = []
        self.different: tuple[DifferentReplicas, ...] = ()

    def describe(self, records: Sequence[Record]) -> Manifest:
        """Builds the manifest from the reports of all ranks, and warns of replicas that differ."""
        context, files = self._context, self._files
        reports = list(map(RankReport.of, records))
        manifest = build_manifest(
            context.trainer,
            context.names,
            self._place,
            files.common,
            files.group_keys,
            self._step,
            self._roles,
            self._contents,
            reports,
            self._metrics,
        )
        self.different = compare_replicas([report.replicas for report in reports])
        context.replica_warnings.tell(self.different)
        manifest = context.history.stamp(manifest, self._place.attempt.role_dir)
        self._stamped.append(manifest)
        times = [report.times for report in reports]
        # Do this last, because the time of the commit ends here.
        return replace(manifest, save_timeline=timeline_of(times, self._times.in_us()["commit"]))

    def committed(self) -> None:
        """Notes the place of the save among the commits of the run."""
        for manifest in self._stamped:
            self._context.history.committed(manifest)


@contextmanager
def _failing_commit(
    context: SaveContext, destination: Destination, background: BackgroundSaves, topic: str, folder: Path
) -> Iterator[None]:
    """Tells the other ranks if this rank does not reach the commit of a save that all ranks have begun."""
    agreement, commits, home = context.trainer.agreement, context.commits, Home()
    try:
        yield
    except BaseException as error:
        number = agreement.decided.get("attempt")
        if number is None or not home.is_here:
            raise
        staging = file_names.staging_dir(folder, number)
        if not (background.is_at_work or commits.has_begun(number)):
            with suppress(RuntimeError):  # the key-value store is gone, so nobody can be told
                for name in destination.rounds_of(number, agreement.decided):
                    commits.fail_next_round(topic, error, name)
            if agreement.is_coordinator:
                with suppress(HungDiskError):
                    agreement.runner.run(partial(discard, staging))
        if agreement.is_coordinator and is_interrupt(error):
            destination.interrupted(Attempt(number, staging, folder))
        raise
