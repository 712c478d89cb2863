"""Logits of HuggingFace models and of the megatron models they become. Started by test_parity.py in a process of its
own: the stand-ins for CUDA must not reach other tests.

    python parity.py <folder> <name> ...     writes {name: largest difference} to <folder>/differences.json

For a vision-language model there is "<name> image", too: the logits of a prompt with an image where GPTModel can
compute them, and otherwise what the tower makes of the image.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.models.reconcile import with_mtp_of
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.stated_facts import check_model
from mcore_ckpt.sharding.synonyms import canonical
from tests.support.global_tensors import to_mcore
from tests.support.tiny_models import (
    IMAGE_TOKEN,
    VOCAB,
    computes_images,
    has_tower,
    make_hf_folder,
    make_hf_model,
    read_config,
)

TESTS = Path(__file__).parents[1]
PADDED_VOCAB = 136
TOKENS = 24


def main(root: Path, names: list[str]) -> None:
    references = {name: reference(root / name, name) for name in names}
    images = {name: image_reference(name) for name in names if computes_images(name)}
    with one_rank():
        differences = {name: difference(root / name, wanted) for name, wanted in references.items()}
        differences |= {f"{name} image": image_difference(root / name, wanted) for name, wanted in images.items()}
    (root / "differences.json").write_text(json.dumps(differences))


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Lets megatron compute on the CPU of this process. What has to compute without stand-ins for CUDA comes before."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel

    enable_cpu()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    torch.distributed.destroy_process_group()


def tokens(has_tower: bool = False) -> torch.Tensor:
    """Words. Kimi-K2.5 puts others in the place of tokens that stand for images, with or without an image."""
    words = IMAGE_TOKEN if has_tower else VOCAB
    return torch.randint(0, words, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def reference(folder: Path, name: str) -> torch.Tensor:
    make_hf_folder(folder, name)
    with torch.no_grad():
        logits: torch.Tensor = make_hf_model(name)(input_ids=tokens(has_tower(name))).logits
    return logits


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with an image, and what transformers makes of it.

    Attributes:
        tokens, positions: of the prompt; positions are [3, 1, tokens].
        patches: of the image.
        logits: of the prompt.
        features: of the image, behind the tower and behind its inner layers.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    patches: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor


def image_reference(name: str) -> ImagePrompt:
    model = make_hf_model(name)
    words = torch.randint(0, VOCAB - 4, (2, 7), generator=torch.Generator().manual_seed(4))
    image = torch.tensor([VOCAB - 2, *[IMAGE_TOKEN] * 4, VOCAB - 1])
    prompt = torch.cat([words[0], image, words[1]])[None]
    patches = torch.randn(16, 24, generator=torch.Generator().manual_seed(6))
    of_image: dict[str, Any] = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    of_image["mm_token_type_ids"] = (prompt == IMAGE_TOKEN).int()
    with torch.no_grad():
        logits = model(input_ids=prompt, pixel_values=patches, **of_image).logits
        found = model.model.visual(patches, grid_thw=of_image["image_grid_thw"])
        features = torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or ())])
    positions, _ = model.model.get_rope_index(prompt, **of_image)
    return ImagePrompt(prompt, positions, patches, logits, features)


def image_difference(folder: Path, wanted: ImagePrompt) -> float:
    hf_model = model_from_config(read_config(folder))
    model = build(hf_model)
    load(model, to_mcore(hf_model, load_file(folder / "model.safetensors")))
    with torch.no_grad():
        if "hf_tower" not in hf_model.facts:
            # The positions of Qwen3-VL, and that its inner features are added within the decoder, are Bridge's own.
            features, inner = model.tower(wanted.patches)
            return largest(torch.cat([features, *inner]), wanted.features)
        embeddings = model.language_model.embedding(wanted.tokens, None)
        features = model.tower(wanted.patches, grid_thw=torch.tensor([[1, 4, 4]])).pooler_output
        embeddings[wanted.tokens[0] == IMAGE_TOKEN, 0] = features
        size = wanted.tokens.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).triu(1)[None, None]
        logits = model.language_model(None, wanted.positions, mask, decoder_input=embeddings)
    return largest(logits[..., : wanted.logits.shape[-1]], wanted.logits)


def largest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference."""
    # NaN must not compare as small.
    return float((found - wanted).abs().max().nan_to_num(nan=1e9))


def difference(folder: Path, wanted: torch.Tensor) -> float:
    config = read_config(folder)
    words, stored = tokens("vision_config" in config), load_file(folder / "model.safetensors")
    return largest(logits_of_megatron(with_mtp_of(model_from_config(config), stored), stored, words), wanted)


def logits_of_megatron(hf_model: HfModel, tensors: Mapping[str, torch.Tensor], words: torch.Tensor) -> torch.Tensor:
    """What megatron's model computes with a HuggingFace model's tensors, within `one_rank`.

    Args:
        hf_model: the model, of `VOCAB` tokens.
        tensors: its tensors by HuggingFace's names, in float32.
        words: [batch, `TOKENS`], such as `tokens()`.

    Returns:
        [batch, `TOKENS`, `VOCAB`], or one value for each token of a value model.
    """
    model = build(hf_model)
    check_model(model, hf_model)
    load(model, to_mcore(hf_model, tensors))
    # GPTModel.forward (0.16.1) wants labels where there is multi-token prediction, and then gives no logits.
    language = getattr(model, "language_model", model)
    language.mtp_process, language.config.mtp_num_layers = False, None
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1).expand(2, 1, TOKENS, TOKENS)
    with torch.no_grad():
        logits: torch.Tensor = model(words, positions, mask)
    return logits[..., :VOCAB]


def build(hf_model: HfModel) -> Any:
    """The GPTModel or HybridModel that a config describes, all its parameters NaN."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    known = to_mcore_config(hf_model)
    config = known.transformer_config(
        use_cpu_initialization=True,
        moe_token_dispatcher_type="allgather",
        deterministic_mode=True,
    )
    if hf_model.architecture.table.is_hybrid:
        # After transformers has computed without mamba_ssm, and before megatron looks for it.
        sys.path.append(str(TESTS / "support" / "stand_ins"))
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from tests.distributed.hybrid_model import build_hybrid

        gpt = {**known.gpt, "vocab_size": PADDED_VOCAB}
        return poisoned(build_hybrid(config, WrappedTorchNorm, gpt.pop("hybrid_layer_pattern"), **gpt).eval())
    spec = block_spec(config)
    if config.experimental_attention_variant == "dsa":
        make_sparse(spec)
    elif config.multi_latent_attention:
        make_latent(config, spec)
    if config.experimental_attention_variant == "gated_delta_net":
        make_linear(config, spec)
    if has_norms_of_all_heads(hf_model):
        make_norms_of_all_heads(spec)
    mtp = mtp_spec(config, spec) if config.mtp_num_layers else None
    model = GPTModel(config, spec, mtp_block_spec=mtp, **{**known.gpt, "vocab_size": PADDED_VOCAB}).eval()
    if hf_model.is_value:
        model.output_layer = ValueHead(config.hidden_size)
    return poisoned(with_tower(hf_model, config, model))


def poisoned(model: Any) -> Any:
    for tensor in [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if "expert_bias" in name)]:
        tensor.data.fill_(float("nan"))
    return model


def with_tower(hf_model: HfModel, config: Any, model: Any, kind: str | None = None) -> Any:
    """Puts a stage of a vision-language model's language model beside its tower, and returns any other model as it is.

    `kind` is of whose modules the tower is, "transformers" or "megatron"; None: as Megatron-Bridge has it.
    """
    vision = hf_model.config.get("vision_config")
    if vision is None:
        return model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from tests.support.vision_language import TOWER_NAMES, NamedTensors, VisionLanguageModel, tower_of

    if hf_model.architecture.model_type == "kimi_k25":
        whole = VisionLanguageModel(config, model, None, "vision_tower")
        for part in ("vision_tower", "mm_projector") if model.pre_process else ():
            shapes = {t.name: t.shape for t in hf_tensors(hf_model) if t.name.startswith(f"{part}.")}
            whole.add_module(part, NamedTensors({name[len(part) + 1 :]: shape for name, shape in shapes.items()}))
        return whole
    kind = kind or ("transformers" if "hf_tower" in hf_model.facts else "megatron")
    is_first = model.pre_process
    tower = tower_of(kind, str(hf_model.config["model_type"]), vision, config, WrappedTorchNorm) if is_first else None
    return VisionLanguageModel(config, model, tower, TOWER_NAMES[kind])


class ValueHead(torch.nn.Linear):
    """As verl's critics have it in the place of `output_layer`."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(hidden_states), None


def make_latent(config: Any, spec: Any) -> None:
    """Multi-latent attention with local layers, in a stage's spec, which is changed.

    MLASelfAttention (0.16.1) hands the local attention arguments that only transformer-engine's takes. Where there are
    no latent queries, 0.19 wants a norm of queries fused with `linear_q_proj`, which no HuggingFace model has.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.identity_op import IdentityOp

    # It takes transformer-engine for installed because megatron's own module of wrappers can be imported without it.
    multi_latent_attention.HAVE_TE = False

    class Latent(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any):
            super().__init__(*args, **kwargs)

    class WithoutNormOfQueries(multi_latent_attention.MLASelfAttention):  # type: ignore[misc]
        def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
            kept = {name: getattr(submodules, name) for name in ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")}
            return {**kept, "linear_q_up_proj": IdentityOp, "q_layernorm": IdentityOp}

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Latent
        if config.q_lora_rank is None:
            layer.submodules.self_attention.module = WithoutNormOfQueries


class Norm:
    """Megatron's WrappedTorchNorm, which refuses sequence parallelism, without which sparse attention refuses TP."""

    def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        return kind(hidden_size, eps=eps)


class Duplicated(torch.nn.Linear):
    """Transformer-engine's TELinear with `parallel_mode="duplicated"`; megatron has none of its own."""

    def __init__(self, inputs: int, outputs: int, bias: bool, **more: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(tensor), None


def make_sparse(spec: Any) -> None:
    """Sparse attention with local layers, in a stage's spec, which is changed: megatron's spec has TELinear."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = dsa.DSAIndexerSubmodules(Duplicated, Duplicated, Norm, Duplicated)
    indexer = ModuleSpec(dsa.DSAIndexer, submodules=parts)
    columns = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
    own = absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
        **{f"linear_{name}": ColumnParallelLinear for name in columns},
        core_attention=ModuleSpec(dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer)),
        linear_proj=RowParallelLinear,
        q_layernorm=Norm,
        kv_layernorm=Norm,
    )
    attention = ModuleSpec(
        absorbed_mla.AbsorbedMLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=own
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention = attention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    spec.layer_norm = Norm


def block_spec(config: Any, **where: Any) -> Any:
    """The local specs of a stage's layers, with plain attention in all of them; `make_linear` puts in the other."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    # Since 0.19 the function refuses a config that has another attention.
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm", **where)


def make_linear(config: Any, spec: Any, first: int = 0) -> None:
    """GatedDeltaNet and zero-centred norms with local layers: megatron has specs for transformer-engine's only.

    Args:
        config: of the whole model.
        spec: of a pipeline stage, which is changed.
        first: the number of the stage's first layer.
    """
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    # Since 0.19 the module is a package, and its part `common` uses these names.
    using: Any = sys.modules[gated_delta_net.GatedDeltaNetSubmodules.__module__]
    using.HAVE_FLA, using.l2norm = True, l2norm
    own = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, ZeroCentredNorm, RowParallelLinear)
    spec.layer_norm = ZeroCentredNorm
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
    which = config.linear_attention_freq[first : first + len(spec.layer_specs)]
    for layer, is_linear in zip(spec.layer_specs, which, strict=True):
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCentredNorm
        if is_linear:
            parts.self_attention = ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=own)
        else:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = ZeroCentredNorm


def mtp_spec(config: Any, spec: Any, **where: Any) -> Any:
    """The local specs of a stage's multi-token prediction, whose norms are zero-centred if the config says so."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **where)
    if mtp is not None and config.layernorm_zero_centered_gamma:
        for layer in mtp.layer_specs:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = ZeroCentredNorm
    return mtp


def has_norms_of_all_heads(hf_model: HfModel) -> bool:
    """Whether norms of queries and keys cover all heads, which megatron has no module for."""
    return hf_model.architecture.model_type == "minimax_m2"


def make_norms_of_all_heads(spec: Any) -> None:
    """Norms of all queries and of all keys in a stage's spec, which is changed, as Megatron-Bridge has for MiniMax."""
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = NormOfQueries, NormOfKeys


class NormOfQueries(torch.nn.Module):
    """RMSNorm of all heads' queries. Each tensor-parallel rank has the weights of its heads."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = self.heads(config) * hidden_size, eps
        own = self.size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.empty(own))
        self.is_cut = own != self.size

    @staticmethod
    def heads(config: Any) -> int:
        return int(config.num_attention_heads)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        values = tensor.flatten(2)
        squares = values.square().sum(-1, keepdim=True)
        if self.is_cut:
            torch.distributed.all_reduce(squares, group=get_tensor_model_parallel_group())
        return (values * torch.rsqrt(squares / self.size + self.eps) * self.weight).view_as(tensor)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        own = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(own, prefix, {"weight": 0}, sharded_offsets)


class NormOfKeys(NormOfQueries):
    """RMSNorm of all heads' keys."""

    @staticmethod
    def heads(config: Any) -> int:
        return int(config.num_query_groups)


def l2norm(tensor: torch.Tensor) -> torch.Tensor:
    """Flash-linear-attention's, which needs a GPU."""
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


class ZeroCentredNorm(torch.nn.Module):
    """Transformer-engine's RMSNorm with `layernorm_zero_centered_gamma`; the local one refuses that."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.empty(hidden_size)), eps

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * torch.rsqrt(tensor.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def load(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every tensor into its place; rows that pad the vocabulary are zeros."""
    state = model.state_dict(keep_vars=True)
    own = {canonical(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    assert own.keys() == tensors.keys(), sorted(own.keys() ^ tensors.keys())
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            assert (tensor.shape[0], own[name].shape[0]) == (VOCAB, PADDED_VOCAB), f"{name}: vocab_size is not {VOCAB}"
            own[name].data.zero_()
        own[name].data[: tensor.shape[0]] = tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
