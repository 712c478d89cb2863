"""What a model computes with the same bytes: read from live objects and from config.json, and compared by field."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mcore_ckpt.checkpoint.model_facts import _DEFAULTS, _TABLE, config_facts, different_facts
from mcore_ckpt.formats.torch_dist.arguments import facts_of_arguments
from mcore_ckpt.load.same_model import differences_to_live
from mcore_ckpt.models import model_from_config, to_mcore_config
from mcore_ckpt.models.stated_facts import check_rows
from mcore_ckpt.state.live_facts import read_facts
from tests.support.tiny_models import NAMES, make_config

# A model that each kind of facts is true of.
BASE: dict[str, dict[str, Any]] = {
    "any": {},
    "heads": {},
    "latent": {"multi_latent_attention": True},
    "rotary": {},
    "llama3 rotary": {"rope_scaling": True},
    "latent yarn": {"multi_latent_attention": True, "rope_type": "yarn"},
    "yarn": {"position_embedding_type": "yarn"},
    "window": {"window_size": [128, 0]},
    "dsa": {"experimental_attention_variant": "dsa"},
    "delta net": {"experimental_attention_variant": "gated_delta_net"},
    "hybrid": {"is_hybrid_model": True, "hybrid_layer_pattern": "M*-"},
    "experts": {"num_moe_experts": 8},
    "repeated mtp": {"mtp_use_repeated_layer": True, "mtp_num_layers": 1},
    "mup": {"use_mup": True},
}
HYBRID_WINDOW = {"is_hybrid_model": True, "window_size": [1, 0], "num_layers": 5}
COMMON = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "position_embedding_type": "rope"}


def names_of(saved: dict[str, Any], live: dict[str, Any]) -> list[str]:
    return [each.name for each in different_facts(saved, live)]


@pytest.mark.parametrize("kind", _TABLE)
def test_each_fact_is_read_and_compared(kind: str) -> None:
    """Over the whole table, so a new row is held to it at once."""
    saved = {**COMMON, **BASE[kind]}
    for name in _TABLE[kind]:
        fields = {**saved, name: saved.get(name, 3)}
        ours, theirs = (config_facts(SimpleNamespace(**each), {}) for each in (fields, {**fields, name: 5}))
        if name in ("moe_router_load_balancing_type", "is_hybrid_model", "rope_scaling", "multi_latent_attention"):
            continue  # 3 and 5 are the same, or say what the other facts are
        if name in ("experimental_attention_variant", "position_embedding_type", "rope_type"):
            assert name in names_of(ours, theirs)
            continue
        assert names_of(ours, theirs) == [name], name
        assert not names_of(ours, ours)


@pytest.mark.parametrize("name", NAMES)
def test_config_json_says_what_the_live_model_is(name: str) -> None:
    described = model_from_config(make_config(name))
    known = to_mcore_config(described)
    stated = config_facts(known.fields, known.gpt)
    assert check_rows(stated, described) == []
    live = config_facts(known.transformer_config(hidden_dropout=0.1), known.gpt)
    assert stated["num_attention_heads"] == live["num_attention_heads"]
    assert names_of(stated, live) == names_of(live, stated) == []


def test_the_kind_that_was_seen() -> None:
    """Same shapes: 4 heads of 8 and 2 of 16, interleaved pairs and halves, GELU and SiLU."""
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "use_cpu_initialization": True}
    saved = TransformerConfig(**sizes, num_attention_heads=4, rotary_interleaved=True)
    live = TransformerConfig(**sizes, num_attention_heads=2, activation_func=torch.nn.functional.silu)
    rope = {"position_embedding_type": "rope", "rotary_base": 10000}
    found = {
        each.name: (each.saved, each.live)
        for each in different_facts(config_facts(saved, rope), config_facts(live, rope))
    }
    assert found == {
        "num_attention_heads": (4, 2),
        "num_query_groups": (4, 2),
        "kv_channels": (8, 16),
        "activation_func": ("gelu", "silu"),
        "rotary_interleaved": (True, False),
    }


@pytest.mark.parametrize(
    ("fields", "one", "other", "may_change"),
    [
        ({}, {"position_embedding_type": "rope"}, {"position_embedding_type": "yarn"}, True),
        ({}, {"position_embedding_type": "yarn"}, {"position_embedding_type": "learned_absolute"}, False),
        ({"position_embedding_type": "yarn"}, {"rotary_base": 10000}, {"rotary_base": 1000000}, True),
        ({"position_embedding_type": "yarn"}, {"rotary_percent": 1.0}, {"rotary_percent": 0.5}, False),
        ({"multi_latent_attention": True}, {"rope_type": "rope"}, {"rope_type": "yarn"}, True),
        ({}, {"rotary_base_per_layer": [1, 2]}, {"rotary_base_per_layer": [2, 2]}, True),
        ({}, {"attn_mask_type": AttnMaskType.causal}, {"attn_mask_type": AttnMaskType.padding}, False),
        ({}, {"activation_func": torch.nn.functional.silu}, {"activation_func": lambda x: x}, False),
        ({"mtp_use_repeated_layer": True}, {"mtp_num_layers": 1}, {"mtp_num_layers": 2}, False),
    ],
)
def test_what_is_told_and_what_a_longer_context_may_change(
    fields: dict[str, Any], one: dict[str, Any], other: dict[str, Any], may_change: bool
) -> None:
    ours, theirs = (config_facts(SimpleNamespace(**{**COMMON, **fields, **each}), {}) for each in (one, other))
    [found] = different_facts(ours, theirs)
    assert (found.name, found.may_change) == (next(iter(one)), may_change)


def test_the_mask_is_that_of_the_first_attention() -> None:
    chunk = model({})
    layers = [SimpleNamespace(), SimpleNamespace(self_attention=SimpleNamespace(attn_mask_type=AttnMaskType.no_mask))]
    vars(chunk)["decoder"] = SimpleNamespace(layers=layers)
    assert read_facts([chunk])["attn_mask_type"] == "no_mask"


def test_a_longer_context_changes_the_base_on_purpose() -> None:
    config = MLATransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, rope_type="yarn")
    longer = copy.copy(config)
    longer.rotary_base, longer.rotary_scaling_factor = 1000000, 80
    [scale, base] = sorted(
        different_facts(config_facts(config, {}), config_facts(longer, {})), key=lambda each: each.saved
    )
    assert (base.name, scale.name) == ("rotary_base", "rotary_scaling_factor")
    assert base.may_change
    assert scale.may_change


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"moe_layer_freq": 1}, {"moe_layer_freq": [1, 1, 1, 1]}),
        ({"moe_layer_freq": 2}, {"moe_layer_freq": [1, 0, 1, 0]}),
        ({"moe_router_topk_scaling_factor": None}, {"moe_router_topk_scaling_factor": 1.0}),
        ({"moe_router_load_balancing_type": "none"}, {"moe_router_load_balancing_type": ["aux_loss"]}),
        ({"softmax_scale": None}, {"softmax_scale": 8**-0.5}),
        ({"num_query_groups": None}, {"num_query_groups": 4}),
        ({"layernorm_epsilon": 1e-5}, {"layernorm_epsilon": 0.00001}),
        ({"no_rope_freq": 2}, {"no_rope_freq": [0, 1, 0, 1]}),
        ({"no_rope_freq": None}, {"no_rope_freq": [0, 0, 0, 0]}),
        ({"attn_mask_type": AttnMaskType.causal}, {"attn_mask_type": AttnMaskType.padding_causal}),
        (
            {"window_size": (1, 0), "window_attn_skip_freq": 2},
            {"window_size": [1, 0], "window_attn_skip_freq": [1, 0] * 2},
        ),
        # Of a HybridModel, only the layers with attention count.
        (
            {**HYBRID_WINDOW, "hybrid_layer_pattern": "M*-M*", "window_attn_skip_freq": [0, 1, 0, 0, 0]},
            {**HYBRID_WINDOW, "hybrid_layer_pattern": "M*|-M*", "window_attn_skip_freq": [1, 1, 1, 1, 0]},
        ),
        # An older megatron lacks the field, and computes with the default.
        ({}, {"qk_l2_norm": False, "mlp_multipliers": [1.0, 1.0]}),
    ],
)
def test_several_forms_of_one_value(one: dict[str, Any], other: dict[str, Any]) -> None:
    base = {**COMMON, "num_moe_experts": 8, "num_layers": 4, "hidden_size": 32}
    first, second = (config_facts(SimpleNamespace(**{**base, **each}), {}) for each in (one, other))
    assert names_of(first, second) == names_of(second, first) == []


def test_functions_are_named() -> None:
    tanh = partial(torch.nn.functional.gelu, approximate="tanh")
    functions = {tanh: "gelu(approximate=tanh)", squared_relu: "squared_relu", torch.nn.SiLU(): "SiLU"}
    functions[lambda x: x] = "unknown"
    for function, name in functions.items():
        assert config_facts(SimpleNamespace(activation_func=function), {})["activation_func"] == name


def test_what_only_other_models_read_is_not_compared() -> None:
    dense = {**COMMON, "num_moe_experts": None, "moe_router_topk": 2, "mamba_state_dim": 128}
    found = config_facts(SimpleNamespace(**dense), {})
    assert not {"moe_router_topk", "mamba_state_dim", "v_head_dim"} & found.keys()
    assert not names_of(found, config_facts(SimpleNamespace(**{**dense, "moe_router_topk": 8}), {}))


def model(config: dict[str, Any], frequencies: list[float] | None = None, **arguments: Any) -> torch.nn.Module:
    found = torch.nn.Module()
    found.config = SimpleNamespace(**{**COMMON, **config})  # type: ignore[assignment]
    rotary = SimpleNamespace(inv_freq=None if frequencies is None else torch.tensor(frequencies))
    vars(found).update(arguments, rotary_pos_emb=rotary)
    return found


def test_frequencies_show_what_no_attribute_does() -> None:
    plain = [10000 ** (-number / 32) for number in range(32)]
    scaled = [value if number < 8 else value / 4 for number, value in enumerate(plain)]
    ours, theirs = read_facts([model({}, plain)]), read_facts([model({}, scaled)])
    assert ours["rotary_base"] == pytest.approx(10000)  # a HybridModel does not keep it
    assert names_of(dict(ours), dict(theirs)) == ["rotary_frequencies"]
    other = read_facts([model({}, [500000 ** (-number / 32) for number in range(32)])])
    assert names_of(dict(ours), dict(other)) == ["rotary_base"]
    of_llama = read_facts([model({}, scaled, rotary_scaling=True, rotary_base=10000)])
    assert of_llama["rope_scaling_factor"] == pytest.approx(4)


def test_a_tower_has_facts_of_its_own() -> None:
    def whole(heads: int) -> torch.nn.Module:
        found = torch.nn.Module()
        found.language_model = model({})
        found.vision_model = model({"num_attention_heads": heads, "activation_func": torch.nn.GELU()})
        return found

    ours, theirs = (dict(read_facts([whole(heads)])) for heads in (2, 4))
    assert ours["vision_model.activation_func"] == "GELU"
    assert names_of(ours, theirs) == ["vision_model.num_attention_heads"]
    assert not names_of(ours, dict(read_facts([model({})])))  # the tensors of the tower are missing


def test_another_head_is_no_other_model() -> None:
    """A critic that starts from a language model: the tensors themselves show it."""
    live = {**COMMON, "share_embeddings_and_output_weights": False}
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(load_contents=("model",), strict_model=True),
        model=config_facts(SimpleNamespace(**live), {}),
    )
    saved = config_facts(SimpleNamespace(**{**live, "share_embeddings_and_output_weights": True}), {})
    assert names_of(saved, trainer.model) == ["share_embeddings_and_output_weights"]  # for `diff`
    assert not differences_to_live(trainer, saved)


def test_arguments_of_megatron_lm() -> None:
    arguments = {
        "num_attention_heads": 4,
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": 8,
        "norm_epsilon": 1e-6,
        "apply_layernorm_1p": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "squared_relu": False,
        "quick_geglu": False,
        "num_experts": None,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
    }
    live = SimpleNamespace(
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=8,
        layernorm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    assert not names_of(dict(facts_of_arguments(arguments)), config_facts(live, {}))
    other = {**arguments, "swiglu": False, "squared_relu": True, "norm_epsilon": 1e-5}
    assert names_of(dict(facts_of_arguments(other)), config_facts(live, {})) == [
        *("layernorm_epsilon", "activation_func", "gated_linear_unit")
    ]
    # Another program has stored a few of them, which say nothing of the others.
    assert not facts_of_arguments({"num_attention_heads": 8})


def test_each_fact_is_in_one_kind() -> None:
    assert sum(map(len, _TABLE.values())) == len(_DEFAULTS)
