"""Checkpoints of a small model through other layouts, and what is refused; without megatron."""

import os
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt import set_metrics
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.provenance import Commit, Run
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
)
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import make_folders, write_file
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.role_files import files_manifest
from mcore_ckpt.tools.convert.reshard import streaming
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from tests.support.small_model import HIDDEN, STEP, VOCABULARY, make, resharded, shapes, stored, tensors_of

pytestmark = pytest.mark.slow

QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STREAM_BYTES", 8192)


def manifest_of(role_dir: Path) -> Manifest:
    return read_manifest(role_dir)


def assert_holds(role_dir: Path, tensors: dict[str, torch.Tensor], kinds: tuple[str, ...]) -> None:
    found = stored(role_dir)
    assert found.keys() == {(name, kind) for name in tensors for kind in kinds}
    for (name, kind), tensor in found.items():
        assert torch.equal(tensor, tensors[name] + (kind == "exp_avg")), (name, kind)


LAYOUTS = [
    {"tp": 1, "dp": 3},
    {"tp": 2},
    {"tp": 4, "pp": 2, "cp": 2, "dp": 2},
    {"pp": 2, "vpp": 2, "dp": 2},
    {"pp": 4},
]
SAVED = [(tp, aliased) for aliased in (False, True) for tp in (1, 2)]


# CI runs each layout once, and takes how the source was saved in turn.
@pytest.mark.parametrize(
    ("tp", "aliased", "sizes"),
    [
        pytest.param(
            tp,
            aliased,
            sizes,
            id=f"{sizes} from tp {tp}{', aliased' if aliased else ''}",
            marks=() if SAVED[number % len(SAVED)] == (tp, aliased) else pytest.mark.full,
        )
        for number, sizes in enumerate(LAYOUTS)
        for tp, aliased in SAVED
    ],
)
def test_every_element_is_there_once_more(tp: int, sizes: dict[str, int], aliased: bool, tmp_path: Path) -> None:
    tensors = tensors_of()
    source = make(tmp_path / "a", tensors, tp=tp, aliased=aliased)
    there = resharded(source, tmp_path / "b", **sizes)
    back = resharded(there, tmp_path / "c", tp=tp, pp=1, cp=1, dp=1)
    for role_dir in (there, back):
        assert_holds(role_dir, tensors, ("model", "exp_avg") if aliased else ("model", "param", "exp_avg"))
        for path in role_dir.rglob("*.pt"):
            torch.load(path, weights_only=True, mmap=True)
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None
    aliases = [alias for f in manifest_of(there).files_of("optimizer") for alias in read_index(there, f).aliases]
    assert {alias.key.name for alias in aliases} == (set(tensors) if aliased else set())
    saved = {f.path for f in manifest_of(source).files}
    assert {f.path for f in manifest_of(back).files} == saved
    assert tracker.read_tracker(tmp_path / "b") == STEP


@pytest.mark.parametrize(
    "sizes", [{"ep": 2, "dp": 2}, {"ep": 4, "dp": 4}, {"tp": 2, "ep": 2, "etp": 1}, {"tp": 2}], ids=str
)
def test_experts(sizes: dict[str, int], tmp_path: Path) -> None:
    tensors = tensors_of(experts=True)
    source = make(tmp_path / "a", tensors)
    there = resharded(source, tmp_path / "b", **sizes)
    assert_holds(there, tensors, ("model", "param", "exp_avg"))
    assert len(manifest_of(there).files_of("experts")) == (0 if sizes == {"tp": 2} else sizes["ep"])
    back = resharded(there, tmp_path / "c", tp=1, ep=1, dp=1)
    assert {f.path for f in manifest_of(back).files} == {f.path for f in manifest_of(source).files}
    assert_holds(back, tensors, ("model", "param", "exp_avg"))


def test_manifest_says_where_things_are(tmp_path: Path) -> None:
    there = resharded(make(tmp_path / "a", tensors_of()), tmp_path / "b", tp=2, pp=2, dp=2)
    manifest = manifest_of(there)
    assert [(s.pp, s.vp, s.decoder) for s in manifest.stages] == [(0, 0, (0, 1)), (1, 0, (2, 3))]
    assert [(r.pp, r.dp, r.tp) for r in manifest.ranks] == [(p, d, t) for p in (0, 1) for d in (0, 1) for t in (0, 1)]
    by_path = {f.path: f for f in manifest.files}
    assert by_path["model/mp_rank_01_001/model_states.pt"].rank == 5
    for file in manifest.files:
        if file.index is not None:
            held = {n for first, last in file.holds for n in manifest.tensors[first : last + 1]}
            index = read_index(there, file)
            assert held == {shard.key.name for shard in index.shards}
            assert manifest.ranks[file.rank].pp == ("decoder.layers.3" in str(held) or "layers.2" in str(held))


def test_generators_and_extra_state(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of(), tp=2)
    same = resharded(source, tmp_path / "b", dp=1)
    for rank in range(2):
        path = file_names.rng_file(0, rank, 0, 0)
        assert (same / path).read_bytes() == (source / path).read_bytes()
    grown = resharded(source, tmp_path / "c", dp=2)
    manifest = manifest_of(grown)
    seed = int.from_bytes(bytes([7] * 8), "little")
    assert [read_plain(grown, file)["rank"] for file in manifest.files_of("rng")] == [0, 1, 0, 1]
    extra = {file.path: read_plain(grown, file) for file in manifest.files_of("extra")}
    assert extra[file_names.extra_file(0, 1, 0, 1)] == {"rank": 1}
    other = resharded(source, tmp_path / "e", tp=1, dp=2)
    assert [read_plain(other, file) for file in manifest_of(other).files_of("rng")] == [{"seed": seed}] * 2
    # From a seed, a seed.
    again = resharded(other, tmp_path / "d", tp=2, dp=1)
    assert [read_plain(again, file) for file in manifest_of(again).files_of("rng")] == [{"seed": seed}] * 2


def test_states_of_modules_are_copied_whole(tmp_path: Path) -> None:
    name, state = "decoder.layers.1.mlp.linear_fc1._extra_state", torch.arange(12, dtype=torch.uint8)
    source = make(tmp_path / "a", tensors_of(), opaque={name: state})
    there = resharded(source, tmp_path / "b", tp=2, pp=2)
    for tp in range(2):
        first, second = (torch.load(there / file_names.model_file(tp, pp), weights_only=True) for pp in range(2))
        assert torch.equal(first[name], state)
        assert name not in second


def test_vocabulary_is_padded_anew(tmp_path: Path) -> None:
    tensors = tensors_of()
    source = make(tmp_path / "a", tensors)
    name = "embedding.word_embeddings.weight"
    grown = stored(resharded(source, tmp_path / "b", tp=2, vocab_size=18, vocab_divisor=12))
    for kind in ("model", "param", "exp_avg"):
        assert grown[name, kind].shape[0] == 24
        assert not grown[name, kind][VOCABULARY:].any()
        assert torch.equal(grown[name, kind][:VOCABULARY], tensors[name] + (kind == "exp_avg"))
    cut = stored(resharded(source, tmp_path / "c", vocab_size=17, vocab_divisor=1))
    assert torch.equal(cut["output_layer.weight", "model"], tensors["output_layer.weight"][:17])


def test_a_value_head_is_not_cut(tmp_path: Path) -> None:
    tensors = tensors_of() | {"output_layer.weight": torch.randn(1, 8)}
    there = resharded(make(tmp_path / "a", tensors, cuts={"output_layer.weight": Cut(None)}), tmp_path / "b", tp=2)
    assert_holds(there, tensors, ("model", "param", "exp_avg"))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 3}, ["linear_fc1.weight", "[32, 8]", "tp = 3", "sections of 16 + 16 cannot be divided by 3"]),
        ({"pp": 3}, ["4 layers", "pp = 3", "--first-stage-layers"]),
        ({"pp": 8}, ["4 layers", "pp = 8"]),
        ({"pp": 2, "vpp": 4}, ["4 layers", "vpp = 4"]),
        ({"pp": 2, "first_stage_layers": 1, "last_stage_layers": 2}, ["hold 3 decoder layers", "has 4"]),
        ({"vocab_size": 21}, ["word_embeddings.weight", "21 tokens"]),
    ],
    ids=str,
)
def test_layouts_the_model_does_not_fit(sizes: dict[str, int], words: list[str], tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of())
    with pytest.raises(CheckpointMismatchError) as caught:
        resharded(source, tmp_path / "b", **sizes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "b").exists()


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of(experts=True))
    with pytest.raises(CheckpointMismatchError, match="4 experts cannot be divided among ep = 3"):
        resharded(source, tmp_path / "b", ep=3, dp=3)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 0},
        {"ep": 2},
        {"tp": 2, "world": 3},
        {"tp": 2, "dp": 2, "world": 2},
        {"vpp": 2},
        {"pipeline_layout": "Et|L"},
        {"hybrid_layer_pattern": "*-|*-"},
        {"hybrid_layer_pattern": "*?-"},
        {"hybrid_layer_pattern": "*-|*-", "pp": 2, "first_stage_layers": 1},
        {"hybrid_layer_pattern": "*-*-", "pipeline_layout": "EttttL"},
    ],
    ids=str,
)
def test_sizes_that_contradict_each_other(sizes: dict[str, int], tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of())
    with pytest.raises(InvalidArgumentError):
        resharded(source, tmp_path / "b", **sizes)


def test_heads_that_do_not_divide_where_rows_do(tmp_path: Path) -> None:
    config = b'{"num_attention_heads": 2, "num_key_value_heads": 1}'
    source = make(tmp_path / "a", tensors_of(), config=config)
    with pytest.raises(CheckpointMismatchError, match="the 2 attention heads of this tensor cannot be divided"):
        resharded(source, tmp_path / "b", tp=4)
    there = resharded(source, tmp_path / "b", tp=2)
    assert (there / "huggingface" / "config.json").read_bytes() == config
    assert [file.path for file in manifest_of(there).files_of("huggingface")] == ["huggingface/config.json"]
    # What the manifest says comes before the config of another model.
    four = {"num_attention_heads": 4, "num_query_groups": 4}
    assert resharded(make(tmp_path / "c", tensors_of(), config=config, facts=four), tmp_path / "d", tp=4)
    three = make(tmp_path / "e", tensors_of(), config=config, facts={**four, "num_attention_heads": 3})
    with pytest.raises(CheckpointMismatchError, match="the 3 attention heads of this tensor cannot be divided"):
        resharded(three, tmp_path / "f", tp=2)


def test_cuts_that_contradict_their_names(tmp_path: Path) -> None:
    wrong = make(tmp_path / "a", tensors_of(), tp=2, cuts={QKV: Cut(1)})
    with pytest.raises(
        CheckpointMismatchError, match=r"linear_qkv.*by its name it is cut along axis 0, but rank 0 of 2"
    ):
        resharded(wrong, tmp_path / "b", tp=4)
    unknown = make(
        tmp_path / "c",
        tensors_of() | {"decoder.layers.0.new.weight": torch.randn(8, 8)},
        tp=2,
        cuts={"decoder.layers.0.new.weight": Cut(0)},
    )
    with pytest.raises(CheckpointMismatchError, match=r"layers.0.new.weight: .* not cut, but rank 0 of 2 has \[4, 8\]"):
        resharded(unknown, tmp_path / "d", tp=1)
    # Where nothing is cut anew, nothing need be known.
    resharded(unknown, tmp_path / "d", pp=2)


MIXER = "decoder.layers.0.mixer."
SECTIONS = {f"{MIXER}in_proj.weight": (16, 16, 8, 8, 4), f"{MIXER}conv1d.weight": (16, 8, 8)}


def mixer() -> dict[str, torch.Tensor]:
    """Of a MambaMixer with 4 heads of 4, 2 groups, a state of 4."""
    shapes = {"in_proj.weight": (52, HIDDEN), "conv1d.weight": (32, 1, 4), "A_log": (4,), "D": (4,)}
    shapes |= {"norm.weight": (16,), "out_proj.weight": (HIDDEN, 16), "in_proj.layer_norm_weight": (HIDDEN,)}
    return {f"{MIXER}{name}": torch.randn(shape) for name, shape in shapes.items()}


# CI cuts what was whole, makes whole what was cut, and cuts anew what was cut otherwise.
@pytest.mark.parametrize(
    ("saved", "new"),
    [
        pytest.param(1, 2, marks=pytest.mark.full),
        (1, 4),
        (2, 1),
        pytest.param(2, 4, marks=pytest.mark.full),
        (4, 2),
    ],
)
def test_the_sections_of_mixers_are_cut_each_by_itself(saved: int, new: int, tmp_path: Path) -> None:
    tensors = tensors_of() | mixer()
    cuts = {name: Cut(0, sections) for name, sections in SECTIONS.items()}
    there = resharded(make(tmp_path / "a", tensors, tp=saved, cuts=cuts), tmp_path / "b", tp=new)
    assert_holds(there, tensors, ("model", "param", "exp_avg"))
    for rank in range(new):
        local = torch.load(there / file_names.model_file(rank, 0), weights_only=True)
        for name, sections in SECTIONS.items():
            wanted = [section.chunk(new)[rank] for section in tensors[name].split(sections)]
            assert torch.equal(local[name], torch.cat(wanted)), name
        assert torch.equal(local[f"{MIXER}out_proj.weight"], tensors[f"{MIXER}out_proj.weight"].chunk(new, 1)[rank])
        for name in ("A_log", "D", "norm.weight"):
            assert torch.equal(local[MIXER + name], tensors[MIXER + name].chunk(new)[rank])


def test_a_mixer_whose_sections_are_not_said(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of() | mixer())
    with pytest.raises(CheckpointMismatchError, match=r"mixer.conv1d.weight: .* Keep the tensor-parallel size of 1"):
        resharded(source, tmp_path / "b", tp=2)
    resharded(source, tmp_path / "b", pp=2)


def test_a_tensor_whose_stage_is_not_known(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of() | {"vision.weight": torch.randn(8)})
    with pytest.raises(
        CheckpointMismatchError, match=r"vision\.weight: the tensor's name does not show which of 2 pipeline ranks"
    ):
        resharded(source, tmp_path / "b", pp=2)


# -- faults ------------------------------------------------------------------------------------------------


def test_a_damaged_block_is_named_and_nothing_comes(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of())
    file = next(f for f in manifest_of(source).files if f.kind == "model")
    shard = next(s for s in read_index(source, file).shards if s.key.name == QKV)
    with (source / file.path).open("r+b") as opened:
        opened.seek(shard.offset + 3)
        byte = opened.read(1)
        opened.seek(shard.offset + 3)
        opened.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointCorruptError) as caught:
        resharded(source, tmp_path / "b", tp=2)
    assert file.path in str(caught.value)
    assert QKV in str(caught.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", ["model", "optimizer", "common", "rng", "extra"])
def test_a_cut_file_is_found_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of())
    path = source / manifest_of(source).files_of(kind)[0].path
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointCorruptError, match=path.name):
        resharded(source, tmp_path / "b", dp=1)
    assert not (tmp_path / "b").exists()


def test_a_damaged_small_file_is_not_copied(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of())
    path = source / file_names.COMMON_FILE
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"common\.pt: has a wrong CRC"):
        resharded(source, tmp_path / "b", dp=2)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_run_keeps_what_was_there(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "a", tensors_of())
    before = resharded(source, tmp_path / "b", tp=2)
    attempt = manifest_of(before).attempt
    calls = []

    def fail(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        return write(*arguments)

    write = streaming._write
    monkeypatch.setattr(streaming, "_write", fail)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        resharded(source, tmp_path / "b", force=True, pp=2)
    assert manifest_of(before).attempt == attempt
    assert sorted(path.name for path in before.parent.iterdir()) == ["actor"]
    monkeypatch.undo()
    resharded(source, tmp_path / "b", force=True, pp=2)
    assert manifest_of(before).topology.pp == 2


def test_without_megatron_and_a_killed_run_leaves_what_the_next_one_removes(tmp_path: Path) -> None:
    """In one process, the killed run after a whole one: to import torch takes longer."""
    source = make(tmp_path / "a", tensors_of())
    script = (
        "import os, sys\nfrom mcore_ckpt.cli.main import main\n"
        "def run(target):\n"
        f"    assert main(['reshard', {str(source)!r}, target, '--tp', '2', '--json']) == 0\n"
        f"run({str(tmp_path / 'c')!r})\n"
        "assert not any(name.split('.')[0] == 'megatron' for name in sys.modules), 'megatron'\n"
        "from mcore_ckpt.steps import commit\n"
        "commit.write_manifest = lambda *_: os.kill(os.getpid(), 9)\n"
        f"run({str(tmp_path / 'b')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == -9
    assert len(shapes()) == len(manifest_of(tmp_path / "c" / f"global_steps_{STEP}" / "actor").tensors)
    assert not steps.complete_steps(tmp_path / "b")
    there = resharded(source, tmp_path / "b", tp=2)
    assert [path.name for path in there.parent.iterdir()] == ["actor"]


# -- roles and paths ---------------------------------------------------------------------------------------


def test_a_step_is_resharded_whole_and_a_role_alone(tmp_path: Path) -> None:
    tensors = tensors_of()
    for role in ("actor", "critic"):
        make(tmp_path / "a", tensors, role=role, roles=("actor", "critic"))
    report = reshard(select(tmp_path / "a"), tmp_path / "b", WantedLayout(tp=2))
    assert [role.role for role in report.roles] == ["actor", "critic"]
    assert report.nbytes == 2 * report.roles[0].nbytes
    (status,) = steps.complete_steps(tmp_path / "b")
    assert status.committed == {"actor", "critic"}
    reshard(select(tmp_path / "a" / f"global_steps_{STEP}" / "critic"), tmp_path / "c", WantedLayout(tp=2))
    (status,) = steps.complete_steps(tmp_path / "c")
    assert status.committed == status.declared == {"critic"}


def test_metrics_that_were_set_later_go_along(tmp_path: Path) -> None:
    roles = ("actor", "recover_info")
    make(tmp_path / "a", tensors_of(), roles=roles)
    make_part(tmp_path / "a", roles)
    set_metrics(tmp_path / "a", STEP, {"reward": 0.9}, role="actor")
    set_metrics(tmp_path / "a", STEP, {"prompts": 7}, role="recover_info")
    reshard(select(tmp_path / "a"), tmp_path / "b", WantedLayout(tp=2))
    (status,) = steps.complete_steps(tmp_path / "b")
    assert status.metrics == {"reward": 0.9, "prompts": 7.0}


def test_what_the_trainer_keeps_beside_the_roles_goes_along(tmp_path: Path) -> None:
    role = make(tmp_path / "a", tensors_of())
    (role.parent / "data.pt").write_bytes(b"position")
    (role.parent / "transfer_queue" / "deep").mkdir(parents=True)
    (role.parent / "transfer_queue" / "deep" / "0.pkl").write_bytes(b"prompts")
    for path in (tmp_path / "a", role):
        root = tmp_path / f"of {path.name}"
        assert reshard(select(path), root, WantedLayout(tp=1)).beside == ("data.pt", "transfer_queue")
        step_path = root / role.parent.name
        assert (step_path / "data.pt").read_bytes() == b"position"
        assert (step_path / "transfer_queue" / "deep" / "0.pkl").read_bytes() == b"prompts"
        assert not [each for each in step_path.iterdir() if each.name.startswith(".")]
        with pytest.raises(InvalidArgumentError):
            reshard(select(path), root, WantedLayout(tp=1))
        reshard(select(path), root, WantedLayout(tp=1), force=True)
    # What somebody else keeps there is not replaced either.
    (tmp_path / "b" / role.parent.name).mkdir(parents=True)
    (tmp_path / "b" / role.parent.name / "data.pt").write_bytes(b"another's")
    with pytest.raises(InvalidArgumentError, match=r"data\.pt: is there already"):
        reshard(select(role), tmp_path / "b", WantedLayout(tp=1))
    assert os.listdir(tmp_path / "b" / role.parent.name) == ["data.pt"]


def test_what_is_not_there(tmp_path: Path) -> None:
    make(tmp_path / "a", tensors_of(), roles=("actor", "critic"))
    for source in (tmp_path / "a", tmp_path / "a" / f"global_steps_{STEP}", tmp_path / "none"):
        with pytest.raises(CheckpointNotFoundError):
            select(source)
    role_dir = make(tmp_path / "b", tensors_of())
    with pytest.raises(CheckpointNotFoundError, match="step 4"):
        select(tmp_path / "b", 4)
    with pytest.raises(InvalidArgumentError, match="of step 5, not 4"):
        select(role_dir, 4)


def test_it_does_not_replace_what_it_reads(tmp_path: Path) -> None:
    source = make(tmp_path / "a", tensors_of())
    with pytest.raises(InvalidArgumentError, match="has the checkpoint to reshard"):
        resharded(source, tmp_path / "a", tp=2)


def make_part(root: Path, roles: tuple[str, ...], step: int = STEP, number: int = 1) -> Path:
    """What a framework keeps beside its models, here of a run."""
    role_dir, attempt, data = file_names.step_dir(root, step) / "recover_info", commit.new_attempt(), b'{"step": 5}'
    staging = commit.open_staging(role_dir, attempt)
    make_folders(staging, "sub/step_info.json")
    write_file(staging / "sub" / "step_info.json", [data])
    file = WrittenFile("sub/step_info.json", "recover_info", len(data), zlib.crc32(data))
    manifest = files_manifest("recover_info", step, roles, attempt, [(0, file)], 1)
    of_run = replace(manifest, run=Run(root.name), commit=Commit(number, None, ((1, number),)))
    commit.write_manifest(staging, of_run)
    commit.publish(staging, role_dir, attempt)
    return role_dir


def test_parts_that_are_no_models_go_along(tmp_path: Path) -> None:
    """Weights without the data position that belongs to them would count as a whole step."""
    roles = ("actor", "recover_info")
    make(tmp_path / "a", tensors_of(shapes()), roles=roles)
    part = make_part(tmp_path / "a", roles)
    reshard(select(tmp_path / "a"), tmp_path / "b", WantedLayout(tp=2))
    (status,) = steps.complete_steps(tmp_path / "b")
    assert status.committed == status.declared == set(roles)
    copied = status.role_dir("recover_info")
    assert (copied / "sub" / "step_info.json").read_bytes() == (part / "sub" / "step_info.json").read_bytes()
    assert manifest_of(copied).files == manifest_of(part).files
    (part / "sub" / "step_info.json").write_bytes(b'{"step": 6}')
    with pytest.raises(CheckpointCorruptError, match="wrong CRC"):
        reshard(select(tmp_path / "a"), tmp_path / "c", WantedLayout(tp=2))
    assert steps.complete_steps(tmp_path / "c") == []


def test_a_step_takes_its_place_by_its_number_and_belongs_to_the_root(tmp_path: Path) -> None:
    """A training that has gone on there goes on from its own newest step."""
    roles = ("actor", "recover_info")
    make(tmp_path / "a", tensors_of(shapes()), roles=roles)
    make_part(tmp_path / "a", roles, number=70)
    for number, step in enumerate((STEP - 1, STEP + 1), 1):
        make_part(tmp_path / "b", ("recover_info",), step, number)
    tracker.update_tracker(tmp_path / "b")
    reshard(select(tmp_path / "a"), tmp_path / "b", WantedLayout(tp=2))
    assert [status.step for status in steps.complete_steps(tmp_path / "b")] == [STEP - 1, STEP, STEP + 1]
    assert tracker.read_tracker(tmp_path / "b") == STEP + 1
    (status,) = steps.list_steps(tmp_path / "b", STEP)
    assert [(head.run, head.commit) for head in status.heads] == 2 * [(None, Commit(1, None, ((1, 1),)))]
