"""Param groups with values of their own are found again by their parameters, whatever else of them has changed."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.load.report import LoadReport
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.optimizer import read_optimizer
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.foreign_checkpoints import save_torch_dist
from tests.distributed.layouts import LAYOUTS
from tests.distributed.resuming import SIZES
from tests.distributed.snapshot import chained, poison
from tests.distributed.test_muon import LAYOUTS as MUON
from tests.distributed.test_muon import exists
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, Training, _optimizer_config, build, parallel, train

Own = dict[str, dict[str, Any]]
"""By a pattern of names, the fields that a parameter's group has of its own."""

EMBEDDING, MATRICES = "*embedding*", "*linear_fc?.weight"


def build_with(layout: Layout, monkeypatch: pytest.MonkeyPatch, own: Own, seed: int = 1, **scheduler: Any) -> Training:
    """A training whose groups have fields of their own. `scheduler` sets the options of its LR scheduler."""
    keys = pytest.importorskip("megatron.core.optimizer")
    overrides = {keys.ParamKey(name=name): dict(fields) for name, fields in own.items()}
    overrides[keys.ParamKey(name="*.bias")] = {"wd_mult": 0.0}

    def make(layout: Layout, model: Any) -> Any:
        config = _optimizer_config(layout)
        if layout.optimizer != "adam" and not hasattr(config, "use_layer_wise_distributed_optimizer"):
            pytest.skip("until 0.17, Muon takes no overrides")
        return get_megatron_optimizer(config, model, config_overrides=overrides, use_gloo_process_groups=False)

    monkeypatch.setattr("tests.distributed.training._build_optimizer", make)
    training = build(layout, seed)
    for name, value in scheduler.items():
        setattr(training.scheduler, name, value)
    return training


OVERRIDE = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
NEITHER = {"use_checkpoint_opt_param_scheduler": False}


def groups_of(training: Training) -> dict[str, dict[str, Any]]:
    """The fields of each group on this rank by the local name of each of its parameters."""
    names = {id(parameter): name for chunk in training.model for name, parameter in chunk.module.named_parameters()}
    found = {}
    for optimizer in chained(training.optimizer):
        owners = optimizer.model_float16_groups, optimizer.model_fp32_groups
        for number, group in enumerate(optimizer.optimizer.param_groups):
            fields = {key: value for key, value in group.items() if key != "params"}
            found |= {names[id(parameter)]: fields for each in owners for parameter in each[number]}
    return found


def reload(training: Training, root: Path, **config: Any) -> LoadReport:
    manager = manager_of(training, root, **config)
    report = manager.load().report
    manager.close()
    return report


def value(training: Training, part_of_name: str, field: str) -> set[Any]:
    return {fields.get(field) for name, fields in groups_of(training).items() if part_of_name in name}


@pytest.mark.world(1)
def test_each_group_gets_its_own_rates_when_one_has_changed(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron sorts groups by their values, so that a changed one turns their order."""
    layout = LAYOUTS["plain"]
    with parallel(layout):
        own: Own = {EMBEDDING: {"max_lr": 1e-3}, MATRICES: {"max_lr": 2e-3}}
        first = build_with(layout, monkeypatch, own)
        train(first, 0, 3)
        save(first, shared_path, 3)
        wanted = {name: dict(fields) for name, fields in groups_of(first).items()}
        reference = [step.losses for step in train(first, 3, 5)]
        changed = own | {EMBEDDING: {"max_lr": 5e-3}}
        second = build_with(layout, monkeypatch, changed, seed=2)
        assert reload(second, shared_path).kept_groups == ()
        found = groups_of(second)
        assert {name: fields["max_lr"] for name, fields in found.items()} == {
            name: fields["max_lr"] for name, fields in wanted.items()
        }
        assert [step.losses for step in train(second, 3, 5)] == reference

        third = build_with(layout, monkeypatch, changed, seed=2, **OVERRIDE)
        reload(third, shared_path)
        assert value(third, "embedding", "max_lr") == {5e-3}
        assert value(third, "linear_fc1.weight", "max_lr") == {2e-3}
        assert value(third, "embedding", "lr") == {third.scheduler.get_lr({"max_lr": 5e-3, "min_lr": 1e-4})}

        fourth = build_with(layout, monkeypatch, changed, seed=2, **NEITHER)
        with pytest.raises(CheckpointMismatchError, match=r"embedding.*max_lr: wanted 0.005, found 0.001"):
            reload(fourth, shared_path)


@pytest.mark.world(1)
def test_an_overriding_run_keeps_the_weight_decay_of_its_groups(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS["plain"]
    with parallel(layout):
        first = build_with(layout, monkeypatch, {EMBEDDING: {"start_wd": 0.2, "end_wd": 0.3, "eps": 1e-6}})
        train(first, 0, 3)
        save(first, shared_path, 3)
        run: Own = {EMBEDDING: {"start_wd": 0.5, "end_wd": 0.5, "eps": 1e-4}}
        for scheduler, wanted in ((OVERRIDE, 0.5), ({}, 0.2)):
            second = build_with(layout, monkeypatch, run, seed=2, **scheduler)
            reload(second, shared_path)
            assert value(second, "embedding", "start_wd") == {wanted}
            assert value(second, "embedding", "eps") == {1e-6}, "moments were made with it"
            assert value(second, "linear_fc1.weight", "start_wd") == {None}
            (decay,) = value(second, "embedding", "weight_decay")
            assert decay == (
                0.5 if scheduler else groups_of(first)[next(n for n in groups_of(first) if "emb" in n)]["weight_decay"]
            )
        # A run that asks for no weight decay of its own, and takes the checkpoint's schedule, has the checkpoint's.
        third = build_with(layout, monkeypatch, {EMBEDDING: {"eps": 1e-4}}, seed=2)
        reload(third, shared_path)
        assert value(third, "embedding", "end_wd") == {0.3}


@pytest.mark.world(1)
def test_a_new_group_keeps_the_runs_values_and_is_named(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = LAYOUTS["plain"]
    with parallel(layout):
        first = build_with(layout, monkeypatch, {"*": {"betas": (0.8, 0.9)}})
        train(first, 0, 3)
        save(first, shared_path, 3)
        changed: Own = {"*": {"betas": (0.7, 0.9)}}
        second = build_with(layout, monkeypatch, changed | {EMBEDDING: {"max_lr": 3e-3}}, seed=2)
        poison_all_but_schedule(second)
        second.scheduler.start_wd = 0.05  # the checkpoint's counts, also for the rates of what is new
        with caplog.at_level(logging.INFO, "mcore_ckpt"):
            report = reload(second, shared_path)
        (kept,) = report.kept_groups
        assert "embedding.word_embeddings.weight (" in kept
        assert "max_lr 0.003" in kept
        assert kept.endswith("whose parameters were in 1 group with another default_config, max_lr")
        assert kept in caplog.text
        assert "loaded step 3 of actor from" in caplog.text
        assert value(second, "embedding", "max_lr") == {3e-3}
        assert value(second, "linear_fc1.weight", "max_lr") == {1e-2}
        assert value(second, "weight", "betas") == {(0.8, 0.9)}, "moments were made with it"
        (rate,) = value(second, "embedding", "lr")
        assert rate == second.scheduler.get_lr({"max_lr": 3e-3, "min_lr": 1e-4})
        assert value(second, "embedding", "weight_decay") == value(first, "linear_fc1.weight", "weight_decay")
        # And a group that is gone leaves the others alone.
        train(second, 3, 4)
        save(second, shared_path, 4)
        third = build_with(layout, monkeypatch, changed, seed=2)
        assert reload(third, shared_path).kept_groups == ()
        assert {fields["max_lr"] for fields in groups_of(third).values()} == {1e-2}


class PerGroup:
    """A scheduler that keeps a rate for each group by its place, as torch's do."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.rates, self.steps = optimizer, [group["max_lr"] for group in optimizer.param_groups], 0

    def step(self, increment: int = 1) -> None:
        self.steps += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate / self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.steps = list(state["rates"]), state["steps"]


@pytest.mark.world(1)
def test_a_scheduler_that_has_lists_by_group_gets_them_in_the_runs_order(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core.optimizer as megatron_optimizer

    monkeypatch.setattr("tests.distributed.training._scheduler", PerGroup)
    layout, own = LAYOUTS["plain"], {EMBEDDING: {"max_lr": 1e-3}, MATRICES: {"max_lr": 2e-3}}
    with parallel(layout):
        first = build_with(layout, monkeypatch, own)
        train(first, 0, 2)
        save(first, shared_path, 2)
        # The order of groups turns, and one is new.
        run: Own = {EMBEDDING: {"max_lr": 5e-3}, MATRICES: {"max_lr": 2e-3}, "*linear_qkv.weight": {"max_lr": 3e-3}}
        second = build_with(layout, monkeypatch, run, seed=2)
        reload(second, shared_path)
        train(second, 2, 3)
        for part_of_name, rate in {"embedding": 1e-3, "linear_fc": 2e-3, "qkv.weight": 3e-3, "proj": 1e-2}.items():
            names = [name for name in groups_of(second) if part_of_name in name and name.endswith("weight")]
            assert {groups_of(second)[name]["lr"] for name in names} == {rate / 3}, part_of_name

        # Megatron's own checkpoints have the groups in the order of the run that saved them.
        save_torch_dist(first, shared_path / "theirs", "dp_reshardable")
        make = megatron_optimizer._get_param_groups
        monkeypatch.setattr(megatron_optimizer, "_get_param_groups", lambda *args, **named: make(*args, **named)[::-1])
        third = build_with(layout, monkeypatch, own, seed=2)
        manager = manager_of(third, shared_path / "unused", load_contents=("model", "optimizer"))
        manager.load(path=shared_path / "theirs")
        manager.close()
        assert third.scheduler.rates == [group["max_lr"] for group in third.optimizer.param_groups]


def poison_all_but_schedule(training: Training) -> None:
    """As `poison`, but for what the run asks for."""
    groups = [group for optimizer in chained(training.optimizer) for group in optimizer.param_groups]
    asked = [{key: group[key] for key in ("max_lr", "min_lr")} for group in groups]
    poison(training)
    for group, fields in zip(groups, asked, strict=True):
        group.update(fields)


PP2 = replace(LAYOUTS["dp2-bf16"], dropout=0.0, global_batch=4, padded_vocab=144)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(replace(PP2, pp=2), PP2, id="pp2-dp2", marks=marks(2)),
        pytest.param(PP2, replace(PP2, tp=2), id="dp2-tp2", marks=marks(2, in_ci=False)),
        pytest.param(replace(PP2, experts=4, ep=2), replace(PP2, experts=4), id="ep2-dp2", marks=marks(2, in_ci=False)),
        pytest.param(replace(PP2, experts=4), replace(PP2, experts=4, ep=2), id="dp2-ep2", marks=marks(2, in_ci=False)),
    ],
)
def test_another_layout_finds_the_groups_by_all_ranks_members(
    saved: Layout, loaded: Layout, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank has all members of a group, and some ranks have none."""
    own: Own = {EMBEDDING: {"max_lr": 1e-3}, MATRICES: {"max_lr": 2e-3}, "*experts*weight": {"eps": 1e-3}}
    changed: Own = own | {EMBEDDING: {"max_lr": 5e-3}}
    if saved.experts:
        own, changed = ({name: own for name, own in each.items() if name != MATRICES} for each in (own, changed))
    with parallel(saved):
        first = build_with(saved, monkeypatch, own)
        train(first, 0, 3)
        save(first, shared_path, 3)
    with parallel(loaded):
        second = build_with(loaded, monkeypatch, changed, seed=2)
        poison(second)
        report = reload(second, shared_path)
        groups = groups_of(second)
        with everywhere():
            assert report.kept_groups == ()
            for name, fields in groups.items():
                rate = 1e-3 if "embedding" in name else 2e-3 if "linear_fc" in name and "weight" in name else 1e-2
                if saved.experts:
                    rate = 1e-3 if "embedding" in name else 1e-2
                    assert fields["eps"] == (1e-3 if ".experts." in name and "weight" in name else 1e-8), name
                assert fields["max_lr"] == rate, name


DP2 = replace(PP2, fp32_norms=True)
OPTIMIZERS = {
    "adam": DP2,
    "replicated": replace(DP2, distributed_optimizer=False),
    "fp32": replace(PP2, precision="fp32"),
    "aware": replace(PP2, precision_aware=True),
    "offloaded": replace(PP2, offload=0.5),
    "experts": replace(PP2, experts=4, ep=2),
    **{name: replace(MUON[name], **SIZES) for name in ("plain", "owners", "layout", "lion") if name in MUON},
}


@pytest.mark.world(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "offloaded" else pytest.mark.full) for name in OPTIMIZERS]
)
def test_every_kind_of_optimizer(name: str, turned: bool, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`turned`: as ms-swift does it, each rank has the groups in another order. Empty ones are in it, too."""
    layout = OPTIMIZERS[name]
    if not exists(layout):
        pytest.skip("this megatron-core does not have it")
    if turned and name in ("replicated", "plain", "lion", "owners"):
        pytest.skip("the order decides which replica has what")
    if turned:
        import megatron.core.optimizer as module

        make = module._get_param_groups
        monkeypatch.setattr(module, "_get_param_groups", lambda *a, **k: make(*a, **k)[:: 1 - 2 * dist.get_rank()])
    own: Own = {EMBEDDING: {"max_lr": 1e-3, "wd_mult": 0.5}, "*linear_proj.weight": {"max_lr": 2e-3, "min_lr": 1e-5}}
    changed: Own = own | {EMBEDDING: {"max_lr": 5e-3, "wd_mult": 0.25}}
    with parallel(layout):
        first = build_with(layout, monkeypatch, own)
        train(first, 0, 2)
        save(first, shared_path, 2)
        wanted = by_global_name(first)
        second = build_with(layout, monkeypatch, changed, seed=2)
        poison(second)
        report = reload(second, shared_path)
        found = by_global_name(second)
        # The same reaches ranks that have no member of a group.
        shown = sorted(repr(fields) for fields in all_groups(second))
        with everywhere():
            assert report.kept_groups == ()
            assert found == wanted
            assert shown == sorted(repr(fields) for fields in all_groups(first))
            assert {fields["max_lr"] for name, fields in wanted.items() if "linear_proj.weight" in name} <= {2e-3}
        assert [step.losses for step in train(second, 2, 3)] == [step.losses for step in train(first, 2, 3)]


def all_groups(training: Training) -> list[dict[str, Any]]:
    return [fields_of(group) for each in chained(training.optimizer) for group in each.param_groups]


def by_global_name(training: Training) -> dict[str, dict[str, Any]]:
    parts = optimizer_parts(training.optimizer)
    states = read_optimizer(training.optimizer, model_shards(training.model), first_instance=True)
    return {
        state.name: fields_of(part.param_groups[state.group])
        for part, of_part in zip(parts, states, strict=True)
        for state in of_part
        if state.group is not None
    }


def fields_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in sorted(group) if key not in ("params", "step")}


@pytest.mark.world(1)
@pytest.mark.parametrize("form", [pytest.param("fully_reshardable", marks=pytest.mark.full), "dp_reshardable"])
def test_megatrons_own_checkpoints(form: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not say which parameters are in which group."""
    layout = replace(LAYOUTS["plain"], precision="bf16")
    own: Own = {EMBEDDING: {"max_lr": 1e-3}, "*linear_proj.weight": {"max_lr": 2e-3}}
    with parallel(layout):
        first = build_with(layout, monkeypatch, own)
        train(first, 0, 2)
        save_torch_dist(first, shared_path / "theirs", form)
        same = build_with(layout, monkeypatch, own, seed=2)
        manager = manager_of(same, shared_path / "unused", load_contents=("model", "optimizer"))
        assert manager.load(path=shared_path / "theirs").report.kept_groups == ()
        manager.close()
        assert by_global_name(same) == by_global_name(first)
        other = build_with(layout, monkeypatch, own | {EMBEDDING: {"max_lr": 5e-3}}, seed=2)
        manager = manager_of(other, shared_path / "unused", load_contents=("model", "optimizer"))
        with pytest.raises(CheckpointMismatchError, match="counterparts among the 3 saved groups"):
            manager.load(path=shared_path / "theirs")
        manager.close()


@pytest.mark.world(1)
def test_a_checkpoint_without_members_is_never_guessed_from(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all checkpoints of older versions are: `common.pt` without members."""
    layout = LAYOUTS["plain"]
    own: Own = {EMBEDDING: {"max_lr": 1e-3}, MATRICES: {"max_lr": 2e-3}}
    monkeypatch.setattr("mcore_ckpt.save.new_manifest.add_members", lambda optimizers, keys, members: None)
    with parallel(layout):
        first = build_with(layout, monkeypatch, own)
        train(first, 0, 3)
        save(first, shared_path, 3)
        reference = train(first, 3, 5)
        same = build_with(layout, monkeypatch, own, seed=2)
        reload(same, shared_path)
        assert train(same, 3, 5) == reference
        second = build_with(layout, monkeypatch, own | {EMBEDDING: {"max_lr": 5e-3}}, seed=2)
        with pytest.raises(CheckpointMismatchError, match=r"embedding.* has 2 counterparts among the 3 saved groups"):
            reload(second, shared_path)
        # If each saved group goes on as another, what is left over is new.
        third = build_with(layout, monkeypatch, own | {"*linear_qkv.weight": {"max_lr": 4e-3}}, seed=2)
        (kept,) = reload(third, shared_path).kept_groups
        assert "max_lr 0.004" in kept
        assert value(third, "embedding", "max_lr") == {1e-3}
