"""Compares layer numbers from the config alone with megatron's own functions."""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mcore_ckpt.sharding.pipeline import PipelineSplit, StageLayers


def stages(split: PipelineSplit) -> list[tuple[int, int]]:
    """The pairs (pipeline rank, virtual stage) in the order in which layers fill them."""
    return [(pp, vp) for vp, pp in product(range(split.vpp), range(split.pp))]


def megatrons_decoder(split: PipelineSplit, pp_rank: int, vp_stage: int) -> tuple[int, ...]:
    config: Any = SimpleNamespace(
        num_layers=split.num_layers,
        pipeline_model_parallel_size=split.pp,
        virtual_pipeline_model_parallel_size=split.vpp if split.vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        account_for_embedding_in_pipeline_split=split.account_for_embedding,
        account_for_loss_in_pipeline_split=split.account_for_loss,
    )
    vp = vp_stage if split.vpp > 1 else None
    start = get_transformer_layer_offset(config, vp_stage=vp, pp_rank=pp_rank)
    return tuple(range(start, start + get_num_layers_to_build(config, vp_stage=vp, pp_rank=pp_rank)))


def assert_each_layer_once(split: PipelineSplit) -> None:
    held = [split.stage(*stage) for stage in stages(split)]
    assert [layer for stage in held for layer in stage.decoder] == list(range(split.num_layers))
    assert [layer for stage in held for layer in stage.mtp] == list(range(split.mtp_num_layers))


def splits_of_megatron() -> Iterator[PipelineSplit]:
    """Every split of up to 12 layers on up to 4 ranks that megatron's own asserts accept."""
    ends: list[int | None] = [None, 1, 2, 3, 4]
    flags = [False, True]
    for pp, vpp, layers in product(range(1, 5), range(1, 4), range(1, 13)):
        if pp == 1 and vpp > 1:
            continue
        for first, last, embedding, loss in product(ends, ends, flags, flags):
            split = PipelineSplit(layers, pp, vpp, first, last, embedding, loss)
            usual = (first, last, embedding, loss) == (None, None, False, False)
            if fits(split) if pp > 1 else usual:
                yield split


def fits(split: PipelineSplit) -> bool:
    """Megatron's conditions: TransformerConfig.__post_init__ and get_num_layers_to_build (0.16.1)."""
    ends = [n for n in (split.first, split.last) if n is not None]
    if ends and (split.account_for_embedding or split.account_for_loss):
        return False
    middle = split.pp - len(ends)
    rest = split.num_layers - sum(ends) + split.account_for_embedding + split.account_for_loss
    if middle == 0:
        return rest == 0 and split.vpp == 1  # get_transformer_layer_offset divides by 0 otherwise
    if rest <= 0 or rest % middle or any(n % split.vpp for n in (*ends, rest // middle)):
        return False
    return rest // middle // split.vpp >= 1


def test_every_split_that_megatron_accepts() -> None:
    count = 0
    for split in splits_of_megatron():
        for stage in stages(split):
            assert split.stage(*stage).decoder == megatrons_decoder(split, *stage), (split, stage)
        assert_each_layer_once(split)
        count += 1
    assert count > 200


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, int, int, int, int]:
    """A layout string with its pp, vpp, number of decoder layers and number of MTP layers."""
    pp, vpp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    assume(pp * vpp > 1)
    rows = ["t" * draw(st.integers(0, 4)) for _ in range(pp * vpp)]
    mtp = draw(st.integers(0, 2))
    rows[0] = "E" + rows[0]
    at = draw(st.integers(max((vpp - 1) * pp, 1), pp * vpp - 1))
    if mtp:
        # Megatron requires MTP layers after decoder layers, and all in one stage of the last virtual stages.
        rows[at + 1 :] = [""] * (pp * vpp - at - 1)
        rows[at] += "m" * mtp
    rows[-1] += "L"
    text = "|".join(rows)
    return text, pp, vpp, text.count("t"), mtp


@settings(deadline=None)
@given(layouts())
def test_layout_strings(case: tuple[str, int, int, int, int]) -> None:
    text, pp, vpp, num_layers, mtp = case
    megatrons = PipelineParallelLayerLayout(text, pp)
    megatrons.validate_layer_layout(num_layers, mtp)
    words = tuple(tuple(word.name for word in row) for row in PipelineParallelLayerLayout.parse_str_to_list(text))
    split = PipelineSplit(num_layers, pp, vpp, layout=words, mtp_num_layers=mtp)
    with pytest.MonkeyPatch.context() as patch:
        # Without this, get_layer_id_list treats every vp_stage as 0.
        patch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp)
        for pp_rank, vp_stage in stages(split):
            expected = StageLayers(
                *(
                    tuple(megatrons.get_layer_id_list(kind, vp_stage=vp_stage, pp_rank=pp_rank))
                    for kind in (LayerType.decoder, LayerType.mtp)
                )
            )
            assert split.stage(pp_rank, vp_stage) == expected
    assert_each_layer_once(split)


@given(pp=st.integers(1, 6), vpp=st.integers(1, 4), per_stage=st.integers(1, 5), mtp=st.integers(0, 3))
def test_without_a_layout_mtp_is_on_the_last_stage(pp: int, vpp: int, per_stage: int, mtp: int) -> None:
    split = PipelineSplit(pp * vpp * per_stage, pp, vpp, mtp_num_layers=mtp)
    assert split.stage(pp - 1, vpp - 1).mtp == tuple(range(mtp))
    assert_each_layer_once(split)


@pytest.mark.parametrize(
    ("split", "stage", "reason"),
    [
        pytest.param(PipelineSplit(7, pp=2), (0, 0), "7 layers cannot be divided among 2 pipeline", id="uneven"),
        pytest.param(PipelineSplit(6, pp=2, vpp=2), (1, 1), "3 layers .* 2 virtual stages", id="virtual"),
        pytest.param(PipelineSplit(9, pp=3, first=2), (1, 0), "7 layers .* 2 pipeline", id="middle"),
        pytest.param(PipelineSplit(4, pp=2), (2, 0), "no stage pp 2", id="no-rank"),
        pytest.param(PipelineSplit(4, pp=2), (0, 1), "no stage pp 0, vp 1", id="no-virtual-stage"),
        pytest.param(PipelineSplit(2, pp=2, vpp=2, layout=(("decoder",),) * 2), (0, 0), "has 2 stages", id="layout"),
    ],
)
def test_what_does_not_divide_is_refused(split: PipelineSplit, stage: tuple[int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        split.stage(*stage)
