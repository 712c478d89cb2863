"""Defines the rules that translate rotary fields of transformers 4 and 5 to megatron's arguments and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.config_fields import HfConfig, HfFields, McoreValues, needed

_OWN = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeFields:
    """The fields of rotary embeddings in a `config.json`, independent of the version of transformers.

    Attributes:
        kind: the value of `rope_type`.
        theta: the base of the frequencies.
        partial: the rotated fraction of each head, from 0 to 1.
        fields: the object `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4).
    """

    kind: str
    theta: float
    partial: float
    fields: Mapping[str, Any]

    @property
    def others(self) -> dict[str, Any]:
        """The entries of `fields` for which this class has no attribute."""
        return {name: value for name, value in self.fields.items() if name not in _OWN}

    def refusal(self, name: str, why: str, value: Any = None) -> UnsupportedError:
        """Returns the error for the field `name` with the value `value`, by default the value in `fields`."""
        value = self.fields.get(name) if value is None else value
        return UnsupportedError(f"config.json: {name} of {self.kind} rotary embeddings is {value!r}: {why}")


def read_rope(hf: HfConfig, default_theta: float, default_partial: float) -> RopeFields:
    """Reads the rotary fields of transformers 5 (`rope_parameters`) or of 4 (`rope_theta`, `rope_scaling`).

    Raises UnsupportedError if `rope_parameters` or `rope_scaling` is not a JSON object, or differs between kinds of
    layers.
    """
    fields = _fields(hf)
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise UnsupportedError(
            "config.json: rope_parameters differ between kinds of layers, but megatron-core has only one set for all "
            "layers"
        )

    def either(name: str, default: float) -> float:
        return next((place[name] for place in (fields, hf) if place.get(name) is not None), default)

    return RopeFields(
        str(fields.get("rope_type") or fields.get("type") or "default"),
        either("rope_theta", default_theta),
        either("partial_rotary_factor", default_partial),
        fields,
    )


def _fields(hf: HfConfig) -> Mapping[str, Any]:
    fields = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise UnsupportedError(f"config.json: rope_parameters (or rope_scaling) is {fields!r}, but must be an object")
    return fields


def write_rope(kind: str, theta: float, partial: float | None, more: Mapping[str, Any]) -> HfFields:
    """Returns the fields that describe rotary embeddings, both for transformers 4 and for transformers 5.

    Each version reads only its own fields: given only `rope_parameters`, transformers 4 would use the default theta.
    """
    of_part = {} if partial is None else {"partial_rotary_factor": partial}
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **of_part, **more},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **more},
        **of_part,
    }


def _both_ropes(rope: RopeFields, default_partial: float) -> HfFields:
    partial = None if rope.partial == default_partial == 1.0 else rope.partial
    return write_rope(rope.kind, rope.theta, partial, rope.others)


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Rope:
    """The rule for the rotary embeddings of attention that is not latent.

    The attributes are transformers' defaults for theta and for the rotated fraction of each head.
    """

    default_theta: float = 10000.0
    default_partial: float = 1.0

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        rope = read_rope(hf, self.default_theta, self.default_partial)
        values: dict[str, Any] = {
            "gpt.position_embedding_type": "rope",
            "gpt.rotary_base": rope.theta,
            "gpt.rotary_percent": rope.partial,
            "gpt.rope_scaling": False,
            "gpt.seq_len_interpolation_factor": None,
        }
        if rope.kind == "linear":
            values["gpt.seq_len_interpolation_factor"] = needed(rope.fields, "factor")
        elif rope.kind == "llama3":
            # These values are built into RotaryEmbedding._apply_scaling (0.16.1).
            for name, value in _LLAMA3.items():
                if rope.fields.get(name) != value:
                    raise rope.refusal(name, f"megatron-core 0.16.1 always uses {value}")
            values |= {"gpt.rope_scaling": True, "gpt.rope_scaling_factor": needed(rope.fields, "factor")}
        elif rope.kind == "yarn":
            if rope.partial != 1.0:
                why = "megatron-core always rotates whole heads"
                raise rope.refusal("partial_rotary_factor", why, rope.partial)
            values["gpt.position_embedding_type"] = "yarn"
            values |= {f"attributes.yarn_{name}": value for name, value in read_yarn(rope, hf).items()}
        elif rope.kind != "default":
            raise UnsupportedError(
                f"config.json: rope_type is {rope.kind!r}: megatron-core 0.16.1 supports only default, linear, llama3 "
                "and yarn"
            )
        return values

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        partial = mcore["gpt.rotary_percent"]
        kind, more = "default", {}
        if mcore["gpt.position_embedding_type"] == "yarn":
            kind, more = "yarn", write_yarn({n: mcore[f"attributes.yarn_{n}"] for n in _YARN}, cut=True)
        elif mcore["gpt.rope_scaling"]:
            kind, more = "llama3", {"factor": mcore["gpt.rope_scaling_factor"], **_LLAMA3}
        elif mcore["gpt.seq_len_interpolation_factor"] is not None:
            kind, more = "linear", {"factor": mcore["gpt.seq_len_interpolation_factor"]}
        if partial == self.default_partial == 1.0:
            partial = None
        # The `mrope_` fields say which frequencies belong to which coordinate (time, height, width) of a position.
        # GPTModel handles only text and has no such fields, so take them from `base`.
        of_images = {name: value for name, value in _fields(base).items() if name.startswith("mrope_")}
        return write_rope(kind, mcore["gpt.rotary_base"], partial, {**more, **of_images})

    def spelling(self, hf: HfConfig) -> HfFields:
        """Returns the config's rotary fields in the spellings of transformers 4 and 5."""
        return _both_ropes(read_rope(hf, self.default_theta, self.default_partial), self.default_partial)


@dataclass(frozen=True)
class MultimodalRope:
    """The rule for rotary embeddings in which each head has parts for time, height and width ("mrope" in megatron).

    transformers calls these embeddings "default" with an `mrope_section`; published configs say "mrope". If
    `mrope_interleaved` is set (Qwen3-VL), the frequencies of time, height and width alternate. GPTModel does not
    support this order, so Megatron-Bridge replaces GPTModel's `rotary_pos_emb`. megatron has no argument for
    `mrope_interleaved`, so `to_hf` takes this field from `base`.

    The attributes are transformers' defaults for theta, for the lengths of the three parts (None: transformers has no
    default), and for the rotated fraction of each head.
    """

    default_theta: float
    default_section: tuple[int, ...] | None = None
    default_partial: float = 1.0

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        rope = read_rope(hf, self.default_theta, self.default_partial)
        if rope.kind not in ("default", "mrope"):
            raise UnsupportedError(
                f"config.json: rope_type is {rope.kind!r}: with positions in time, height and width, megatron-core "
                "supports only default"
            )
        section = rope.fields.get("mrope_section") or self.default_section
        return {
            "gpt.position_embedding_type": "mrope",
            "gpt.rotary_base": rope.theta,
            "gpt.rotary_percent": rope.partial,
            "gpt.rope_scaling": False,
            "gpt.seq_len_interpolation_factor": None,
            "mrope_section": list(needed({"mrope_section": section}, "mrope_section")),
        }

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        there = read_rope(base, self.default_theta, self.default_partial)
        fields = {**there.others, "mrope_section": list(mcore["mrope_section"])}
        return _both_multimodal(fields, mcore["gpt.rotary_base"], mcore["gpt.rotary_percent"])

    def spelling(self, hf: HfConfig) -> HfFields:
        """Returns the config's rotary fields in the spellings of transformers 4 and 5."""
        rope = read_rope(hf, self.default_theta, self.default_partial)
        return _both_multimodal(rope.others, rope.theta, rope.partial)


def _both_multimodal(more: Mapping[str, Any], theta: float, partial: float) -> HfFields:
    fields = write_rope("default", theta, None if partial == 1.0 else partial, more)
    return fields | {"rope_scaling": {"rope_type": "default", **more}}


_YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "correction_range_round_to_int",
)


def read_yarn(rope: RopeFields, hf: HfConfig) -> dict[str, Any]:
    """Returns Yarn's fields under megatron's names, with the defaults of transformers' `_compute_yarn_parameters`.

    mscale and mscale_all_dim are both None if the config lacks one of them. In this case, only the factor scales cosine
    and sine, both in transformers and in megatron's `_yarn_get_concentration_factor` (0.16.1).
    """
    fields = rope.fields
    if fields.get("attention_factor") is not None:
        raise rope.refusal("attention_factor", "megatron-core computes this factor itself")
    both = bool(fields.get("mscale") and fields.get("mscale_all_dim"))
    original = fields.get("original_max_position_embeddings")
    return {
        "rotary_scaling_factor": needed(fields, "factor"),
        "original_max_position_embeddings": needed(hf, "max_position_embeddings") if original is None else original,
        "beta_fast": fields.get("beta_fast") or 32.0,
        "beta_slow": fields.get("beta_slow") or 1.0,
        "mscale": fields["mscale"] if both else None,
        "mscale_all_dim": fields["mscale_all_dim"] if both else None,
        "correction_range_round_to_int": fields.get("truncate") is not False,
    }


def write_yarn(yarn: Mapping[str, Any], cut: bool) -> HfFields:
    """Translates the result of `read_yarn` back to fields of `config.json`.

    `cut` is True if the architecture has the field `truncate`, which decides whether the correction range is rounded.
    """
    more = {
        "factor": yarn["rotary_scaling_factor"],
        **{name: yarn[name] for name in ("original_max_position_embeddings", "beta_fast", "beta_slow")},
    }
    more |= {name: yarn[name] for name in ("mscale", "mscale_all_dim") if yarn[name] is not None}
    if cut and not yarn["correction_range_round_to_int"]:
        more["truncate"] = False
    return more


class LatentRope:
    """The rule for the rotary embeddings of latent attention.

    In megatron, fields of `MLATransformerConfig` set these embeddings.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        rope = read_rope(hf, 10000.0, 1.0)
        values = {"gpt.position_embedding_type": "rope", "rotary_base": rope.theta, "rotary_percent": rope.partial}
        if rope.kind == "default":
            # All these values are set, because Megatron's default for rotary_scaling_factor is 40, and because Megatron
            # scales the softmax if mscale_all_dim is not 0.
            return values | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        if rope.kind != "yarn":
            raise UnsupportedError(
                f"config.json: rope_type is {rope.kind!r}: latent attention of megatron-core 0.16.1 supports only "
                "default and yarn"
            )
        yarn = read_yarn(rope, hf)
        if not yarn.pop("correction_range_round_to_int"):
            raise rope.refusal(
                "truncate", "latent attention of megatron-core 0.16.1 always rounds the correction range"
            )
        if yarn["mscale"] is None:
            if rope.fields.get("mscale_all_dim"):
                raise rope.refusal("mscale", "mscale_all_dim requires mscale")
            yarn |= {"mscale": 1.0, "mscale_all_dim": 0.0}
        return values | {"rope_type": "yarn"} | yarn

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        if mcore["rope_type"] == "rope":
            return write_rope("default", mcore["rotary_base"], None, {})
        yarn = {name: mcore[name] for name in _YARN if name != "correction_range_round_to_int"}
        return write_rope("yarn", mcore["rotary_base"], None, write_yarn(yarn, cut=False))

    def spelling(self, hf: HfConfig) -> HfFields:
        """Returns the config's rotary fields in the spellings of transformers 4 and 5."""
        return _both_ropes(read_rope(hf, 10000.0, 1.0), 1.0)


ROPE = Rope()
