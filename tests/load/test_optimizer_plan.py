"""The fills of main parameters and moments: in each form an optimizer keeps them, and what is refused by name."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.halves import split_halves
from mcore_ckpt.checkpoint.index import SCALE_REGION
from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.native.write_requests import TensorWrite
from mcore_ckpt.load.fill import fill_tensors
from mcore_ckpt.load.optimizer_plan import OptimizerPlanner, PartPlan
from mcore_ckpt.ranks.topology import Replicas
from mcore_ckpt.sharding.plan import Coding
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.shards import ParameterState
from tests.support.fused_adam import FusedAdam
from tests.support.stored_tensors import MODEL_FILE, OPTIMIZER_FILE, checkpoint, locator_of, lone_trainer, shard

A, B = "decoder.final_layernorm.weight", "output_layer.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


def values(numel: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def state_of(name: str, main: torch.Tensor, **fields: Any) -> ParameterState:
    found = ParameterState(name, Region.whole(tuple(main.shape)), main, main, False, False, False, 0, moments={})
    return replace(found, **fields)


def part_of(*parameters: torch.Tensor, inner: Any = None) -> OptimizerPart:
    inner = torch.optim.Adam(list(parameters)) if inner is None else inner
    (part,) = optimizer_parts(SimpleNamespace(optimizer=inner))
    return part


def stored(folder: Path, *optimizer: TensorWrite, model: Mapping[str, torch.Tensor] | None = None) -> Path:
    files = {OPTIMIZER_FILE: optimizer}
    if model:
        files[MODEL_FILE] = tuple(shard(name, tensor) for name, tensor in model.items())
    return checkpoint(folder, files)


def adam_state(name: str, seed: int = 1, shape: tuple[int, ...] = (6,)) -> list[TensorWrite]:
    """What Adam keeps of a parameter."""
    kinds = ("param", *MOMENTS)
    return [shard(name, values(torch.Size(shape).numel(), seed + n).view(shape), kind) for n, kind in enumerate(kinds)]


def planner(folder: Path, **config: Any) -> OptimizerPlanner:
    trainer = lone_trainer(torch.nn.Module(), None, **config)
    return OptimizerPlanner(trainer, NativeReader.open(folder), locator_of(folder, trainer))


def fill(folder: Path, plan: PartPlan) -> None:
    fill_tensors([*plan.mains, *plan.state], NativeReader.open(folder).read)


# -- plain state -------------------------------------------------------------------------------------------


def test_main_parameters_and_moments_are_filled(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", *adam_state(A), *adam_state(B, 7))
    mains = [torch.zeros(6), torch.zeros(6)]
    part = part_of(*mains)
    plan = planner(folder).plan(part, [state_of(A, mains[0]), state_of(B, mains[1])], starts_anew=False)
    assert (len(plan.mains), len(plan.state), plan.newly_started, plan.other_moments) == (2, 4, (), None)
    assert len(plan.all_newly_started) == 2
    assert not part.inner.state, "a plan makes no state"
    fill(folder, plan)
    for main, seed in zip(mains, (1, 7), strict=True):
        assert torch.equal(main, values(seed=seed))
        for number, kind in enumerate(MOMENTS, 1):
            assert torch.equal(part.inner.state[main][kind], values(seed=seed + number))


def test_a_rank_fills_the_elements_that_it_owns(tmp_path: Path) -> None:
    """Although the checkpoint has the parameter in two files, cut elsewhere."""
    whole = values(12)
    cuts = ((0, 5), (5, 12))
    files = {
        f"optim/distrib_optim_pp0_tp0_cp0_dp{n}.pt": [
            shard(A, whole[slice(*cut)] + add, kind, Region.whole((12,)).with_flat(*cut))
            for add, kind in enumerate(("param", *MOMENTS))
        ]
        for n, cut in enumerate(cuts)
    }
    folder = checkpoint(tmp_path / "actor", files)
    main = torch.zeros(6)
    state = state_of(A, main, region=Region.whole((12,)).with_flat(3, 9))
    part = part_of(main)
    fill(folder, planner(folder).plan(part, [state], starts_anew=False))
    assert torch.equal(main, whole[3:9])
    assert torch.equal(part.inner.state[main]["exp_avg_sq"], whole[3:9] + 2)


def test_a_model_view_is_filled_with_the_model(tmp_path: Path) -> None:
    """In fp32 training the main parameter is the model's tensor: it is read once."""
    folder = stored(tmp_path / "actor", *adam_state(A))
    main = torch.zeros(6)
    state = state_of(A, main, is_model_view=True)
    plan = planner(folder).plan(part_of(main), [state], False)
    assert (len(plan.mains), len(plan.state)) == (0, 2)
    assert [filled for _, _, filled in plan.all_newly_started] == [False]
    without_model = planner(folder, load_contents=("optimizer",)).plan(part_of(main), [state], False)
    assert (len(without_model.mains), len(without_model.state)) == (1, 2)
    assert [filled for _, _, filled in without_model.all_newly_started] == [True]


def test_moments_keep_the_dtype_that_the_optimizer_has_or_the_stored_one(tmp_path: Path) -> None:
    folder = stored(
        tmp_path / "actor", shard(A, values(), "param"), *(shard(A, values().bfloat16(), kind) for kind in MOMENTS)
    )
    main = torch.zeros(6)
    part = part_of(main)
    plan = planner(folder).plan(part, [state_of(A, main)], False)
    assert [each.rounding for each in plan.state] == [None, None]
    fill(folder, plan)
    assert part.inner.state[main]["exp_avg"].dtype == torch.bfloat16
    narrow = torch.zeros(6, dtype=torch.float16)
    part.inner.state[main] = {"exp_avg": narrow, "exp_avg_sq": torch.zeros(6)}
    plan = planner(folder).plan(part, [state_of(A, main, moments=dict(part.inner.state[main]))], False)
    assert [each.rounding for each in plan.state] == ["exp_avg: bfloat16 to float16", None]
    fill(folder, plan)
    assert torch.equal(narrow, values().bfloat16().half())


@pytest.mark.parametrize("sharded", [False, True])
def test_replicated_state_is_read_by_one_rank_for_all(sharded: bool, tmp_path: Path) -> None:
    """Not if each data-parallel rank owns another part of it."""
    folder = stored(tmp_path / "actor", *adam_state(A))
    found = planner(folder, load_replicas="broadcast")
    found = replace(found, trainer=replace(found.trainer, replicas=Replicas((0, 1))))
    main = torch.zeros(6)
    part = replace(part_of(main), is_of_owner=sharded)
    plan = found.plan(part, [state_of(A, main)], False)
    assert {each.replicas for each in (*plan.mains, *plan.state)} == {() if sharded else (0, 1)}


# -- no state yet, or new moments --------------------------------------------------------------------------


def test_an_optimizer_that_had_done_no_step(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", shard(A, values(), "param"), *adam_state(B))
    mains = [torch.zeros(6), torch.zeros(6)]
    part = part_of(*mains)
    states = [state_of(A, mains[0]), state_of(B, mains[1])]
    plan = planner(folder).plan(part, states, False)
    assert plan.newly_started == ((part, states[0], True),)
    assert (len(plan.mains), len(plan.state), plan.other_moments) == (2, 2, None)


def test_a_part_that_starts_anew_takes_over_main_parameters_alone(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", *adam_state(A))
    main = torch.zeros(6)
    plan = planner(folder).plan(part_of(main), [state_of(A, main)], starts_anew=True)
    assert (len(plan.mains), plan.state, plan.other_moments) == (1, (), None)
    assert plan.newly_started == plan.all_newly_started
    assert len(plan.newly_started) == 1


def test_with_new_moments_only_main_parameters_are_left(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", *adam_state(A))
    main = torch.zeros(6)
    plan = planner(folder).plan(part_of(main), [state_of(A, main)], False)
    assert plan.newly_started == ()
    anew = plan.with_new_moments()
    assert (anew.mains, anew.state, anew.newly_started) == (plan.mains, (), plan.all_newly_started)


OTHER = [
    ([shard(A, values(), "momentum_buffer")], "momentum_buffer"),
    ([shard(A, values(), "exp_avg")], "exp_avg"),
    ([shard(A, values(), kind) for kind in (*MOMENTS, "more")], "exp_avg and exp_avg_sq and more"),
    # The second one belongs to this very region.
    ([shard(A, values(), "exp_avg"), shard(A, values(), "exp_avg_sq", beside="param")], "exp_avg and exp_avg_sq"),
]


@pytest.mark.parametrize(("moments", "found"), OTHER)
def test_other_moments_are_refused_or_left(moments: list[TensorWrite], found: str, tmp_path: Path) -> None:
    words = f"{OPTIMIZER_FILE}: optimizer state of {A}: wanted exp_avg and exp_avg_sq of Adam, found {found}"
    folder = stored(tmp_path / "actor", shard(A, values(), "param"), *moments)
    main = torch.zeros(6)
    with pytest.raises(CheckpointMismatchError) as caught:
        planner(folder).plan(part_of(main), [state_of(A, main)], False)
    assert str(caught.value).startswith(f"{words}: set reset_moments=True to ")
    plan = planner(folder, reset_moments=True).plan(part_of(main), [state_of(A, main)], False)
    assert (len(plan.mains), plan.state) == (1, ())
    assert plan.other_moments == words
    assert plan.newly_started == (), "until all ranks know it"


def test_optional_moments_are_taken(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", *adam_state(A), shard(A, values(), "max_exp_avg_sq"))
    main = torch.zeros(6)
    plan = planner(folder).plan(part_of(main), [state_of(A, main)], False)
    assert (len(plan.state), plan.other_moments) == (3, None)


def test_a_derived_class_may_keep_more(tmp_path: Path) -> None:
    class More(torch.optim.Adam):
        pass

    folder = stored(tmp_path / "actor", *adam_state(A), shard(A, values(), "more"))
    main = torch.zeros(6)
    assert len(planner(folder).plan(part_of(inner=More([main])), [state_of(A, main)], False).state) == 3


# -- state that belongs to a region as a whole ---------------------------------------------------------------


class AdaptiveMuon(torch.optim.Optimizer):
    """As much of emerging-optimizers' as its kind is known by."""

    moment2_method = "normuon"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def muon_state(second: torch.Tensor, region: Region | None = None) -> list[TensorWrite]:
    region = region or Region.whole((4, 3))
    return [
        shard(A, torch.ones(region.numel), "param", region),
        shard(A, torch.ones(region.numel), "momentum_buffer", region),
        shard(A, second, "moment2_buffer", beside="param"),
    ]


def test_state_of_a_whole_region(tmp_path: Path) -> None:
    second = torch.arange(4.0).view(4, 1)
    folder = stored(tmp_path / "actor", *muon_state(second))
    main = torch.zeros(4, 3)
    part = part_of(inner=AdaptiveMuon([main]))
    plan = planner(folder).plan(part, [state_of(A, main)], False)
    assert (len(plan.mains), len(plan.state)) == (1, 2)
    fill(folder, plan)
    assert torch.equal(part.inner.state[main]["moment2_buffer"], second)


@pytest.mark.parametrize(
    ("second", "region", "words"),
    [
        (torch.zeros(1, 3), None, "wanted moment2_buffer of shape [4, 1], found [1, 3]"),
        (
            torch.zeros(2, 1),
            Region.whole((4, 3)).with_flat(0, 6),
            "belongs to other parts of the parameter than global shape [4, 3], and cannot be divided: use the "
            "tensor-parallel size of the checkpoint",
        ),
    ],
)
def test_state_of_another_region_is_refused(
    second: torch.Tensor, region: Region | None, words: str, tmp_path: Path
) -> None:
    files = {OPTIMIZER_FILE: muon_state(second, region)}
    if region is not None:  # the other half is in another rank's file
        files["optim/distrib_optim_pp0_tp1_cp0_dp0.pt"] = muon_state(second, replace(region, flat=(6, 12)))
    folder = checkpoint(tmp_path / "actor", files)
    main = torch.zeros(4, 3)
    part = part_of(inner=AdaptiveMuon([main]))
    with pytest.raises(CheckpointMismatchError) as caught:
        planner(folder).plan(part, [state_of(A, main)], False)
    assert f"optimizer state of {A}: {words}: set reset_moments=True" in str(caught.value)
    anew = planner(folder, reset_moments=True).plan(part, [state_of(A, main)], False)
    assert (len(anew.mains), anew.state) == (1, ())


# -- what is missing ---------------------------------------------------------------------------------------


def test_a_parameter_that_was_not_trained_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", *adam_state(B), model={A: torch.zeros(6)})
    main = torch.zeros(6)
    with pytest.raises(CheckpointMismatchError) as caught:
        planner(folder).plan(part_of(main), [state_of(A, main)], False)
    words = f"{OPTIMIZER_FILE}: tensor {A} (param): wanted global shape [6], found no such tensor: the saved"
    assert str(caught.value).startswith(words)


def test_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", *adam_state(B))
    main = torch.zeros(6)
    with pytest.raises(CheckpointMismatchError, match=r"^optim/.*: tensor .* found no such tensor in the checkpoint: "):
        planner(folder).plan(part_of(main), [state_of(A, main)], False)


def test_a_parameter_of_which_only_a_moment_is_stored(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", shard(A, values(), "exp_avg"))
    main = torch.zeros(6)
    with pytest.raises(CheckpointMismatchError, match=r"found no such tensor in the checkpoint: build the model"):
        planner(folder).plan(part_of(main), [state_of(A, main)], False)


def test_a_moment_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "actor", shard(A, values(), "param"), *(shard(A, values(5), kind) for kind in MOMENTS))
    main = torch.zeros(6)
    words = (
        r"tensor .* \(exp_avg\): wanted global shape \[6\], found global shape \[5\]: build the model that was saved"
    )
    with pytest.raises(CheckpointMismatchError, match=words):
        planner(folder).plan(part_of(main), [state_of(A, main)], False)


@pytest.mark.parametrize("which", ["main", "moment"])
def test_state_without_memory_is_refused(which: str, tmp_path: Path) -> None:
    """megatron has offloaded it."""
    folder = stored(tmp_path / "actor", *adam_state(A))
    main, moment = torch.zeros(6), torch.zeros(6)
    (main if which == "main" else moment).untyped_storage().resize_(0)
    state = state_of(A, main, moments={"exp_avg": moment})
    kind = "param" if which == "main" else "exp_avg"
    with pytest.raises(UnsupportedError, match=rf"^tensor .* \({kind}\) has no memory .* device before load\(\)$"):
        planner(folder).plan(part_of(main), [state], False)


# -- scaled state, and halves ------------------------------------------------------------------------------


def fused(parameter: torch.Tensor, **options: Any) -> OptimizerPart:
    """transformer-engine's FusedAdam after a step, so that it has state."""
    inner = FusedAdam([parameter], master_weights=True, **options)
    inner.param_groups[0]["step"] = 1
    inner.initialize_state(parameter, inner._has_remainders(parameter))
    return part_of(inner=inner)


def live_state(part: OptimizerPart, parameter: torch.Tensor, name: str = A) -> ParameterState:
    kept = part.inner.state[parameter]
    main = kept["master_param"]
    main = main if isinstance(main, torch.Tensor) else main._data
    upper = parameter if main.dtype == torch.int16 else None
    return state_of(name, main, key=parameter, moments=part.state_of(parameter), upper=upper)


def scaled(kind: str, elements: torch.Tensor, scale: float) -> list[TensorWrite]:
    dtype = "uint8" if elements.dtype == torch.uint8 else "float16"
    return [
        shard(A, elements, kind, coding=Coding(dtype, scale=f"{kind}.scale")),
        shard(A, torch.tensor([scale]), f"{kind}.scale", region=SCALE_REGION),
    ]


def test_scaled_state_of_the_same_form_is_taken_as_it_is(tmp_path: Path) -> None:
    elements = torch.tensor([1.0, -2.0, 3.0, 0.5, 65504.0, 6e-8], dtype=torch.float16)
    rest = [shard(A, values(), kind) for kind in ("param", "exp_avg_sq")]
    folder = stored(tmp_path / "actor", *scaled("exp_avg", elements, 0.125), *rest)
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    part = fused(parameter, exp_avg_dtype=torch.float16)
    plan = planner(folder).plan(part, [live_state(part, parameter)], False)
    assert [each.rounding for each in plan.state] == [None, None, None]
    fill(folder, plan)
    assert torch.equal(part.inner.state[parameter]["exp_avg"], elements)
    assert part.inner._scales[parameter]["exp_avg"].item() == 0.125


@pytest.mark.parametrize(
    ("stored_dtype", "kept", "rounding"),
    [
        (torch.float16, torch.uint8, "exp_avg: float32 to scaled uint8"),
        (torch.uint8, torch.float16, "exp_avg: float32 to scaled float16"),
        (torch.float16, torch.float32, None),
        (torch.float32, torch.float16, "exp_avg: float32 to scaled float16"),
    ],
)
def test_scaled_state_of_another_form_is_scaled_anew(
    stored_dtype: torch.dtype, kept: torch.dtype, rounding: str | None, tmp_path: Path
) -> None:
    wanted = torch.tensor([1.0, -2.0, 3.0, 0.5, 8.0, 0.25])
    if stored_dtype == torch.float32:
        writes = [shard(A, wanted, "exp_avg")]
    else:
        elements = (wanted / 0.5).to(torch.float8_e4m3fn if stored_dtype == torch.uint8 else torch.float16)
        writes = scaled("exp_avg", elements.view(stored_dtype), 0.5)
    folder = stored(tmp_path / "actor", shard(A, values(), "param"), *writes, shard(A, values(), "exp_avg_sq"))
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    part = fused(parameter, exp_avg_dtype=kept)
    plan = planner(folder).plan(part, [live_state(part, parameter)], False)
    assert [each.rounding for each in plan.state if each.rounding] == ([rounding] if rounding else [])
    fill(folder, plan)
    found = part.inner.get_unscaled_state(parameter, "exp_avg")
    assert torch.allclose(found, wanted, rtol=0.07, atol=0)


def test_elements_of_a_part_of_a_scaled_shard_are_scaled_anew(tmp_path: Path) -> None:
    """The stored scale belongs to all of its elements."""
    wanted = torch.arange(1.0, 13.0)
    folder = stored(
        tmp_path / "actor",
        shard(A, values(12), "param"),
        *scaled("exp_avg", (wanted / 2).half(), 2.0),
        shard(A, values(12), "exp_avg_sq"),
    )
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    part = fused(parameter, exp_avg_dtype=torch.float16)
    state = replace(live_state(part, parameter), region=Region.whole((12,)).with_flat(3, 9))
    plan = planner(folder).plan(part, [state], False)
    assert [each.rounding for each in plan.state] == ["exp_avg: float32 to scaled float16", None]
    fill(folder, plan)
    assert torch.allclose(part.inner.get_unscaled_state(parameter, "exp_avg"), wanted[3:9], rtol=1e-3)


def halves_of(whole: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[TensorWrite]]:
    """The model's tensor, and the optimizer's remainders of it."""
    upper, lower = split_halves(whole)
    coding = Coding("int16", upper="model")
    moments = [shard(A, whole, kind) for kind in MOMENTS]
    return {A: upper}, [shard(A, lower, "param", coding=coding), *moments]


def test_halves_of_the_same_form_are_taken_as_they_are(tmp_path: Path) -> None:
    whole = values()
    model, optimizer = halves_of(whole)
    folder = stored(tmp_path / "actor", *optimizer, model=model)
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    part = fused(parameter, store_param_remainders=True)
    plan = planner(folder).plan(part, [live_state(part, parameter)], False)
    (main,) = plan.mains
    assert (main.dtype, main.encode, main.rounding) == (torch.int16, None, None)
    fill(folder, plan)
    assert torch.equal(part.inner.state[parameter]["master_param"], split_halves(whole)[1])
    assert not parameter.any(), "the model's tensor is filled with the model"


@pytest.mark.parametrize("form", ["halves without the model", "whole values", "whole values into halves"])
def test_halves_of_another_form_are_made_of_whole_values(form: str, tmp_path: Path) -> None:
    whole = values()
    model, optimizer = halves_of(whole)
    if form == "whole values into halves":
        optimizer[0] = shard(A, whole, "param")
    folder = stored(tmp_path / "actor", *optimizer, model=model)
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    part = fused(parameter, store_param_remainders=form != "whole values")
    contents = ("optimizer",) if form == "halves without the model" else ("model", "optimizer")
    plan = planner(folder, load_contents=contents).plan(part, [live_state(part, parameter)], False)
    assert [each.rounding for each in plan.mains] == [None]
    fill(folder, plan)
    if form == "whole values":
        assert torch.equal(part.inner.state[parameter]["master_param"], whole)
    else:
        assert torch.equal(part.inner._main(parameter), whole)


def test_a_main_parameter_that_the_first_step_makes_is_not_filled(tmp_path: Path) -> None:
    """Before the first step, the checkpoint has only the model's tensor, of which FusedAdam will make it."""
    weight = values().bfloat16()
    folder = stored(tmp_path / "actor", shard(A, weight, "param"), model={A: weight})
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    part = part_of(inner=FusedAdam([parameter], master_weights=True, store_param_remainders=True))
    state = state_of(A, parameter)
    plan = planner(folder).plan(part, [state], False)
    assert (plan.mains, plan.state) == ((), ())
    assert plan.newly_started == ((part, state, False),)
    without_model = planner(folder, load_contents=("optimizer",)).plan(part, [state], False)
    assert len(without_model.mains) == 1


@pytest.mark.parametrize(
    ("dtype", "kinds", "starts_anew", "filled"),
    [
        (torch.bfloat16, MOMENTS, False, True),
        (torch.bfloat16, MOMENTS, True, False),  # the first step makes it
        (torch.bfloat16, (), False, False),
        (torch.float32, (), False, True),  # it is more precise than the model's tensor
    ],
)
@pytest.mark.parametrize("is_model_view", [False, True])
def test_when_the_first_step_makes_a_main_parameter(
    dtype: torch.dtype, kinds: tuple[str, ...], starts_anew: bool, filled: bool, is_model_view: bool, tmp_path: Path
) -> None:
    """Before it, FusedAdam has ranges of the model's own parameters."""
    writes = [shard(A, values().to(dtype), "param"), *(shard(A, values(), kind) for kind in kinds)]
    folder = stored(tmp_path / "actor", *writes, model={A: values().bfloat16()})
    parameter = torch.zeros(6, dtype=torch.bfloat16)
    part = part_of(inner=FusedAdam([parameter], master_weights=True))
    plan = planner(folder).plan(part, [state_of(A, parameter, is_model_view=is_model_view)], starts_anew)
    assert [main for _, _, main in plan.all_newly_started] == [filled]
    assert len(plan.mains) == filled
    if filled:
        fill(folder, plan)
        assert torch.equal(part.inner.state[parameter]["master_param"], values().to(dtype).float())


# -- whatever is stored --------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4), st.data())
def test_any_cut_of_a_parameter_is_filled_with_its_elements(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Stored by ranks with these borders, into what a rank of another layout owns."""
    borders = sorted({0, 12, *data.draw(st.sets(st.integers(1, 11), max_size=3))})
    whole = values(12)
    files = {
        f"optim/distrib_optim_pp0_tp0_cp0_dp{n}.pt": [
            shard(A, whole[first:last] + add, kind, Region.whole((12,)).with_flat(first, last))
            for add, kind in enumerate(("param", *MOMENTS))
        ]
        for n, (first, last) in enumerate(pairwise(borders))
    }
    folder = checkpoint(tmp_path_factory.mktemp("cut") / "actor", files)
    for first, last in (sorted(each) for each in ranges):
        main = torch.zeros(last - first)
        part = part_of(main)
        state = state_of(A, main, region=Region.whole((12,)).with_flat(first, last))
        fill(folder, planner(folder).plan(part, [state], False))
        assert torch.equal(main, whole[first:last])
        assert torch.equal(part.inner.state[main]["exp_avg"], whole[first:last] + 1)
