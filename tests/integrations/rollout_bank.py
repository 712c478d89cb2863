"""Megatron-LM's rollout bank: a stand-in with its public methods and files, or its own with MEGATRON_SOURCE.

The stand-in keeps each group as one line of the ledger, without the files for tokens.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class StandIn:
    def __init__(self, bank_dir, *, max_bytes=0):
        self._root = Path(bank_dir)
        self._root.mkdir(parents=True, exist_ok=True)
        self._segment = None
        if not self._manifest_path.exists():
            assert not list(self._root.iterdir()), "a bank without a manifest"
            self._publish(0, [], {}, uuid.uuid4().hex)

    def set_collection(self, iteration):
        manifest = self._manifest()
        name = f"gen-{iteration:06d}"
        self._segment = self._generation / name
        self._segment.mkdir(exist_ok=True)
        if name not in manifest["segments"]:
            self._write({**manifest, "segments": [*manifest["segments"], name]})

    def append(self, group, uid=None):
        ledger = self._segment / "ledger.log"
        count = len(ledger.read_text().splitlines()) if ledger.exists() else 0
        uid = uid or f"{self._segment.name}/{count}"
        group.uid = uid
        with ledger.open("a") as file:
            file.write(json.dumps({"uid": uid, "batch_id": group.batch_id}) + "\n")
        return uid

    def mark_consumed_many(self, uids, iteration):
        with (self._generation / "consumed.log").open("a") as file:
            file.writelines(json.dumps({"uid": each, "iter": iteration}) + "\n" for each in uids)

    def restore(self, trained_through):
        return self._state(trained_through)[0]

    def recover(self, trained_through):
        survivors = self.restore(trained_through)
        self._publish(trained_through, survivors, {}, uuid.uuid4().hex)
        return survivors

    def checkpoint(self, iteration):
        survivors, used = self._state(iteration)
        kept = {group.uid: used[group.uid] for group in survivors if group.uid in used}
        self._publish(iteration, survivors, kept, self._manifest()["timeline"])

    def close(self):
        pass

    @property
    def _manifest_path(self):
        return self._root / "MANIFEST.json"

    @property
    def _generation(self):
        return self._root / "generations" / self._manifest()["active_generation"]

    def _manifest(self):
        return json.loads(self._manifest_path.read_text())

    def _write(self, manifest):
        new = self._manifest_path.with_suffix(".tmp")
        new.write_text(json.dumps(manifest))
        new.replace(self._manifest_path)

    def _state(self, trained_through):
        log = self._generation / "consumed.log"
        used = {each["uid"]: each["iter"] for each in map(json.loads, log.read_text().splitlines())}
        lines = [line for path in self._generation.glob("*/ledger.log") for line in path.read_text().splitlines()]
        groups = [SimpleNamespace(**json.loads(line)) for line in lines]
        return [each for each in groups if used.get(each.uid, trained_through + 1) > trained_through], used

    def _publish(self, iteration, groups, used, timeline):
        name, old = f"generation-{uuid.uuid4().hex}", self._root / "generations"
        gone = list(old.iterdir()) if old.exists() else []
        (old / name).mkdir(parents=True)
        manifest = {"format_version": 2, "active_generation": name, "timeline": timeline, "segments": []}
        self._write({**manifest, "trained_through": iteration, "compacted_at": iteration})
        (self._generation / "consumed.log").touch()
        self.set_collection(iteration)
        for group in groups:
            self.append(group, group.uid)
        for uid, each in used.items():
            self.mark_consumed_many([uid], each)
        for each in gone:
            shutil.rmtree(each)


class Banks:
    """Makes banks and groups, and is what Megatron-LM knows of its bank: `megatron.rl.rl_utils`."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.bank: Any = None
        self._iteration = 0
        utils: Any = ModuleType("megatron.rl.rl_utils")
        utils.get_rollout_bank = lambda: self.bank
        patched.setitem(sys.modules, "megatron.rl", ModuleType("megatron.rl"))
        patched.setitem(sys.modules, "megatron.rl.rl_utils", utils)
        self._make: Any = StandIn
        self._group = lambda number: SimpleNamespace(batch_id=number, uid=None)
        if source := os.environ.get("MEGATRON_SOURCE"):
            self._take_real(Path(source).expanduser() / "megatron" / "rl", patched)

    def _take_real(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        package: Any = sys.modules["megatron.rl"]
        package.__path__ = [str(folder)]
        names = ("megatron.rl.types", "megatron.rl.types.rollout", "megatron.rl.rollout_bank")
        for name in names:
            patched.delitem(sys.modules, name, raising=False)
        self._make = importlib.import_module("megatron.rl.rollout_bank").RolloutBank
        types = importlib.import_module("megatron.rl.types")

        def group(number: int) -> Any:
            tokens = [[number, 1, 2], [3]]
            probabilities = [[-0.5] * len(turn) for turn in tokens]
            members = [types.TokenRollout(trajectory=tokens, reward=1.0, logprobs=probabilities) for _ in range(2)]
            return types.RolloutGroup(rollouts=members, batch_id=number)

        self._group = group

    def begin(self, folder: Path, iteration: int) -> list[int]:
        """What a process does at its first rollouts: the numbers of the groups that come back."""
        self.bank = self._make(str(folder))
        restored, self._iteration = self.bank.recover(iteration), iteration
        return sorted(group.batch_id for group in restored)

    def complete(self, *numbers: int) -> list[str]:
        """Groups of rollouts are complete: their uids."""
        self.bank.set_collection(self._iteration)
        return [self.bank.append(self._group(number)) for number in numbers]

    def use(self, uids: list[str], iteration: int) -> None:
        """A training step takes groups."""
        self.bank.mark_consumed_many(uids, iteration)
        self._iteration = iteration
