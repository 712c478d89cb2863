"""What is exported is whole for transformers 4 and 5, and means the same to both."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.cli.demo.huggingface import byte_tokenizer
from mcore_ckpt.formats.huggingface.assets import save_assets, write_config
from mcore_ckpt.models import model_from_config
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from tests.support.load_with_transformers import NEW_TOKENS, PROMPT, SPECIAL
from tests.support.mcore_checkpoints import make_checkpoint
from tests.support.tiny_models import NAMES, architecture_of, make_hf_folder, mtp_prefix

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
# Installed beside the environment, which has transformers 5.
TRANSFORMERS_4 = Path(os.environ.get("MCORE_CKPT_TRANSFORMERS4", REPOSITORY / ".venv" / "transformers4"))

# Merged to another dtype than the source's, which config.json then must say.
IN_BF16 = {"llama-bf16": "llama", "qwen3_moe-bf16": "qwen3_moe"}
ALL = (*NAMES, *IN_BF16)

# What these show, another model of the same architecture or another architecture's variant shows in CI.
REPEATED = frozenset(
    {
        "llama-bf16",
        "mistral",
        "qwen2",
        "qwen2-tied",
        "qwen2-value",
        "qwen3-tied",
        "qwen3-value",
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe-mtp",
        "seed_oss-value",
        "qwen3_5_text",
        "qwen3_next",
        "qwen3_5_moe_text-mtp",
        "qwen3_5_moe",
        "deepseek_v2-lite",
        "deepseek_v2-yarn",
        "deepseek_v2",
        "deepseek_v32",
        "deepseek_v32-mtp",
        "glm_moe_dsa-shared",
        "nemotron_h-latent",
        "nemotron_h-mtp",
        "qwen2_5_vl-tied",
        "qwen3_vl-tied",
        "seed_oss",
    }
)
# 4.57 does not scale the softmax by mscale_all_dim (DeepseekV2Attention), 5 and megatron do.
COMPUTED_OTHERWISE_BY_4 = frozenset({"deepseek_v2-yarn"})

# Of no model: each version says its own, and where it lies.
NOT_COMPARED = {"transformers_version", "_name_or_path"}

# 4.57's gpt-oss clamps at 7 whatever config.json says (GptOssExperts), 5's at swiglu_limit.
OVERRIDES: dict[str, dict[str, Any]] = {"gpt_oss": {"swiglu_limit": 7.0}}

Found = dict[str, Any]
needs_4 = pytest.mark.skipif(not TRANSFORMERS_4.is_dir(), reason=f"no transformers 4 in {TRANSFORMERS_4}")
# In CI only tests/cli/test_demo.py loads an export with transformers 4.
versions = pytest.mark.parametrize("version", [pytest.param("4", marks=[needs_4, pytest.mark.full]), "5"])


def models(*names: str) -> pytest.MarkDecorator:
    """Runs a test for each of these models, in CI without those that repeat what another shows."""
    marks = {name: pytest.mark.full if name in REPEATED else () for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


# transformers 4.57 has no class for these.
ONLY_IN_5 = frozenset(
    {
        *("nemotron_h", "deepseek_v32", "glm_moe_dsa", "minimax_m2", "kimi_k25"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
    }
)


@pytest.fixture(autouse=True)
def _only_what_the_version_knows(request: pytest.FixtureRequest) -> None:
    values = request.node.callspec.params
    if values.get("version", "4") == "4" and architecture_of(IN_BF16.get(values["name"], values["name"])) in ONLY_IN_5:
        pytest.skip("transformers 4 does not know this model")


@dataclass(frozen=True)
class Folders:
    """Of one model what transformers 5 has saved, and what came back from a checkpoint of two tensor-parallel ranks."""

    source: Path
    merged: Path


@pytest.fixture(scope="module")
def folders(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    tokenizer = byte_tokenizer()
    # The second has no role, and transformers 4 and 5 have different fields for such tokens.
    tokenizer.add_special_tokens({"eos_token": SPECIAL[0], "extra_special_tokens": [SPECIAL[1]]})
    made = {}
    for name in ALL:
        if name in REPEATED and not pytestconfig.getoption("full"):
            continue
        base = tmp_path_factory.mktemp(name)
        original = IN_BF16.get(name, name)
        source = make_hf_folder(base / "source", original, **OVERRIDES.get(original, {}))
        dtype = torch.bfloat16 if name in IN_BF16 else None
        request = MergeRequest(make_checkpoint(base, source, 2), base / "merged", hf_model_path=source, dtype=dtype)
        merge(request)
        # As a save with hf_model does. It has more tokens than these models have rows, which a merge refuses.
        for folder in (source, base / "merged"):
            save_assets(folder, None, tokenizer, {})
        made[name] = Folders(source, base / "merged")
    return made


def load_with(version: str, paths: list[Path]) -> list[Found]:
    """What one version of transformers makes of some folders, in one process: a line of JSON for each."""
    path = [str(TRANSFORMERS_4)] if version == "4" else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "support" / "load_with_transformers.py"), *map(str, paths)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(paths)
    assert all(each["version"].startswith(f"{version}.") for each in found)
    return found


Load = Callable[[str, str], Found]


@pytest.fixture(scope="module")
def load(folders: dict[str, Folders]) -> Load:
    """`load(version, name)`: what a version makes of what was merged; `load("source", name)`: what 5 makes of the
    source, whose config.json 4 need not understand."""

    # One process for a version's folders. A test that fails must not start it again: what it says is kept.
    @functools.cache
    def results_of(version: str) -> dict[Path, Found]:
        paths = [each.merged for each in folders.values()]
        paths += [each.source for each in folders.values()] if version == "5" else []
        return dict(zip(paths, load_with(version, paths), strict=True))

    def one(version: str, name: str) -> Found:
        is_source = version == "source"
        path = folders[name].source if is_source else folders[name].merged
        found = results_of("5" if is_source else version)[path]
        if "error" in found:
            pytest.fail(found["error"])
        return found

    return one


def furthest(one: Found, other: Found, what: str) -> float:
    """The largest difference of two lists of numbers."""
    assert len(one[what]) == len(other[what])
    return max(abs(x - y) for x, y in zip(one[what], other[what], strict=True))


def differences(one: Found, other: Found, fields: Set[str]) -> dict[str, tuple[Any, Any]]:
    """Fields of two configs that do not mean the same."""
    # Qwen2MoeConfig says 0 for no window in transformers 5.
    no_window = {"sliding_window": (None, 0)}
    pairs = {field: (one.get(field), other.get(field)) for field in fields}
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1] and no_window.get(field) != pair}


@versions
@models(*ALL)
def test_an_export_loads_whole(version: str, name: str, load: Load, folders: dict[str, Folders]) -> None:
    found, made = load(version, name), load("source", name)
    assert found["class"] == made["class"]
    assert found["different"] == []
    assert found["dtypes"] == ["torch.bfloat16" if name in IN_BF16 else "torch.float32"]
    # In transformers 5 all experts of a layer are one tensor, and the routers of Mixtral and MiniMax have other names:
    # whether these are right is seen by what they compute.
    renamed = (".experts.", ".block_sparse_moe.") if version == "5" else ()
    absent = [tensor for tensor in found["absent"] if not any(part in tensor for part in renamed)]
    if name.endswith("-mtp"):
        # transformers reads no multi-token prediction: by its design these are left over, and nothing else is. It
        # knows that of Qwen and Nemotron by name, and does not tell.
        extra = mtp_prefix(folders[name].source)
        assert absent
        assert found["wrong"].keys() == (set() if extra == "mtp." else {"unexpected_keys"})
        assert all(tensor.startswith(extra) for tensor in [*absent, *found["wrong"].get("unexpected_keys", ())])
    else:
        assert absent == []
        assert found["wrong"] == {}
        # Such as weights that it had to make up. That faster kernels are not installed says nothing of the folder.
        told = [text for text in found["warnings"] if "not installed" not in text]
        assert told == []


@versions
@models(*NAMES)
def test_an_export_computes_what_its_source_does(version: str, name: str, load: Load) -> None:
    found, made = load(version, name), load("source", name)
    # Of the same version bit for bit; the versions add up the experts' outputs in different orders.
    if version == "5" or name not in COMPUTED_OTHERWISE_BY_4:
        assert furthest(found, made, "logits") <= (0.0 if version == "5" else 1e-4)
    # As rotary embeddings came out of all that says how they are scaled.
    assert found["inv_freq"] == made["inv_freq"]
    assert found["attention_scaling"] == made["attention_scaling"]


@versions
@models(*(name for name in ALL if not name.endswith("-value")))
def test_an_export_writes_text_with_its_tokenizer(version: str, name: str, load: Load) -> None:
    written = load(version, name)["written"]
    assert bytes(written["tokens"][:-NEW_TOKENS]) == PROMPT.encode()
    assert written["text"] == bytes(written["tokens"]).decode(errors="replace")
    assert written["special"] == [ord("a"), 256, 257, ord("b")]
    if name not in IN_BF16 and not (version == "4" and name in COMPUTED_OTHERWISE_BY_4):
        assert written == load("source", name)["written"]


@pytest.mark.full
@needs_4
@models(*ALL)
def test_both_versions_understand_the_same_by_config_json(name: str, load: Load) -> None:
    four, five = (of_language_model(load(version, name)["config"]) for version in ("4", "5"))
    both = four.keys() & five.keys() - NOT_COMPARED
    assert differences(four, five, both) == {}
    # These are in both, or the comparison would be of little.
    assert both >= {"num_hidden_layers", "tie_word_embeddings", "dtype", "vocab_size", "architectures", "rms_norm_eps"}
    # What positions are computed of has other names in each.
    rope = five["rope_parameters"]
    assert four["rope_theta"] == rope["rope_theta"]
    assert four.get("partial_rotary_factor") == rope.get("partial_rotary_factor")
    assert kind_of(four["rope_scaling"] or {"rope_type": "default"}) == kind_of(rope)


def of_language_model(config: dict[str, Any]) -> dict[str, Any]:
    """A config, with the fields of a vision-language model's language model as a language model has them."""
    language = config.get("text_config") or {}
    whole = {name: value for name, value in config.items() if name not in ("text_config", "vision_config")}
    return {**language, **{name: value for name, value in whole.items() if value is not None or name not in language}}


def kind_of(rope: dict[str, Any]) -> dict[str, Any]:
    """How rotary embeddings are scaled, of which theta and the part of a head are apart in transformers 4."""
    return {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}


@pytest.mark.full
@needs_4
@models(*NAMES)
def test_what_transformers_4_makes_of_a_config_is_exported_for_5(name: str, load: Load, tmp_path: Path) -> None:
    from transformers import AutoConfig

    # As a trainer with transformers 4 hands it over.
    given = dict(load("4", name)["config"])
    # A field that it has read without knowing it.
    if "text_config" in given:
        given["text_config"] = {n: v for n, v in given["text_config"].items() if n != "rope_parameters"}
    given.pop("rope_parameters", None)
    write_config(tmp_path, model_from_config(given), torch.float32, has_mtp=name.endswith("-mtp"))
    found = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
    found, wanted = of_language_model(found), of_language_model(load("source", name)["config"])
    assert differences(found, wanted, wanted.keys() - NOT_COMPARED) == {}
