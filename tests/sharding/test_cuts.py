"""Tests cuts by name against megatron's own axis maps, and against the regions in checkpoints."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.sharding.assignment import PipelineAssignment, even_ranges
from mcore_ckpt.sharding.cuts import Cut, axes_of, find_cut
from mcore_ckpt.sharding.pipeline import StageLayers, parse_layout, parse_pattern
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.vocabulary import padded_rows

LAYER = "decoder.layers.3."
MLP = f"{LAYER}mlp."
ATTENTION = f"{LAYER}self_attention."


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("embedding.word_embeddings.weight", (0,)),
        ("embedding.position_embeddings.weight", (None,)),
        ("output_layer.weight", (0,)),
        ("output_layer.bias", (0,)),
        ("decoder.final_layernorm.weight", (None,)),
        (f"{ATTENTION}linear_qkv.weight", (0,)),
        (f"{ATTENTION}linear_qkv.bias", (0,)),
        (f"{ATTENTION}linear_qkv.layer_norm_weight", (None,)),
        (f"{ATTENTION}linear_proj.weight", (1,)),
        (f"{ATTENTION}linear_proj.bias", (None,)),
        (f"{ATTENTION}q_layernorm.weight", (None, 0)),
        (f"{ATTENTION}k_layernorm.weight", (None, 0)),
        (f"{ATTENTION}kv_layernorm.weight", (None,)),
        (f"{ATTENTION}core_attention.softmax_offset", (0,)),
        (f"{ATTENTION}linear_q_proj.weight", (0,)),
        (f"{ATTENTION}linear_q_up_proj.weight", (0,)),
        (f"{ATTENTION}linear_q_up_proj.layer_norm_weight", (None,)),
        (f"{ATTENTION}linear_q_down_proj.weight", (None, 0)),
        (f"{ATTENTION}linear_kv_down_proj.weight", (None, 0)),
        (f"{ATTENTION}linear_kv_up_proj.weight", (0,)),
        (f"{MLP}linear_fc1.weight", (0,)),
        (f"{MLP}linear_fc1.layer_norm_weight", (None,)),
        (f"{MLP}linear_fc2.weight", (1,)),
        (f"{MLP}linear_fc2.bias", (None,)),
        (f"{MLP}router.weight", (None,)),
        (f"{MLP}router.expert_bias", (None,)),
        (f"{MLP}shared_experts.linear_fc1.weight", (0,)),
        (f"{MLP}shared_experts.linear_fc2.weight", (1,)),
        (f"{MLP}shared_experts.gate_weight", (None,)),
        (f"{MLP}experts.local_experts.7.linear_fc1.weight", (0,)),
        (f"{MLP}experts.local_experts.7.linear_fc2.weight", (1,)),
        (f"{MLP}experts.linear_fc1.weight7", (0,)),
        (f"{MLP}experts.linear_fc1.bias7", (0,)),
        (f"{MLP}experts.linear_fc2.weight17", (1,)),
        (f"{MLP}experts.linear_fc2.bias17", (None,)),
        ("mtp.layers.0.eh_proj.weight", (0,)),
        ("mtp.layers.0.enorm.weight", (None,)),
        ("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", (1,)),
        (f"{ATTENTION}in_proj.weight", (0,)),
        (f"{ATTENTION}in_proj.layer_norm_weight", (None,)),
        (f"{ATTENTION}conv1d.weight", (0,)),
        (f"{ATTENTION}A_log", (0,)),
        (f"{ATTENTION}dt_bias", (0,)),
        (f"{ATTENTION}out_norm.weight", (None,)),
        (f"{ATTENTION}out_proj.weight", (1,)),
        (f"{ATTENTION}out_proj.bias", (None,)),
        (f"{LAYER}mixer.in_proj.weight", (0,)),
        (f"{LAYER}mixer.in_proj.layer_norm_weight", (None,)),
        (f"{LAYER}mixer.conv1d.bias", (0,)),
        (f"{LAYER}mixer.D", (0,)),
        (f"{LAYER}mixer.norm.weight", (0,)),
        (f"{LAYER}mixer.out_proj.weight", (1,)),
        (f"{LAYER}norm.weight", (None,)),
        ("vision.encoder.conv1d.weight", (None,)),
        # A tower of megatron's layers is cut, and one of transformers' is not, though it calls some layers alike.
        (f"vision_model.{ATTENTION}linear_qkv.bias", (0,)),
        (f"vision_model.{LAYER}mlp.linear_fc2.weight", (1,)),
        ("vision_model.decoder.deepstack_merger_list.1.linear_fc1.weight", (0,)),
        ("vision_model.projection.encoder.linear_fc2.weight", (1,)),
        ("vision_model.merger.patch_norm.weight", (None,)),
        ("vision_model.patch_embed.proj.weight", (None,)),
        ("visual.blocks.3.mlp.linear_fc1.weight", (None,)),
        ("visual.merger.linear_fc2.weight", (None,)),
        ("vision_model.blocks.3.mlp.linear_fc1.weight", (None,)),
        ("vision_model.merger.linear_fc1.weight", (0, None)),
    ],
)
def test_axes_by_name(name: str, axes: tuple[int | None, ...]) -> None:
    assert axes_of(name) == axes


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("cut", [Cut(0), Cut(1), Cut(0, (1, 1)), Cut(0, (2, 1, 1)), Cut(1, (1, 1)), Cut(None)])
def test_parts_make_up_the_whole(cut: Cut, size: int) -> None:
    seen = {rank: cut.region((16, 8), rank, size) for rank in range(size)}
    covered = torch.zeros(16, 8, dtype=torch.int64)
    for region in seen.values():
        region.check()
        for _, box in region.boxes():
            covered[tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))] += 1
    copies = size if cut.axis is None else 1
    assert covered.unique().tolist() == [copies]


def test_gate_and_up_are_cut_each_by_itself() -> None:
    region = Cut(0, (1, 1)).region((8, 3), 1, 2)
    assert [(p.local_offset, p.shape, p.global_offset) for p in region.pieces] == [
        ((0, 0), (2, 3), (2, 0)),
        ((2, 0), (2, 3), (6, 0)),
    ]


def test_sections_of_several_lengths() -> None:
    region = Cut(0, (2, 2, 1)).region((20, 3), 1, 2)
    assert region.local_shape == (10, 3)
    assert [(p.local_offset, p.shape, p.global_offset) for p in region.pieces] == [
        ((0, 0), (4, 3), (4, 0)),
        ((4, 0), (4, 3), (12, 0)),
        ((8, 0), (2, 3), (18, 0)),
    ]


@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    size=st.sampled_from([1, 2, 4]),
    saved=st.sampled_from([1, 2, 4]),
)
def test_sections_are_found_in_what_any_rank_has(lengths: list[int], size: int, saved: int) -> None:
    """The cut found under one size gives megatron's parts under another size, section by section."""
    whole = torch.arange(4 * sum(lengths) * 2).view(-1, 2)
    rows = [4 * length for length in lengths]
    shape = tuple(whole.shape)
    cut = find_cut("mixer.in_proj.weight", {saved - 1: Cut(0, tuple(rows)).region(shape, saved - 1, saved)}, saved)
    for rank in range(size):
        wanted = torch.cat([section.chunk(size)[rank] for section in whole.split(rows)])
        region = cut.region(shape, rank, size)
        found = torch.cat([whole[p.global_offset[0] : p.global_offset[0] + p.shape[0]] for p in region.pieces])
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", [f"{ATTENTION}in_proj.weight", f"{LAYER}mixer.conv1d.bias"])
@pytest.mark.parametrize("saved", [1, 2])
def test_a_mixer_in_one_piece_is_not_cut_anew(name: str, saved: int) -> None:
    with pytest.raises(ValueError, match=rf"where each section begins\. Keep the tensor-parallel size of {saved}"):
        find_cut(name, {0: Cut(0).region((8, 3), 0, saved)}, saved)


def test_what_a_checkpoint_shows_must_be_what_the_name_says() -> None:
    columns = {rank: Cut(0).region((8, 6), rank, 2) for rank in range(2)}
    rows = {rank: Cut(1).region((8, 6), rank, 2) for rank in range(2)}
    assert find_cut("a.linear_qkv.weight", columns, 2) == Cut(0)
    assert find_cut("a.linear_q_down_proj.weight", columns, 2) == Cut(0)
    assert find_cut("a.linear_q_down_proj.weight", dict.fromkeys((0, 1), Region.whole((8, 6))), 2) == Cut(None)
    assert find_cut("a.linear_fc1.weight", {0: Cut(0, (1, 1)).region((8, 6), 0, 1)}, 1) == Cut(0, (1, 1))
    with pytest.raises(ValueError, match="cut along axis 0, but rank 0 of 2 has"):
        find_cut("a.linear_qkv.weight", rows, 2)
    with pytest.raises(ValueError, match="not cut, but rank 0 of 2 has"):
        find_cut("a.something_new.weight", columns, 2)


@pytest.mark.parametrize(
    ("cut", "shape", "words"),
    [
        (Cut(0), (9, 4), "axis 0 of shape [9, 4] cannot be divided by 2"),
        (Cut(1), (4,), "axis 1 of shape [4] cannot be divided by 2"),
        (Cut(0, (1, 1)), (6, 4), "in sections of 3 + 3 cannot be divided by 2"),
        (Cut(0, (2, 1)), (6, 4), "in sections of 4 + 2 cannot be divided by 4"),
        (Cut(0, (2, 1)), (8, 4), "in proportions of 2 + 1 cannot be divided by 2"),
    ],
)
def test_axes_that_do_not_divide(cut: Cut, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        cut.region(shape, 0, 4 if "by 4" in words else 2)


@pytest.mark.parametrize(("sizes", "parts"), [([3, 0, 5], 2), ([1], 4), ([], 3), ([10, 7, 1, 30], 5)])
def test_even_ranges_have_each_element_once(sizes: list[int], parts: int) -> None:
    ranges = even_ranges(sizes, parts)
    assert len(ranges) == parts
    lengths = [sum(stop - start for _, start, stop in part) for part in ranges]
    assert max(lengths) - min(lengths) <= 1
    flat = [(number, at) for part in ranges for number, start, stop in part for at in range(start, stop)]
    assert flat == [(number, at) for number, size in enumerate(sizes) for at in range(size)]


def test_where_tensors_are_in_a_pipeline() -> None:
    stages = {(0, 0): StageLayers((0, 1), ()), (1, 0): StageLayers((2,), ()), (2, 0): StageLayers((), ())}
    placement = PipelineAssignment(stages)
    assert placement.rank_of("embedding.word_embeddings.weight") == 0
    assert placement.rank_of("decoder.layers.2.mlp.linear_fc1.weight") == 1
    assert placement.rank_of("decoder.layers.7.mlp.linear_fc1.weight") is None
    assert placement.rank_of("decoder.final_layernorm.weight") == 2
    assert placement.rank_of("vision.patch.weight") is None
    assert placement.rank_of("language_model.decoder.layers.2.mlp.linear_fc1.weight") == 1
    assert placement.rank_of("language_model.output_layer.weight") == 2
    # The pipeline does not cut a tower.
    assert placement.rank_of("vision_model.decoder.layers.2.mlp.linear_fc1.weight") == 0
    assert placement.rank_of("vision_model.decoder.final_layernorm.weight") == 0
    assert placement.rank_of("visual.blocks.2.norm1.weight") == 0
    # With MTP the norm follows the last decoder layer.
    with_mtp = PipelineAssignment({**stages, (2, 0): StageLayers((), (0,))})
    assert with_mtp.rank_of("decoder.final_layernorm.weight") == 1
    assert with_mtp.rank_of("mtp.layers.0.eh_proj.weight") == 2


@pytest.mark.parametrize("text", ["Et|t*2|t|t*2L", "Ettt|(tt|)*29,m|L", "E|(t|)*3L", "EttL"])
def test_pipeline_layouts_are_read_as_megatron_reads_them(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert parse_layout(text) == tuple(tuple(layer.name for layer in stage) for stage in theirs)


@given(
    st.lists(st.text("MG-ED+", max_size=3), min_size=1, max_size=4).filter(any),
    st.text("MG*-E", min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_hybrid_patterns_are_read_as_megatron_reads_them(segments: list[str], mtp: str, depths: int) -> None:
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern

    text = "|".join(segments) + f"/{mtp}" * depths
    theirs = parse_hybrid_pattern(text)
    found = parse_pattern(text)
    assert [stage.count("decoder") for stage in found] == [len(part) for part in theirs.main_pattern.split("|")]
    assert [stage.count("mtp") for stage in found] == [0] * (len(segments) - 1) + [theirs.mtp_num_depths]


@pytest.mark.parametrize("text", ["", "|", "/*-", "*-/", "*-/|", "*-/M/E", "Et|tL", "* -"])
def test_patterns_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="hybrid layer pattern"):
        parse_pattern(text)


@pytest.mark.parametrize("text", ["Ex|L", "t|tL", "Et|t", "EtL|L", ""])
def test_layouts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="pipeline layout"):
        parse_layout(text)


def test_padded_rows() -> None:
    assert padded_rows(131, 2, None, None) == 132
    assert padded_rows(136, 2, None, None) == 136
    assert padded_rows(136, 4, 131, 4) == 144
    assert padded_rows(50304, 2, 50257, None) == 50432
    with pytest.raises(ValueError, match="131 rows"):
        padded_rows(131, 2, 132, None)
