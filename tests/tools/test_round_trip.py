"""HuggingFace folders through checkpoints of any layout and back: the same tensors, bit for bit, and the same model."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.convert.to_native import convert_to_native
from tests.support.mcore_checkpoints import model_of, weights
from tests.support.tiny_models import LAYERS, NAMES, VOCAB, architecture_of, flat, make_hf_folder, read_config

pytestmark = pytest.mark.slow

# More than 131 tokens, whatever the tensor-parallel size.
PADDING = {"vocab_divisor": 16}
EVEN_STAGES, UNEVEN_STAGES = "Et|t|t|t{m}L", "Et|tt|t|{m}L"

LAYOUTS: dict[str, dict[str, int | str]] = {
    "whole": {},
    "tp4-ep2": {"tp": 4, "ep": 2, "etp": 2},
    "tp2-uneven-ep2": {"tp": 2, "pp": 2, "first_stage_layers": 1, "ep": 2},
    "vpp2-ep2": {"pp": 2, "vpp": 2, "ep": 2},
    "tp4-uneven-vpp2-ep2": {"tp": 4, "pp": 2, "vpp": 2, "pipeline_layout": UNEVEN_STAGES, "ep": 2, "etp": 1},
}
STAGES: dict[str, dict[str, int | str]] = {
    "pp1": {},
    "pp2": {"pp": 2},
    "pp2-uneven": {"pp": 2, "first_stage_layers": 3},
    "pp2-vpp2": {"pp": 2, "vpp": 2, "pipeline_layout": EVEN_STAGES},
    "pp2-vpp2-uneven": {"pp": 2, "vpp": 2, "pipeline_layout": UNEVEN_STAGES},
}
IN_ALL_LAYOUTS = {
    "qwen2-tied": (1,),
    "glm4_moe-mtp": (1, 2),
    "deepseek_v3": (1, 2),
    "glm_moe_dsa-shared": (1, 2),
    "nemotron_h-mtp": (1, 2),
    "qwen3_next-mtp": (1, 2),
    "qwen3_5_text-mtp": (1,),
    "qwen3_5_moe_text-mtp": (1, 2),
    "minimax_m2": (1, 2),
    "seed_oss": (1,),
    "deepseek_v2": (1, 2),
    "deepseek_v2-lite": (1, 2),
}
"""By the sizes of expert parallelism that each can have."""
ONLY_FULL = frozenset({"qwen3_5_text-mtp", "minimax_m2", "seed_oss", "deepseek_v2", "deepseek_v2-lite"})
"""The models that differ from another one in nothing that a layout cuts. CI takes them through two layouts above."""


def every_model() -> list[Any]:
    """Every model in every layout.

    CI takes one model of each architecture through the last layout, in which tensors, layers and experts are all cut,
    and the others through the layouts in turn, each model through one.
    """
    layouts, seen, cases = [*LAYOUTS], set[str](), []
    for number, name in enumerate(NAMES):
        in_ci = layouts[number % len(layouts)] if architecture_of(name) in seen else layouts[-1]
        seen.add(architecture_of(name))
        cases += [pytest.param(name, each, marks=() if each == in_ci else pytest.mark.full) for each in layouts]
    return cases


def every_layout() -> list[Any]:
    """Some models in every layout. CI runs each of them with all stages, and takes the other sizes in turn."""
    cases = []
    for name, eps in IN_ALL_LAYOUTS.items():
        for tp, stages, ep in itertools.product((1, 2, 4), STAGES, eps):
            number = [*STAGES].index(stages)
            in_ci = name not in ONLY_FULL and (tp, ep) == ((2, 4, 1)[number % 3], eps[number % len(eps)])
            cases.append(pytest.param(name, tp, stages, ep, marks=() if in_ci else pytest.mark.full))
    return cases


Folders = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders by name and dtype, each made once; nobody changes them."""
    root, made = tmp_path_factory.mktemp("hf"), set[Path]()

    def folder(name: str, dtype: str) -> Path:
        path = root / dtype / name
        if path not in made:
            made.add(make_hf_folder(path, name, dtype=dtype))
        return path

    return folder


@pytest.mark.parametrize(("name", "layout"), every_model())
def test_every_model_comes_back_bit_for_bit(name: str, layout: str, folders: Folders, tmp_path: Path) -> None:
    there_and_back(folders(name, "bfloat16"), LAYOUTS[layout], tmp_path)


@pytest.mark.parametrize(("name", "tp", "stages", "ep"), every_layout())
def test_a_model_comes_back_from_every_layout(
    name: str, tp: int, stages: str, ep: int, folders: Folders, tmp_path: Path
) -> None:
    there_and_back(folders(name, "float32"), {**STAGES[stages], "tp": tp, "ep": ep}, tmp_path)


def there_and_back(folder: Path, layout: dict[str, int | str], tmp_path: Path) -> None:
    wanted = wanted_layout(folder, layout)
    report = convert_to_native(folder, tmp_path / "steps", wanted, rendezvous("round-trip", 60.0))
    assert_written_as(report.path, wanted, is_value=model_of(folder).is_value)
    merge(MergeRequest(report.path, tmp_path / "merged"))
    assert_same_model(tmp_path / "merged", folder)


def test_each_rank_has_the_rows_that_megatron_gives_it(folders: Folders, tmp_path: Path) -> None:
    """Of gate and up each rank has a part of both, and a part of `up` where there is no gate."""
    for name, stem in (("nemotron_h", "backbone.layers.3.mixer."), ("llama", "model.layers.3.mlp.")):
        folder = folders(name, "float32")
        report = convert_to_native(
            folder, tmp_path / name, WantedLayout(**PADDING, tp=2), rendezvous("round-trip", 60.0)
        )
        there = weights(folder)
        wanted = [there[stem + part] for part in ("gate_proj.weight", "up_proj.weight") if stem + part in there]
        for rank in range(2):
            file = report.path / "model" / f"mp_rank_{rank:02d}_000" / "model_states.pt"
            found = torch.load(file, weights_only=True)["decoder.layers.3.mlp.linear_fc1.weight"]
            assert torch.equal(found, torch.cat([tensor.chunk(2)[rank] for tensor in wanted])), name


def is_mixture(folder: Path) -> bool:
    return "experts" in model_of(folder).sizes


def wanted_layout(folder: Path, layout: dict[str, int | str]) -> WantedLayout:
    """The layout, without what only mixtures have; multi-token prediction is on the last stage."""
    sizes = {name: size for name, size in layout.items() if is_mixture(folder) or name not in ("ep", "etp")}
    if "pipeline_layout" in sizes:
        mtp = "m" * model_of(folder).mtp_depths
        sizes["pipeline_layout"] = str(sizes["pipeline_layout"]).format(m=mtp)
    return WantedLayout(**PADDING, **sizes)  # type: ignore[arg-type]


def assert_written_as(role_dir: Path, wanted: WantedLayout, is_value: bool) -> None:
    """The checkpoint between is of that layout, and its vocabulary is padded with zeros: else all this shows little."""
    manifest = read_manifest(role_dir)
    found = manifest.topology
    assert (found.tp, found.pp, found.vpp, found.ep) == tuple(
        size or 1 for size in (wanted.tp, wanted.pp, wanted.vpp, wanted.ep)
    )
    counts = [len(stage.decoder) for stage in manifest.stages]
    assert (sum(counts), len(counts)) == (LAYERS, found.pp * found.vpp)
    assert (len(set(counts)) > 1) == (wanted.first_stage_layers is not None or "tt" in (wanted.pipeline_layout or ""))
    head = "embedding.word_embeddings.weight" if is_value else "output_layer.weight"
    last = found.pp - 1 if head == "output_layer.weight" else 0
    files = [role_dir / "model" / f"mp_rank_{tp:02d}_{last:03d}" / "model_states.pt" for tp in range(found.tp)]
    parts = [torch.load(file, weights_only=True).get(head) for file in files]
    if parts[0] is not None:  # not where embeddings are tied
        whole = torch.cat(parts)
        assert len(whole) > VOCAB
        assert not whole[VOCAB:].any()


def assert_same_model(folder: Path, wanted: Path) -> None:
    found, expected = weights(folder), weights(wanted)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    # More may be said, for the other version of transformers; nothing else.
    assert flat(read_config(folder)).items() >= flat(read_config(wanted)).items()
    assert to_mcore_config(model_of(folder)) == to_mcore_config(model_of(wanted))
