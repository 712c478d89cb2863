"""What `inspect --html` shows is all of a checkpoint, and says of each element where it is."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt import set_metrics
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.sharding.regions import Box, Region
from mcore_ckpt.tools.examine.diff import DifferentTensor, RoleDiff
from mcore_ckpt.tools.examine.differences import DifferentValue
from mcore_ckpt.tools.examine.overview import NO_ALIAS, Overview, RoleOverview, overview_of_role
from tests.support.small_model import make, resharded, tensors_of

BEFORE_ROOMS = Path(__file__).parents[1] / "data" / "before_rooms" / "root" / "global_steps_2" / "actor"


@pytest.fixture(scope="module", params=["dense", "experts"])
def role_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of eight ranks, whose flat ranges are cut over data-parallel ranks."""
    tmp_path, has_experts = tmp_path_factory.mktemp("roots"), request.param == "experts"
    source = make(tmp_path / "a", tensors_of(has_experts), tp=2)
    sizes = {"ep": 2, "etp": 1} if has_experts else {}
    return resharded(source, tmp_path / "b", tp=2, pp=2, dp=2, **sizes)


def regions_of(role: RoleOverview) -> list[tuple[int, int, Region]]:
    """The tensor, the kind and the region of each shard, made of the columns."""
    columns = role.shards
    return [
        (tensor, kind, role.regions[region].with_flat(start, stop))
        for tensor, kind, region, start, stop in zip(
            columns.tensor, columns.kind, columns.region, columns.start, columns.stop, strict=True
        )
    ]


def test_the_shards_cover_each_tensor_exactly(role_dir: Path) -> None:
    role = overview_of_role(role_dir)
    found: dict[tuple[int, int], dict[Region, torch.Tensor]] = {}
    for tensor, kind, region in regions_of(role):
        held = torch.zeros(region.global_shape, dtype=torch.int32)
        for _, box in region.boxes():
            held[slices(box)] += 1
        # Tensor-parallel ranks that are replicas have the same region.
        found.setdefault((tensor, kind), {})[region] = held
    assert {role.tensors[tensor] for tensor, _ in found} == set(read_manifest(role_dir).tensors)
    assert {role.kinds[kind] for _, kind in found} == {"model", "param", "exp_avg"}
    for (tensor, _), by_region in found.items():
        assert torch.all(sum(by_region.values()) == 1), role.tensors[tensor]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(box.offset, box.shape, strict=True))


def test_the_bytes_of_a_shard_are_where_it_says(role_dir: Path) -> None:
    tensors = tensors_of(read_manifest(role_dir).topology.ep > 1)
    role, seen = overview_of_role(role_dir), Counter[str]()
    for number, (tensor, kind, region) in enumerate(regions_of(role)):
        if role.kinds[kind] == "exp_avg":
            continue
        file = role_dir / role.manifest.files[role.shards.file[number]].path
        offset, nbytes = role.shards.offset[number], role.shards.nbytes[number]
        assert role.dtypes[role.shards.dtype[number]] == "float32"
        stored = torch.frombuffer(bytearray(file.read_bytes()[offset : offset + nbytes]), dtype=torch.float32)
        wanted = [tensors[role.tensors[tensor]][slices(box)].reshape(-1) for _, box in region.boxes()]
        assert torch.equal(stored, torch.cat(wanted))
        seen[role.kinds[kind]] += 1
    assert seen["model"] > 10
    assert seen["param"] > 10


def test_an_alias_has_no_bytes_of_its_own(tmp_path: Path) -> None:
    role = overview_of_role(make(tmp_path, tensors_of(), aliased=True))
    aliased = {
        (role.kinds[kind], same_as if same_as == NO_ALIAS else role.kinds[same_as], nbytes > 0)
        for kind, same_as, nbytes in zip(role.shards.kind, role.shards.same_as, role.shards.nbytes, strict=True)
    }
    assert aliased == {("model", NO_ALIAS, True), ("exp_avg", NO_ALIAS, True), ("param", "model", False)}


def test_a_checkpoint_without_a_timeline(tmp_path: Path) -> None:
    """Older saves kept none, and what a tool has written was not saved."""
    for folder in (BEFORE_ROOMS, make(tmp_path, tensors_of())):
        assert overview_of_role(folder).to_json()["timeline"] is None


def test_the_page_has_the_metrics_of_the_save_and_later_ones(tmp_path: Path) -> None:
    role_dir = make(tmp_path, tensors_of())
    assert overview_of_role(role_dir).to_json()["metrics"] == {}
    manifest = replace(read_manifest(role_dir), metrics={"reward": 0.5})
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    set_metrics(tmp_path, manifest.step, {"eval": 0.25})
    assert overview_of_role(role_dir).to_json()["metrics"] == {"reward": 0.5, "eval": 0.25}


def test_the_page_gets_plain_values_alone(role_dir: Path) -> None:
    role = overview_of_role(role_dir)
    name, info = "embedding.word_embeddings.weight", TensorInfo(torch.bfloat16, (4, 8))
    tensor = DifferentTensor(name, "model", info, info, numel=32, differing=3, max_abs=float("inf"), max_rel=0.5)
    diff = RoleDiff(role_dir, Path("other"), 1, (tensor,), (DifferentValue("x", None, "1"),), ("a note",), 64)
    found = json.loads(json.dumps(Overview(7, (role,), "other", {role_dir: diff}).to_json()))
    (shown,) = found["roles"]
    sides = ["bfloat16 4x8"] * 2
    assert shown["diff"] == {
        "with": "other",
        "compared": 1,
        "tensors": [[name, "model", "values", *sides, 32, 3, None, 0.5]],
        "values": [["x", None, "1"]],
        "notes": ["a note"],
    }
    assert [dict(zip(shown["axes"], rank, strict=True)) for rank in shown["ranks"]] == [
        rank.by_axis for rank in read_manifest(role_dir).ranks
    ]
    assert sum(size for *_, size in shown["files"]) == role.manifest.nbytes
    has_experts = role.manifest.topology.ep > 1
    assert {tuple(shape) for shape, _, _ in shown["regions"]} == {
        tuple(tensor.shape) for tensor in tensors_of(has_experts).values()
    }
