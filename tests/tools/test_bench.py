"""What a bench counts, and what it predicts from given speeds. Nothing here depends on a time that was measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointNotFoundError, CommitError, InvalidArgumentError
from mcore_ckpt.ranks.meeting import single_process_agreement
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.convert.to_native import convert_to_native
from mcore_ckpt.tools.examine.doctor.speed import FILE_SYSTEM, PROCESSORS
from mcore_ckpt.tools.maintain.bench import predict as predicting
from mcore_ckpt.tools.maintain.bench import trial_saves
from mcore_ckpt.tools.maintain.bench.predict import (
    COMMIT,
    COPY,
    OPEN,
    PIN,
    PLAN,
    READ,
    WRITE,
    WRITE_IN_PLACE,
    bottleneck,
    predict,
)
from mcore_ckpt.tools.maintain.bench.size import SaveSize, Training, size_of_model, size_of_parameters
from mcore_ckpt.tools.maintain.bench.speeds import GpuSpeeds, Speeds
from mcore_ckpt.tools.maintain.bench.trial_saves import TrialSaves
from tests.support.tiny_models import make_hf_folder

GB = 10**9
SPEEDS = Speeds(
    ranks=4,
    trial_bytes=GB,
    copies=((GB, 20.0 * GB), (4 * GB, 10.0 * GB)),
    fetch_bytes_per_s=1 * GB,
    write_bytes_per_s=2 * GB,
    write_in_place_bytes_per_s=1 * GB,
    read_bytes_per_s=4 * GB,
    raw_write_bytes_per_s=2 * GB,
    write_limit=FILE_SYSTEM,
    open_s=0.01,
    small_write_s=0.02,
    commit_s=0.03,
    sync_s=0.001,
)
SIZE = SaveSize.of_bytes(20 * GB, ranks=4, tensors=1000)
PLAN_S = predicting.PLAN_S + 1000 * predicting.PLAN_S_PER_TENSOR
COMMIT_S = 0.03 + 1000 * predicting.COMMIT_S_PER_TENSOR


def test_a_state_in_host_memory() -> None:
    found = predict(SIZE, SPEEDS)
    begin = {OPEN: 0.01, PLAN: PLAN_S}
    # All ranks of the node copy, write and read at once.
    assert found.stall.parts == pytest.approx(begin | {COPY: 2.0})
    assert found.async_save.parts == pytest.approx(begin | {COPY: 2.0, WRITE: 10.02, COMMIT: COMMIT_S})
    assert found.sync_save.parts == pytest.approx(begin | {WRITE_IN_PLACE: 20.02, COMMIT: COMMIT_S})
    assert found.first_stall.parts == pytest.approx(begin | {WRITE_IN_PLACE: 20.02})
    # Each rank has a thread of its own, which works half of the time.
    assert found.prepared_after_s == pytest.approx(10.0)
    assert found.load.parts == pytest.approx({PLAN: 1000 * predicting.LOAD_PLAN_S_PER_TENSOR, READ: 5.0})
    assert found.file_system_bytes_per_s == pytest.approx(20 * GB / 10.02)
    assert found.async_save.seconds == pytest.approx(sum(found.async_save.parts.values()))


@pytest.mark.parametrize(("gigabytes", "speed"), [(0, 20), (0.5, 20), (1, 20), (2, 15), (4, 10), (9, 10)])
def test_larger_states_are_copied_more_slowly(gigabytes: float, speed: float) -> None:
    assert SPEEDS.copy_bytes_per_s(int(gigabytes * GB)) == pytest.approx(speed * GB)


def test_copies_of_one_size() -> None:
    assert replace(SPEEDS, copies=((GB, 20.0 * GB), (GB, 10.0 * GB))).copy_bytes_per_s(GB) == 20 * GB


@pytest.mark.parametrize(("copy_speed", "slower"), [(5 * GB, {WRITE: 10.02}), (GB // 4, {COPY: 20.0})])
def test_a_state_on_gpus(copy_speed: int, slower: dict[str, float]) -> None:
    found = predict(SIZE, replace(SPEEDS, gpu=GpuSpeeds("a GPU", copy_speed, GB // 2)))
    begin = {OPEN: 0.01, PLAN: PLAN_S}
    copy = {COPY: 5 * GB / copy_speed}
    assert found.stall.parts == pytest.approx(begin | copy)
    assert found.first_stall.parts == pytest.approx(begin | {PIN: 10.0} | copy)
    # It writes what has been copied while it copies the rest.
    assert found.async_save.parts == pytest.approx(begin | slower | {COMMIT: COMMIT_S})
    assert found.sync_save == found.async_save


def test_more_ranks_than_were_measured_commit_later() -> None:
    size = replace(SIZE, topology=replace(SIZE.topology, world_size=1004, dp=251))
    assert predict(size, SPEEDS).sync_save.parts[COMMIT] == pytest.approx(
        COMMIT_S + 1000 * predicting.COMMIT_S_PER_RANK
    )


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (SPEEDS, "writing in place, 1.0 GB/s: the processors are the limit"),
        (
            replace(SPEEDS, write_in_place_bytes_per_s=1.5 * GB),
            "writing in place, 1.5 GB/s: the file system is the limit",
        ),
        (replace(SPEEDS, commit_s=30.0), "the commit, in which rank 0 waits for small files; each takes 1.0 ms"),
        (replace(SPEEDS, open_s=30.0), "opening"),
    ],
)
def test_what_a_synchronous_save_waits_for(speeds: Speeds, words: str) -> None:
    assert bottleneck(predict(SIZE, speeds).sync_save, speeds) == words


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (FILE_SYSTEM, "writing, 2.0 GB/s: the file system is the limit"),
        (PROCESSORS, "writing, 2.0 GB/s: the processors are the limit"),
        ("", "writing, 2.0 GB/s: neither the file system nor the processors are the limit"),
    ],
)
def test_what_an_async_save_waits_for(limit: str, words: str) -> None:
    speeds = replace(SPEEDS, write_limit=limit)
    assert bottleneck(predict(SIZE, speeds).async_save, speeds) == words


def test_what_stalls_and_loads_wait_for() -> None:
    found = predict(SIZE, SPEEDS)
    assert bottleneck(found.stall, SPEEDS) == "copying in host memory, 10.0 GB/s"
    assert bottleneck(found.load, SPEEDS) == "reading, 4.0 GB/s"
    assert bottleneck(found.load, replace(SPEEDS, read_bytes_per_s=340_000)) == "reading, 340.0 kB/s"
    speeds = replace(SPEEDS, gpu=GpuSpeeds("a GPU", 5 * GB, GB))
    assert bottleneck(predict(SIZE, speeds).stall, speeds) == "copying from a GPU, 5.0 GB/s"


# -- sizes ------------------------------------------------------------------------------------------------------


def layout(**sizes: int) -> WantedLayout:
    return WantedLayout(**sizes)


sizes = st.integers(1, 4)


@given(st.integers(1, 10**6), sizes, sizes, sizes, sizes, st.integers(1, 9))
def test_every_byte_is_written_once(parameters: int, tp: int, pp: int, cp: int, dp: int, per_node: int) -> None:
    found = size_of_parameters(parameters, Training(layout(tp=tp, pp=pp, cp=cp, dp=dp), ranks_per_node=per_node))
    ranks = tp * pp * cp * dp
    assert found.ranks == ranks
    assert found.total_bytes == 14 * parameters
    # Each rank may lose a fraction of a byte.
    assert found.total_bytes <= (found.rank_bytes + 1) * ranks + 14 * pp
    assert found.total_bytes - ranks <= found.node_bytes * found.nodes + 14 * pp
    assert found.rank_bytes <= found.node_bytes <= min(per_node, ranks) * found.rank_bytes
    # A load reads the model once for each replica.
    assert found.node_load_bytes >= found.node_bytes


@pytest.mark.parametrize(
    ("training", "nbytes"),
    [
        (Training(), 14),
        (Training(optimizer="sgd"), 10),
        (Training(dtype="fp32"), 12),
        (Training(dtype="fp32", contents=("optimizer",)), 12),
        (Training(contents=("model",)), 2),
        (Training(contents=("optimizer",)), 12),
        (Training(dtype="fp32", optimizer="lion", contents=("model",)), 4),
    ],
)
def test_bytes_of_a_parameter(training: Training, nbytes: int) -> None:
    assert size_of_parameters(1000, training).total_bytes == 1000 * nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "fp8"},
        {"optimizer": "adagrad"},
        {"contents": ()},
        {"contents": ("model", "extra")},
        {"ranks_per_node": 0},
    ],
)
def test_unusable_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        Training(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"ep": 2}, {"vpp": 2}, {"tp": 0}])
def test_layouts_that_a_number_of_parameters_cannot_have(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        size_of_parameters(1000, Training(layout(**wrong)))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_folder(tmp_path_factory.mktemp("dense") / "hf", "qwen3", dtype="bfloat16")


def test_stages_of_a_model(dense: Path, tmp_path: Path) -> None:
    """The sizes are those of the files that a conversion writes for the same layout."""
    convert_to_native(dense, tmp_path, layout(pp=2), single_process_agreement("bench", 10))
    files = sorted(tmp_path.rglob("model_states.pt"))
    tensors = [sum(t.nbytes for t in torch.load(file, weights_only=True).values()) for file in files]
    found = size_of_model(dense, Training(layout(pp=2), contents=("model",), ranks_per_node=1))
    assert (found.total_bytes, found.node_bytes, found.rank_bytes) == (sum(tensors), max(tensors), max(tensors))
    assert found.files == 2 + 2  # random states, model


def test_nodes_with_ranks_of_two_stages(dense: Path) -> None:
    by_node = [size_of_model(dense, Training(layout(pp=2, dp=3), ranks_per_node=number)) for number in (1, 2, 3, 6)]
    one, two, three, six = (found.node_bytes for found in by_node)
    assert (two, three) == (2 * one, 3 * one)  # those of the larger stage
    assert six < 2 * three
    assert six == pytest.approx(by_node[0].total_bytes, abs=6)


def test_experts(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path / "hf", "mixtral", dtype="bfloat16")
    alone = size_of_model(folder, Training(layout(dp=4)))
    apart = size_of_model(folder, Training(layout(dp=4, ep=4)))
    assert (alone.total_bytes, alone.rank_bytes) == (apart.total_bytes, apart.rank_bytes)
    # Each rank loads a fourth of the experts, and there is a file for each fourth.
    assert apart.node_load_bytes < alone.node_load_bytes
    assert apart.files == alone.files + 4


def test_layers_that_cannot_be_divided(dense: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="4 layers on pp = 3"):
        size_of_model(dense, Training(layout(pp=3)))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        size_of_model(tmp_path, Training())


# -- trial saves ------------------------------------------------------------------------------------------------


def test_a_trial_save_is_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrialSaves(tmp_path / "steps", 3 << 20, ranks=2) as saves:
        assert saves.nbytes == pytest.approx(3 << 20, rel=0.01)
        for copied in (True, False):
            folder, times = saves.keep(copied)
            assert (times.copy_s > 1e-6) or not copied
            assert main(["verify", str(folder)]) == 0
            assert "sound, 7 files" in capsys.readouterr().out
        copied_file, in_place_file = sorted(tmp_path.glob("steps/*/actor/model/mp_rank_01_000/model_states.pt"))
        assert copied_file.read_bytes() == in_place_file.read_bytes()
        saves.save(copied=True)
    assert sorted(path.name for path in (tmp_path / "steps").glob("global*")) == ["global_steps_1", "global_steps_2"]


def test_a_trial_save_looks_at_its_files_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a save does, so that the time of a commit contains it."""
    monkeypatch.setattr(trial_saves, "sync_names", lambda staging, paths: (staging / min(paths)).unlink())
    cannot_see = pytest.raises(CommitError, match="rank 0 cannot see it")
    with TrialSaves(tmp_path / "steps", 1 << 20, ranks=1) as saves, cannot_see:
        saves.save(copied=False)
