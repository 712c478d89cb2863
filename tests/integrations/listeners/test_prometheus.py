"""The text file for node_exporter, parsed back by prometheus_client; the dashboard and the document that name it."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcore_ckpt import Event, SaveReport
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.events import Committed, Failed, Skipped, Started
from mcore_ckpt.integrations.listeners import PrometheusListener
from tests.support.told_events import GOOD, NEWEST

DOCS = Path(__file__).parents[3] / "docs"
NAME = re.compile(r"\bmcore_ckpt_[a-z_]+")
Told = tuple[list[Event], list[SaveReport]]


def samples(file: Path, **labels: str) -> dict[str, float]:
    """The values in a file by the name of the sample, and by the label that is special to it."""
    found = {}
    wanted = {"run": "", "role": "actor", "rank": "0"} | labels
    for family in text_string_to_metric_families(file.read_text()):
        for sample in family.samples:
            special = sample.labels.items() - wanted.items()
            if sample.labels.items() >= wanted.items() and not sample.name.endswith("_created"):
                found["".join([sample.name, *(f" {value}" for _, value in special)])] = sample.value
    return found


@pytest.fixture(scope="module")
def file(told: Told, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("textfile")
    listener = PrometheusListener(folder)
    for event in told[0]:
        listener(event)
    (found,) = folder.iterdir()
    return found


def test_the_figures_of_a_training(file: Path, told: Told) -> None:
    assert file.name == "mcore_ckpt_actor_rank0.prom"
    found, (first, last) = samples(file), told[1]
    (committed,) = [event for event in told[0] if isinstance(event, Committed) and event.step == NEWEST]
    assert found["mcore_ckpt_saves_total done"] == 2
    assert found["mcore_ckpt_saves_total failed"] == 1
    assert found["mcore_ckpt_save_under_way"] == 0
    assert found["mcore_ckpt_save_stall_seconds_total"] == pytest.approx(first.stall_s + last.stall_s)
    assert found["mcore_ckpt_save_bytes_total"] == first.nbytes + last.nbytes
    assert found["mcore_ckpt_last_save_seconds"] == pytest.approx(last.seconds)
    assert found["mcore_ckpt_last_save_stall_seconds"] == pytest.approx(last.stall_s)
    assert found["mcore_ckpt_last_save_bytes"] == last.nbytes
    assert found["mcore_ckpt_last_save_phase_seconds write"] == pytest.approx(last.write_s)
    assert {key.split()[-1] for key in found if "phase" in key} == {"wait", "plan", "copy", "write", "commit"}
    assert found["mcore_ckpt_last_committed_step"] == NEWEST
    assert found["mcore_ckpt_last_commit_timestamp_seconds"] == committed.time
    assert (found["mcore_ckpt_loads_total done"], found["mcore_ckpt_loads_total failed"]) == (1, 1)
    assert found["mcore_ckpt_last_load_bytes"] > 0
    assert found["mcore_ckpt_last_load_seconds"] > 0
    deleted = [found[f"mcore_ckpt_deleted_steps_total {place}"] for place in ("local", "remote")]
    assert deleted == [1, 1]
    assert (found["mcore_ckpt_uploads_total done"], found["mcore_ckpt_uploads_total failed"]) == (2, 0)
    assert found["mcore_ckpt_last_upload_seconds"] > 0
    assert found["mcore_ckpt_last_upload_bytes"] > last.nbytes
    assert found["mcore_ckpt_last_uploaded_step"] == NEWEST


def test_counters_are_there_before_they_count(told: Told, tmp_path: Path) -> None:
    started = told[0][0]
    assert isinstance(started, Started)
    PrometheusListener(tmp_path)(started)
    found = samples(tmp_path / "mcore_ckpt_actor_rank0.prom")
    assert found["mcore_ckpt_save_under_way"] == 1
    assert found["mcore_ckpt_saves_total failed"] == 0
    assert found["mcore_ckpt_deleted_steps_total remote"] == 0


def test_a_skipped_save_is_counted_and_the_earlier_one_stays_under_way(told: Told, tmp_path: Path) -> None:
    listener, committed = PrometheusListener(tmp_path), next(each for each in told[0] if isinstance(each, Committed))
    first, common = committed.step, {"role": "actor", "rank": 0, "path": "steps", "time": 1.0}
    assert first is not None
    skipped = Skipped(step=first + 1, **common, reason="an earlier save is still under way on rank 1", seconds=0.1)
    events: list[tuple[Event, int]] = [
        (Started(step=first, **common), 1),
        (Started(step=first + 1, **common), 1),
        (skipped, 1),
        (committed, 0),
        (Started(step=first + 1, **common), 1),  # another rank has skipped it, which this one could have saved
        (skipped, 0),
    ]
    for event, under_way in events:
        listener(event)
        found = samples(tmp_path / "mcore_ckpt_actor_rank0.prom")
        assert found["mcore_ckpt_save_under_way"] == under_way, event
    assert (found["mcore_ckpt_saves_total done"], found["mcore_ckpt_saves_total skipped"]) == (1, 2)


def test_each_role_rank_and_run_has_a_file(told: Told, tmp_path: Path) -> None:
    actor, critic = PrometheusListener(tmp_path, "one"), PrometheusListener(tmp_path, "two")
    for event in told[0][:4]:
        actor(event)
        actor(replace(event, role="critic"))
        critic(replace(event, rank=3))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [
        "mcore_ckpt_one_actor_rank0.prom",
        "mcore_ckpt_one_critic_rank0.prom",
        "mcore_ckpt_two_actor_rank3.prom",
    ]
    for name, labels in zip(
        files, ({"run": "one"}, {"run": "one", "role": "critic"}, {"run": "two", "rank": "3"}), strict=True
    ):
        assert samples(tmp_path / name, **labels)["mcore_ckpt_last_committed_step"] == GOOD
    # node_exporter refuses files that describe one metric in two ways.
    helps = [re.findall(r"^# (?:HELP|TYPE) .*$", (tmp_path / name).read_text(), re.MULTILINE) for name in files]
    assert helps[0] == helps[1] == helps[2]


def test_a_file_is_replaced_as_a_whole(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = PrometheusListener(tmp_path)
    listener(told[0][0])
    file = tmp_path / "mcore_ckpt_actor_rank0.prom"
    before = file.read_text()
    seen: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (seen.append(file.read_text()), rename(*paths))[1])
    listener(next(event for event in told[0] if isinstance(event, Failed) and event.operation == "save"))
    assert seen == [before], "until the new file is complete, the old one is there"
    assert samples(file)["mcore_ckpt_saves_total failed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nowhere' is not a folder: make it"):
        PrometheusListener(tmp_path / "nowhere")
    with pytest.raises(InvalidArgumentError, match="without '/'"):
        PrometheusListener(tmp_path, "a/b")


# -- the dashboard and the document -----------------------------------------------------------------------------


def expressions(node: Any) -> list[str]:
    """All queries in a dashboard."""
    if isinstance(node, dict):
        own = [node["expr"]] if "expr" in node else []
        own += [node["query"]] if isinstance(node.get("query"), str) and "mcore_ckpt" in node["query"] else []
        return own + [text for value in node.values() for text in expressions(value)]
    return [text for value in node for text in expressions(value)] if isinstance(node, list) else []


def exported(file: Path) -> set[str]:
    return {key.split()[0] for key in samples(file)}


def test_the_dashboard_queries_exactly_what_is_exported(file: Path) -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    assert set(NAME.findall(" ".join(expressions(dashboard)))) == exported(file)
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))


def exported_labels(file: Path) -> dict[str, dict[str, set[str]]]:
    """By metric and label, the values that occur."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(file.read_text()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return found


def test_the_queries_name_labels_and_values_that_are_exported(file: Path) -> None:
    """Each selector, each `by`, and what legends and variables show of the result."""
    labels = exported_labels(file)
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    queries = expressions(dashboard)
    selectors = [each for query in queries for each in re.findall(r"(mcore_ckpt_\w+)\{(.*?)\}", query)]
    assert len(selectors) > 20
    for metric, matchers in selectors:
        for label, operator, value in re.findall(r'(\w+)(=~|=)"(.*?)"', matchers):
            assert value == f"${label}" if operator == "=~" else value in labels[metric][label], (metric, label)
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert targets
    for target in targets:
        kept = [set(re.split(r", *", names)) for names in re.findall(r"by \((.*?)\)", target["expr"])]
        metrics = NAME.findall(target["expr"])
        assert all(names <= labels[metric].keys() for names, metric in zip(kept, metrics, strict=False))
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= set.intersection(*(kept or [set(labels[metrics[0]])])), target["expr"]
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert set(re.findall(r'=~"\$(\w+)"', " ".join(queries))) == {"run", "role"} == variables.keys() - {"datasource"}
    for name in ("run", "role"):
        metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variables[name]["query"]["query"])[0]
        assert label == name
        assert label in labels[metric]


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_document_lists_exactly_what_is_exported(file: Path) -> None:
    _, _, text = (DOCS / "monitoring.md").read_text().partition("\n## Prometheus\n")
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `mcore_ckpt_")]
    assert {name for row in rows for name in NAME.findall(row.split("|")[1])} == exported(file)
