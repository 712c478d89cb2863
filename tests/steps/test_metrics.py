"""Metrics of steps: which are accepted, what is stored, and those that are set after the save."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt import CheckpointConfig, set_metrics
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import decode_manifest, decode_summary, encode_manifest
from mcore_ckpt.checkpoint.metrics import read_metrics
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli import inspect_command
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError, InvalidTypeError
from mcore_ckpt.io.json_fields import FieldError
from mcore_ckpt.io.store import Store
from mcore_ckpt.keep_best import keep_best_rules
from mcore_ckpt.steps import later_metrics
from mcore_ckpt.steps.listing import list_steps
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from mcore_ckpt.steps.upload_queue import UploadQueue
from tests.support.small_steps import save_small


def test_numbers_of_all_libraries() -> None:
    given = {"a": 1, "b/c": np.float32(0.5), "d": torch.tensor(2.5), "e": math.nan, "f": -math.inf, "g": 10**400}
    assert read_metrics(given) == ({"a": 1.0, "b/c": 0.5, "d": 2.5}, ["e", "f", "g"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0.7, InvalidTypeError, "metrics is a float: use a dict"),
        ({"reward": "0.7"}, InvalidTypeError, "reward = '0.7': use a number"),
        ({"reward": True}, InvalidTypeError, "use a number"),
        ({"reward": torch.zeros(2)}, InvalidTypeError, r"reward = tensor\(\[0., 0.\]\): use a number"),
        ({"reward": np.zeros(2)}, InvalidTypeError, "use a number"),
        ({"reward": torch.zeros((), device="meta")}, InvalidTypeError, "use a number"),
        ({1: 0.7}, InvalidArgumentError, "has the name 1"),
        ({"a\nb": 0.7}, InvalidArgumentError, "printable"),
        ({str(number): 0.0 for number in range(257)}, InvalidArgumentError, "at most 256"),
    ],
)
def test_what_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_metrics(given)


def test_the_manifest_has_them_and_its_summary(tmp_path: Path) -> None:
    manifest = read_manifest(save_small(tmp_path, 1, metrics={"reward": 0.7, "loss": -1.5e-300}))
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert decode_summary(data) == manifest.head
    assert manifest.head.metrics == {"reward": 0.7, "loss": -1.5e-300}
    plain = encode_manifest(replace(manifest, metrics={}))
    assert b"metrics" not in plain
    assert b"dropped" not in plain
    for wrong in ({"reward": "high"}, {"reward": True}, {"a\nb": 1.0}):
        with pytest.raises(FieldError, match="metrics"):
            decode_summary(encode_manifest(replace(manifest, metrics=wrong)))


def test_later_metrics_belong_to_one_save(tmp_path: Path) -> None:
    save_small(tmp_path, 1, metrics={"reward": 0.1, "loss": 2.0})
    set_metrics(tmp_path, 1, {"reward": 0.7})
    set_metrics(tmp_path, 1, {"eval/pass@1": 3})
    (status,) = list_steps(tmp_path)
    assert status.metrics == {"reward": 0.7, "loss": 2.0, "eval/pass@1": 3.0}
    set_metrics(tmp_path, 1, {"reward": math.nan})
    (status,) = list_steps(tmp_path)
    assert status.metrics["reward"] == 0.1
    save_small(tmp_path, 1)
    (status,) = list_steps(tmp_path)
    assert status.metrics == {}


def test_each_role_has_its_own(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        save_small(tmp_path, 1, role=role, roles=("actor", "critic"), metrics={"loss": 1.0})
    with pytest.raises(InvalidArgumentError, match="has the roles actor, critic: name one"):
        set_metrics(tmp_path, 1, {"loss": 2.0})
    set_metrics(tmp_path, 1, {"loss": 2.0, "value": 3.0}, role="critic")
    (status,) = list_steps(tmp_path)
    assert status.metrics == {"loss": 1.0, "value": 3.0}
    with pytest.raises(CheckpointNotFoundError, match="no committed step 1 of ref, only actor, critic"):
        set_metrics(tmp_path, 1, {"loss": 2.0}, role="ref")
    with pytest.raises(CheckpointNotFoundError, match="no committed step 2"):
        set_metrics(tmp_path, 2, {"loss": 2.0})


def test_a_driver_s_role_needs_no_word(tmp_path: Path) -> None:
    """Steps of frameworks have roles of plain files beside the model."""
    save_small(tmp_path, 1, role="actor", roles=("actor", "rollout"))
    save_small(tmp_path, 1, role="rollout", roles=("actor", "rollout"), contents=())
    set_metrics(tmp_path, 1, {"reward": 2.0})
    (status,) = list_steps(tmp_path)
    assert {head.role: dict(head.metrics) for head in status.heads} == {"actor": {"reward": 2.0}, "rollout": {}}


@pytest.mark.parametrize("is_flat", [True, False])
def test_inspect_shows_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_flat: bool
) -> None:
    save_small(tmp_path, 1, metrics={"reward": 0.1, "loss": 2.0}, flat=is_flat)
    set_metrics(tmp_path, 1, {"reward": 0.7, "eval/pass@1": 3})
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    (role,) = json.loads(capsys.readouterr().out)["roles"]
    assert role["metrics"] == {"eval/pass@1": 3.0, "loss": 2.0, "reward": 0.7}
    assert main(["inspect", str(tmp_path)]) == 0
    assert "  metrics: eval/pass@1 3, loss 2, reward 0.7\n" in capsys.readouterr().out
    monkeypatch.setattr(inspect_command, "is_terminal", lambda: True)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "eval/pass@1 3, loss 2, reward 0.7" in capsys.readouterr().out
    save_small(tmp_path, 2)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "metrics" not in capsys.readouterr().out


def test_a_damaged_file_of_metrics_is_no_metric(tmp_path: Path) -> None:
    save_small(tmp_path, 1, attempt="a" * 32, metrics={"reward": 0.1})
    path = file_names.metrics_file(tmp_path / "global_steps_1", "actor", "a" * 32)
    for data in (b"", b"{", b'{"reward":"x"}', b"[]"):
        path.write_bytes(data)
        (status,) = list_steps(tmp_path)
        assert status.metrics == {"reward": 0.1}


# -- the rule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        (None, []),
        ((), []),
        ("reward:3:max", ["reward:3:max"]),
        (["a:b:1:min"], ["a:b:1:min"]),
        (["reward", 3, "max"], ["reward:3:max"]),
        ((["reward", 3, "max"], "loss:1:min"), ["reward:3:max", "loss:1:min"]),
        (["a:1:max", "b:1:max", "c:1:max"], ["a:1:max", "b:1:max", "c:1:max"]),
    ],
)
def test_spellings_of_keep_best(given: Any, rules: list[str]) -> None:
    assert [str(rule) for rule in keep_best_rules(given)] == rules
    assert PreservationPolicy(1, keep_best=given).keep_best == keep_best_rules(given)


@pytest.mark.parametrize(
    "given", ["reward", "reward:0:max", "reward:3:most", 3, ("reward", 3), ("reward", True, "max"), ("", 1, "max"), [3]]
)
def test_what_is_no_rule(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"keep_best is .*: use"):
        keep_best_rules(given)


def test_a_metric_has_one_rule() -> None:
    with pytest.raises(InvalidArgumentError, match="names the metric 'reward' twice"):
        keep_best_rules(["reward:1:max", "reward:1:min"])


@pytest.mark.parametrize("field", [{"keep_best": ("reward", 1, "max")}, {"keep_for": 60}, {"keep_every": 5}])
def test_rules_that_keep_more_need_a_number_to_keep(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="without max_to_keep every step is kept"):
        CheckpointConfig(**field)
    assert CheckpointConfig(max_to_keep=1, **field).max_to_keep == 1


def test_a_configuration_of_yaml() -> None:
    given = {"max_to_keep": 1, "keep_best": [["reward", 2, "max"]], "keep_for": 3600, "optimizer_for_last": 2}
    policy = PreservationPolicy.of(CheckpointConfig.from_dict(given), 3)
    assert policy == PreservationPolicy(3, None, "reward:2:max", 3600, 2)  # type: ignore[arg-type]


def test_the_store_keeps_the_best_by_what_was_set_later(tmp_path: Path) -> None:
    root, remote = tmp_path / "root", RemoteSteps(Store(f"file://{tmp_path}/store"))
    policy = PreservationPolicy(1, keep_best="reward:1:max")  # type: ignore[arg-type]
    queue = UploadQueue(remote, root, "actor", policy)
    for step in (1, 2, 3):
        save_small(root, step, metrics={"reward": -step})
        if step == 3:
            set_metrics(root, 2, {"reward": 5.0})
        queue.committed(step)
        assert queue.wait(20)
        delete_old_steps(root, policy, step)
    assert [status.step for status in list_steps(root)] == [2, 3]
    assert [step.step for step in remote.steps()] == [2, 3]
    queue.close(5)


def test_a_wait_without_a_role_does_not_take_the_first_of_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = ("actor", "critic")
    save_small(tmp_path, 1, role="actor", roles=roles)
    monkeypatch.setattr(
        later_metrics.time, "sleep", lambda _: save_small(tmp_path, 1, role="critic", roles=roles)
    )  # an async save that ends later
    with pytest.raises(InvalidArgumentError, match="has the roles actor, critic: name one of them"):
        set_metrics(tmp_path, 1, {"reward": 1.0}, wait_s=60)
    set_metrics(tmp_path, 1, {"reward": 1.0}, role="actor", wait_s=60)
