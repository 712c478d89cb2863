"""A checkpoint's tensors as HuggingFace's, in files that the safetensors library opens: the same bits."""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import dtype_name
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import CheckpointReader, RankPosition, ReadTargets, TensorInfo, weights_of
from mcore_ckpt.formats.huggingface import writer as writing
from mcore_ckpt.formats.huggingface.export_plan import ExportPlan, plan_export, plan_tensors
from mcore_ckpt.formats.huggingface.safetensors_files import read_file
from mcore_ckpt.formats.huggingface.writer import write_index, write_weights
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.io import tuning
from mcore_ckpt.models.mapping import HfTensor, Slab
from mcore_ckpt.sharding.assignment import share_of
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region
from tests.support.global_tensors import to_hf
from tests.support.mcore_checkpoints import (
    as_transformer_engine,
    make_checkpoint,
    mcore_tensors,
    model_of,
    pad_vocabulary,
    weights,
)
from tests.support.tiny_models import NAMES, make_hf_folder

pytestmark = pytest.mark.slow


class Memory:
    """Reads tensors that are in memory; implements `formats.contract.CheckpointReader`."""

    weight_kind = MODEL
    place = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.held = {name: tensor.contiguous() for name, tensor in tensors.items()}

    @property
    def names(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.held)}

    def info(self, key: ShardKey) -> TensorInfo | None:
        tensor = self.held.get(key.name)
        return None if tensor is None else TensorInfo(tensor.dtype, tuple(tensor.shape))

    def kinds(self, name: str, position: RankPosition | None = None) -> tuple[str, ...]:
        return ()

    def parts(self, key: ShardKey, position: RankPosition | None = None) -> Iterator[Sequence[StoredShard]]:
        tensor = self.held.get(key.name)
        if tensor is not None:
            region = Region.whole(tuple(tensor.shape))
            yield [StoredShard(key, region, dtype_name(tensor.dtype), key.name, 0, tensor.nbytes, None)]

    def tp_size(self, expert: bool) -> int:
        return 1

    def read(self, ranges: ReadTargets, check: bool = True) -> int:
        nbytes = 0
        for wanted, memory in ranges:
            held, rows = self.held[wanted.stored.file].view(-1), wanted.rows
            assert memory.dtype == held.dtype, "a reader does not cast"
            shape = (rows.rows, rows.row)
            target = memory.as_strided(shape, (rows.destination_stride, 1), memory.storage_offset() + rows.destination)
            target.copy_(held.as_strided(shape, (rows.source_stride, 1), held.storage_offset() + rows.start))
            nbytes += target.nbytes
        return nbytes


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors, and their query groups and experts, are cut everywhere."""
    monkeypatch.setattr(tuning, "STREAM_BYTES", 8192)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_hf_folder(tmp_path_factory.mktemp("hf"), name)
        return made[name]

    return folder


def exported(plan: ExportPlan, reader: CheckpointReader, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    written = write_weights(plan, range(len(plan.files)), reader, folder)
    for file in written:
        data = (folder / file.path).read_bytes()
        assert (len(data), zlib.crc32(data)) == (file.size, file.crc32)
    assert [file.path for file in written] == [file.name for file in plan.files]
    return weights(folder)


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)), name


# Another architecture's models differ from each other in the same way, or a model differs in its config alone.
REPEATED = frozenset(
    {
        "deepseek_v2",
        "deepseek_v2-lite",
        "deepseek_v2-yarn",
        "deepseek_v32",
        "deepseek_v32-mtp",
        "glm_moe_dsa",
        "nemotron_h",
        "nemotron_h-latent",
        "qwen2_5_vl-tied",
        "qwen3_5_moe_text",
        "qwen3_5_moe",
        "qwen3_5_text",
        "qwen3_5_text-mtp",
        "qwen3_vl",
        "qwen3_vl-tied",
        "seed_oss-value",
        "llama-3",
        "mistral-window",
        "qwen2-window",
        "qwen2-yarn",
        "qwen2-linear",
        "qwen2-tied",
        "qwen2-value",
        "qwen3-tied",
        "qwen3-value",
        "qwen3_moe",
        "deepseek_v3",
        "deepseek_v3-yarn",
    }
)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in REPEATED else ()) for name in NAMES]
)
def test_every_architecture_comes_back(name: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = mcore_tensors(folder_of(name))
    pad_vocabulary(tensors)
    for number, held in enumerate((tensors, as_transformer_engine(tensors))):
        reader = Memory(held | {"decoder.layers.0.self_attention._extra_state": torch.zeros(3, dtype=torch.uint8)})
        plan = plan_export(model_of(folder_of(name)), weights_of(reader), max_shard_bytes=100_000)
        assert_same(exported(plan, reader, tmp_path / str(number)), weights(folder_of(name)))


# -- adapters ----------------------------------------------------------------------------------------------

RANK, ALPHA = 4, 2
# In gpt_oss, experts are in one tensor, and their values in another order. qwen3_next's linear attention has sections.
ADAPTED = ("qwen3", "gpt_oss", "qwen3_next", "deepseek_v3-mtp")


def whole_numbers(*shape: int) -> torch.Tensor:
    """Values whose products and sums are exact in fp32, in any order."""
    return torch.randint(-4, 5, shape).float()


def with_adapters(tensors: Mapping[str, torch.Tensor], dora: bool) -> dict[str, torch.Tensor]:
    """An adapter for each matrix of a layer, and for the experts of half of the layers one that they share."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if ".layers." not in name or not name.endswith("linear_fc2.weight" if dora else ".weight") or tensor.dim() != 2:
            continue
        module = name.removesuffix(".weight")
        if ".local_experts." in name and int(name.split(".")[2]) % 2:
            module = re.sub(r"local_experts\.\d+\.", "", module)
        rows, columns = tensor.shape
        prefix = f"{module}.adapter."
        if f"{prefix}linear_in.weight" not in made:
            made[f"{prefix}linear_in.weight"] = whole_numbers(RANK, columns)
            made[f"{prefix}linear_out.weight"] = whole_numbers(rows, RANK).bfloat16()
            if dora:
                made[f"{prefix}weight_magnitude"] = torch.rand(rows) + 1
    return made


def merged(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with whole tensors in memory."""
    found = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        shared = re.sub(r"local_experts\.\d+\.", "", module)
        prefix = f"{module}.adapter." if f"{module}.adapter.linear_in.weight" in tensors else f"{shared}.adapter."
        if ".adapter." in name:
            continue
        found[name] = tensor
        if name.endswith(".weight") and f"{prefix}linear_in.weight" in tensors:
            a, b = tensors[f"{prefix}linear_in.weight"], tensors[f"{prefix}linear_out.weight"].float()
            found[name] = tensor + ALPHA / RANK * (b @ a)
            if (magnitude := tensors.get(f"{prefix}weight_magnitude")) is not None:
                found[name] *= (magnitude / found[name].norm(dim=1)).unsqueeze(1)
    return found


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_merged_while_tensors_are_cut_everywhere(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_of(folder_of(name))
    plain = {key: whole_numbers(*tensor.shape) for key, tensor in mcore_tensors(folder_of(name)).items()}
    reader = Memory(with_adapters(plain, dora=False))
    assert len(reader.held) > 1.5 * len(plain)
    plan = plan_export(model, weights_of(reader), alpha=ALPHA, max_shard_bytes=100_000)
    assert_same(exported(plan, reader, tmp_path / "hf"), to_hf(model, merged(reader.held)))
    # In a narrower dtype, the sum is rounded, and not its parts.
    plan = plan_export(model, weights_of(reader), alpha=ALPHA, dtype=torch.bfloat16)
    found = exported(plan, reader, tmp_path / "bf16")
    for key, tensor in to_hf(model, merged(reader.held)).items():
        assert torch.equal(found[key], tensor if "expert_bias" in key or "correction" in key else tensor.bfloat16()), (
            key
        )


@pytest.mark.usefixtures("small_parts")
def test_magnitudes_are_merged_while_tensors_are_cut_everywhere(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_of(folder_of("qwen3"))
    reader = Memory(with_adapters(mcore_tensors(folder_of("qwen3")), dora=True))
    found = exported(plan_export(model, weights_of(reader), alpha=ALPHA), reader, tmp_path / "hf")
    for key, tensor in to_hf(model, merged(reader.held)).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "tp", "sizes"),
    [
        ("qwen3", 2, {"pp": 2}),
        ("qwen2-tied", 1, {"tp": 2, "pp": 2}),
        ("llama-value", 4, {}),
        ("qwen3_moe", 2, {"pp": 2, "ep": 2, "etp": 1}),
        ("deepseek_v3", 1, {"pp": 2, "ep": 2}),
    ],
)
def test_a_checkpoint_of_any_layout_comes_back(
    name: str, tp: int, sizes: dict[str, int], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    role_dir = make_checkpoint(tmp_path, folder_of(name), tp, **sizes)
    reader = NativeReader.open(role_dir)
    plan = plan_export(model_of(folder_of(name)), weights_of(reader))
    assert_same(exported(plan, reader, tmp_path / "hf"), weights(folder_of(name)))


def test_a_checkpoint_without_the_model_has_its_main_parameters(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    role_dir = make_checkpoint(tmp_path, folder_of("qwen3"))
    manifest = read_manifest(role_dir)
    files = tuple(file for file in manifest.files if file.kind != "model")
    reader = NativeReader(LocalFolder(role_dir), replace(manifest, contents=("optimizer",), files=files))
    plan = plan_export(model_of(folder_of("qwen3")), weights_of(reader), dtype=torch.bfloat16)
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in weights(folder_of("qwen3")).items()}
    assert reader.weight_kind == PARAM
    assert_same(exported(plan, reader, tmp_path / "hf"), wanted)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full), torch.float64])
def test_another_dtype_but_for_the_routers_bias(
    dtype: torch.dtype, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("deepseek_v3")
    reader = Memory(mcore_tensors(folder))
    plan = plan_export(model_of(folder), weights_of(reader), dtype=dtype, max_shard_bytes=150_000)
    assert plan.dtype == dtype
    wanted = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in weights(folder).items()
    }
    assert_same(exported(plan, reader, tmp_path / "hf"), wanted)


def test_files_are_in_order_and_as_large_as_allowed(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    reader = Memory(mcore_tensors(folder_of("qwen3")))
    plan = plan_export(model_of(folder_of("qwen3")), weights_of(reader), max_shard_bytes=100_000)
    assert len(plan.files) > 3
    assert plan.files[0].name == f"model-00001-of-{len(plan.files):05d}.safetensors"
    assert plan.files[0].tensors[0].name == "model.embed_tokens.weight"
    assert plan.files[-1].tensors[-1].name in ("lm_head.weight", "model.norm.weight")
    for file, behind in zip(plan.files, plan.files[1:], strict=False):
        assert file.nbytes <= 100_000 < file.nbytes + behind.tensors[0].nbytes
    (tmp_path / "hf").mkdir()
    index = write_index(plan, tmp_path / "hf")
    assert index is not None
    data = (tmp_path / "hf" / index.path).read_bytes()
    assert (len(data), zlib.crc32(data)) == (index.size, index.crc32)
    alone = plan_export(model_of(folder_of("qwen3")), weights_of(reader))
    assert [file.name for file in alone.files] == ["model.safetensors"]
    assert write_index(alone, tmp_path / "hf") is None


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), most=st.integers(1, 200), least=st.integers(1, 5))
def test_ranks_share_the_work(sizes: list[int], most: int, least: int) -> None:
    names = [f"model.{number}" for number in range(len(sizes))]
    infos = {name: TensorInfo(torch.uint8, (size,)) for name, size in zip(names, sizes, strict=True)}
    tensors = [HfTensor(n, i.shape, (Slab(0, n, Region.whole(i.shape)),)) for n, i in infos.items()]
    plan = plan_tensors(tensors, infos, max_shard_bytes=most, least_files=least)
    assert [tensor.name for file in plan.files for tensor in file.tensors] == names
    assert all(file.nbytes <= most or len(file.tensors) == 1 for file in plan.files)
    shares = [share_of([file.nbytes for file in plan.files], rank, least) for rank in range(least)]
    assert sorted(number for share in shares for number in share) == list(range(len(plan.files)))
    if max(sizes) * least <= sum(sizes):
        assert len(plan.files) > least / 2


# -- what is refused ---------------------------------------------------------------------------------------


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("decoder.final_layernorm.weight"), "lacks decoder.final_layernorm.weight"),
        (_with("decoder.layers.0.mlp.extra.weight", 3), "has decoder.layers.0.mlp.extra.weight"),
        (_with("decoder.final_layernorm.weight", 65), "shape \\[65\\], but .* requires \\[64\\] for model.norm.weight"),
        (_with("output_layer.weight", 130, 64), "shape \\[130, 64\\].*\\[131, 64\\]"),
        (_with("decoder.layers.1.mlp.linear_fc2.weight", 65, 96), "shape \\[65, 96\\]"),
        (lambda tensors: tensors.clear(), "lacks embedding.word_embeddings.weight.* and \\d+ more"),
    ],
)
def test_a_model_that_is_another_is_refused(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, folder_of: Callable[[str], Path]
) -> None:
    tensors = mcore_tensors(folder_of("qwen3"))
    change(tensors)
    with pytest.raises(CheckpointMismatchError, match=words):
        plan_export(model_of(folder_of("qwen3")), weights_of(Memory(tensors)))


def test_a_head_that_a_tied_model_cannot_have(folder_of: Callable[[str], Path]) -> None:
    reader = Memory(mcore_tensors(folder_of("qwen3")))
    with pytest.raises(CheckpointMismatchError, match=r"has output_layer.weight, .*\(tied\) does not:"):
        plan_export(model_of(folder_of("qwen3-tied")), weights_of(reader))


def test_multi_token_prediction_that_is_not_there_is_left_out(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("deepseek_v3-mtp")
    tensors = mcore_tensors(folder)
    assert plan_export(model_of(folder), weights_of(Memory(tensors))).has_mtp
    reader = Memory({name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")})
    plan = plan_export(model_of(folder), weights_of(reader))
    assert not plan.has_mtp
    wanted = {name: tensor for name, tensor in weights(folder).items() if not name.startswith("model.layers.4.")}
    assert_same(exported(plan, reader, tmp_path / "hf"), wanted)
    del tensors["mtp.layers.0.enorm.weight"]
    with pytest.raises(CheckpointMismatchError, match=r"lacks mtp\.layers\.0\.enorm\.weight"):
        plan_export(model_of(folder), weights_of(Memory(tensors)))


@pytest.mark.usefixtures("small_parts")
def test_what_is_not_a_number(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_LOOK_CLOSER_ELEMENTS", 100)
    tensors = mcore_tensors(folder_of("qwen3"))
    projection = tensors["decoder.layers.2.mlp.linear_fc2.weight"]
    # Of both signs, they sum up to NaN.
    projection[3, 4], projection[3, 5] = float("inf"), float("-inf")
    plan = plan_export(model_of(folder_of("qwen3")), weights_of(Memory(tensors)))
    exported(plan, Memory(tensors), tmp_path / "infinite")
    projection[40, 7] = float("nan")
    with pytest.raises(CheckpointCorruptError, match=rf"layers.2.mlp.down_proj.weight: element {40 * 96 + 7} is NaN"):
        exported(plan, Memory(tensors), tmp_path / "refused")
    (tmp_path / "asked for").mkdir()
    write_weights(plan, [0], Memory(tensors), tmp_path / "asked for", allow_nan=True)
    found = weights(tmp_path / "asked for")["model.layers.2.mlp.down_proj.weight"]
    assert found.isnan().nonzero().tolist() == [[40, 7]]


def test_a_damaged_block_is_never_written(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    role_dir = make_checkpoint(tmp_path, folder_of("qwen3"))
    reader = NativeReader.open(role_dir)
    plan = plan_export(model_of(folder_of("qwen3")), weights_of(reader))
    path = role_dir / file_names.model_file(0, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"model_states.pt: tensor .* wrong CRC"):
        exported(plan, reader, tmp_path / "hf")


@pytest.mark.usefixtures("small_parts")
def test_tensors_that_have_their_names_already(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    reader = Memory(weights(folder_of("qwen3")))
    wanted = [HfTensor(n, i.shape, (Slab(0, n, Region.whole(i.shape)),)) for n, i in weights_of(reader).items()]
    plan = plan_tensors(wanted, weights_of(reader), max_shard_bytes=100_000)
    assert_same(exported(plan, reader, tmp_path / "hf"), reader.held)


def test_parts_of_several_dtypes(tmp_path: Path) -> None:
    held = {"a": torch.rand(3), "b": torch.rand(3, dtype=torch.float64)}
    slabs = tuple(Slab(3 * number, name, Region.whole((3,))) for number, name in enumerate(held))
    wanted = [HfTensor("both", (6,), slabs), HfTensor("zeros", (2,), (Slab(0, "", Region.whole((2,))),))]
    with pytest.raises(CheckpointMismatchError, match=r"both: the parts .* in different dtypes, torch\.float32 and"):
        plan_tensors(wanted, weights_of(Memory(held)))
    plan = plan_tensors(wanted, weights_of(Memory(held)), dtype=torch.float64)
    both = torch.cat([tensor.double() for tensor in held.values()])
    assert_same(exported(plan, Memory(held), tmp_path / "hf"), {"both": both, "zeros": torch.zeros(2).double()})


def test_a_slab_that_is_the_middle_of_a_tensor(tmp_path: Path) -> None:
    held = {"a": torch.rand(2, 5)}
    wanted = [HfTensor("middle", (4,), (Slab(0, "a", Region.whole((2, 5)).with_flat(3, 7)),))]
    plan = plan_tensors(wanted, weights_of(Memory(held)))
    assert_same(exported(plan, Memory(held), tmp_path / "hf"), {"middle": held["a"].reshape(-1)[3:7]})


def test_wider_dtypes_come_first_in_a_file(tmp_path: Path) -> None:
    # An odd number of halves would leave what is behind them unaligned.
    held = {"a": torch.rand(3).half(), "b": torch.rand(3), "c": torch.rand(5).half(), "d": torch.rand(2).double()}
    wanted = [HfTensor(n, tuple(t.shape), (Slab(0, n, Region.whole(tuple(t.shape))),)) for n, t in held.items()]
    plan = plan_tensors(wanted, weights_of(Memory(held)))
    assert_same(exported(plan, Memory(held), tmp_path / "hf"), held)
    for stored in read_file(tmp_path / "hf" / "model.safetensors"):
        assert stored.offset % stored.dtype.itemsize == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_dtypes_that_the_files_have_no_name_for(dtype: torch.dtype) -> None:
    tensor = HfTensor("a", (3,), (Slab(0, "a", Region.whole((3,))),))
    with pytest.raises(UnsupportedError, match=f"tensor a: is stored as {dtype}"):
        plan_tensors([tensor], {"a": TensorInfo(dtype, (3,))})
