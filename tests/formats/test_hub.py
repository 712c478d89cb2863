"""Models of the hub: what is downloaded, how often, by whom, and what is said where that cannot be.

huggingface_hub is the real one, and talks to a hub on this machine (hub_server.py).
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.errors import (
    AgreementError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    RemoteError,
)
from mcore_ckpt.formats.huggingface import hub as finding
from mcore_ckpt.formats.huggingface.assets import save_assets
from mcore_ckpt.formats.huggingface.hub import find_folder, find_folder_together
from mcore_ckpt.formats.huggingface.hub_names import HubModel, with_revision
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader, read_contents
from mcore_ckpt.formats.huggingface.side_files import copy_side_files
from mcore_ckpt.ranks.rounds import Agreement
from tests.support.forks import forked
from tests.support.hub_server import HubServer
from tests.support.rank_threads import on_threads
from tests.support.tiny_models import make_hf_folder

pytestmark = pytest.mark.slow

huggingface_hub = pytest.importorskip("huggingface_hub")
HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
TRANSFORMERS_4 = Path(os.environ.get("MCORE_CKPT_TRANSFORMERS4", REPOSITORY / ".venv" / "transformers4"))
IS_OLD = huggingface_hub.__version__.startswith("0.")

NAME = "tiny/Qwen3-tiny"
BESIDE = {
    "tokenizer.json": b'{"of": "the tokenizer"}',
    "merges.txt": b"a b\n",
    "tokenizer.model": b"\0",
    "chat_template.jinja": b"{{ chat }}",
    "preprocessor_config.json": b"{}",
    "modeling_own.py": b"raise SystemExit",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "README.md": b"of the model",
    "LICENSE": b"own",
    "tokenizer.model.v3": b"\0\1",
    "vocab.bpe": b"c d",
    "encoding/encode.py": b"raise SystemExit(1)",
    "original/params.json": b'{"dim": 64}',
    "figures/a/b.png": b"\x89PNG",
}
NOT_NEEDED = (
    ".gitattributes",
    ".cache/huggingface/x.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "model.fp16.safetensors",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "model.Q4_K_M.gguf",
    "additional/model.safetensors",
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published: weights in one file, what stands beside them, and much that nobody needs."""
    folder = make_hf_folder(tmp_path_factory.mktemp("published"), "qwen3")
    for name, data in {**BESIDE, **dict.fromkeys(NOT_NEEDED, b"not needed")}.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def sharded(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with the weights in several files that an index lists."""
    from tests.support.tiny_models import make_hf_model

    folder = tmp_path_factory.mktemp("sharded") / "folder"
    shutil.copytree(published, folder)
    (folder / "model.safetensors").unlink()
    make_hf_model("qwen3").save_pretrained(folder, max_shard_size="200KB")
    return folder


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def used(hub: HubServer, published: Path, tmp_path: Path) -> Iterator[HubServer]:
    """A hub that has the model, and that this process uses, with an empty cache."""
    hub.add(NAME, published)
    with hub.used(tmp_path / "home"):
        yield hub


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def tensors_in(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    tensors = read_contents(folder).tensors.values()
    return {t.name: (t.dtype, t.shape, t.path.read_bytes()[t.offset : t.offset + t.nbytes]) for t in tensors}


def assert_same_tensors(folder: Path, wanted: Path) -> None:
    HuggingFaceReader(read_contents(folder))
    assert tensors_in(folder) == tensors_in(wanted)


# -- which files -------------------------------------------------------------------------------------------

ALWAYS = {*BESIDE, "config.json", "generation_config.json"}


def test_only_what_is_needed_is_downloaded(used: HubServer, published: Path, tmp_path: Path) -> None:
    folder = find_folder(NAME, "all")
    assert files_in(folder) == sorted({*ALWAYS, "model.safetensors"})
    assert len(used.downloaded) == len(ALWAYS) + 1
    assert_same_tensors(folder, published)
    # Everything in the cache is a link, and what is copied from it is a file.
    (tmp_path / "copied").mkdir()
    copy_side_files(folder, tmp_path / "copied")
    assert files_in(tmp_path / "copied") == sorted(ALWAYS)
    for name, data in BESIDE.items():
        assert (tmp_path / "copied" / name).read_bytes() == data


def test_a_save_takes_what_the_cache_has(
    used: HubServer, published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks nobody for the rest, and says if some may be missing."""
    from transformers import Qwen3Config

    for needs in ("model", "assets"):
        folder = find_folder(NAME, needs)
        config = Qwen3Config.from_pretrained(folder)
        config.name_or_path, config._commit_hash = NAME, folder.name
        used.requests.clear()
        caplog.clear()
        save_assets(tmp_path / needs, config, None, {})
        assert used.requests == []
        wanted = ALWAYS if needs == "assets" else {"config.json"}
        assert files_in(tmp_path / needs) == sorted(wanted)
        assert ("the cache has only a part of this model" in caplog.text) == (needs == "model")


def test_of_several_weight_files_those_that_the_index_lists(hub: HubServer, sharded: Path, tmp_path: Path) -> None:
    hub.add(NAME, sharded)
    shards = set(json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(shards) > 2
    with hub.used(tmp_path / "home"):
        folder = find_folder(NAME, "all")
    assert files_in(folder) == sorted({*ALWAYS, "model.safetensors.index.json", *shards})
    assert len(hub.downloaded) == len(files_in(folder))
    assert_same_tensors(folder, sharded)


@pytest.mark.parametrize("form", ["published", "sharded"])
def test_a_model_needs_no_tokenizer(form: str, hub: HubServer, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    wanted = request.getfixturevalue(form)
    hub.add(NAME, wanted)
    with hub.used(tmp_path / "home"):
        folder = find_folder(NAME, "model")
    assert {*files_in(folder)} & ALWAYS == {"config.json"}
    assert_same_tensors(folder, wanted)
    assert len(hub.downloaded) == len(files_in(folder))


@pytest.mark.parametrize("form", ["published", "sharded"])
def test_a_configuration_needs_no_weights(
    form: str, hub: HubServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    hub.add(NAME, request.getfixturevalue(form))
    with hub.used(tmp_path / "home"):
        assert files_in(find_folder(NAME, "assets")) == sorted(ALWAYS)
        assert len(hub.downloaded) == len(ALWAYS)
        # What comes later completes it.
        hub.requests.clear()
        assert_same_tensors(find_folder(NAME, "all"), request.getfixturevalue(form))
        assert not ALWAYS & {*hub.downloaded}


def test_an_adapter(hub: HubServer, published: Path, tmp_path: Path) -> None:
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    hub.add("tiny/adapter", {**adapter, "adapter_model.bin": b"x", "optimizer.safetensors": b"x", "README.md": b""})
    hub.add(NAME, {path.name: path.read_bytes() for path in published.iterdir() if path.is_file()} | adapter)
    with hub.used(tmp_path / "home"):
        assert files_in(find_folder("tiny/adapter", "model")) == sorted(adapter)
        # Beside a model, it is not what the folder is read as.
        assert "adapter_model.safetensors" not in files_in(find_folder(NAME, "model"))


def test_a_model_without_safetensors_is_an_error(hub: HubServer, tmp_path: Path) -> None:
    hub.add(NAME, {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with hub.used(tmp_path / "home"), pytest.raises(CheckpointNotFoundError, match="published as safetensors"):
        find_folder(NAME, "all")
    assert hub.downloaded == ["config.json"]


# -- how often ---------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_downloaded(used: HubServer) -> None:
    folder = find_folder(NAME, "all")
    used.requests.clear()
    assert find_folder(NAME, "all") == folder
    # The branch may have moved. A commit cannot, but 0.36 asks all the same.
    of_commit = {f"/api/models/{NAME}/revision/{folder.name}"} if IS_OLD else set()
    assert {request.path for request in used.requests} == {f"/api/models/{NAME}/revision/main"} | of_commit
    used.requests.clear()
    assert find_folder(f"{NAME}@{folder.name}", "all") == folder
    assert used.downloaded == []
    assert {request.path for request in used.requests} == of_commit


def test_offline_nothing_is_asked(used: HubServer, tmp_path: Path) -> None:
    folder = find_folder(NAME, "all")
    used.requests.clear()
    with used.used(tmp_path / "home", HF_HUB_OFFLINE="1"):
        for name in (NAME, f"{NAME}@main", f"{NAME}@{folder.name}"):
            assert find_folder(name, "all") == folder
            assert find_folder(name, "assets") == folder
    assert used.requests == []


def test_a_branch_that_has_moved_is_fetched_anew(used: HubServer, published: Path) -> None:
    first = find_folder(NAME, "all")
    used.requests.clear()
    used.add(NAME, {"config.json": b"{}", "model.safetensors": (published / "model.safetensors").read_bytes()})
    second = find_folder(NAME, "all")
    assert second != first
    assert (second / "config.json").read_bytes() == b"{}"
    assert find_folder(f"{NAME}@{first.name}", "all") == first


def test_a_download_that_breaks_off_is_continued(used: HubServer, published: Path) -> None:
    used.cut_once["model.safetensors"] = 100_000
    if IS_OLD:  # newer ones ask again themselves
        with pytest.raises(RemoteError, match="run again; the files that have arrived are kept"):
            find_folder(NAME, "all")
    assert_same_tensors(find_folder(NAME, "all"), published)
    assert used.downloaded.count("model.safetensors") == 2


# -- names -------------------------------------------------------------------------------------------------


def test_a_folder_wins(used: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    Path(f"{NAME}@v1").mkdir()
    for name in (NAME, f"{NAME}@v1", Path(NAME), tmp_path, tmp_path / "nowhere", "nowhere", "./a/b", "a/b/", "a/b/c"):
        assert find_folder(name, "all") == Path(name)
    assert used.requests == []
    assert HubModel.find(NAME) is None
    assert find_folder(f"{NAME}@main", "all").name in used.repositories[NAME].commits


@pytest.mark.parametrize(
    "name", ["/a/b", "../b", "a/..", "a/.b", ".a/b", "a", "", "a b/c", "a/b@", "a/b@x y", "a/b/c@main"]
)
def test_what_can_only_be_a_path(name: str) -> None:
    assert HubModel.parse(name) is None


def test_a_revision(used: HubServer, published: Path) -> None:
    other = used.add(NAME, {"config.json": b'{"of": "v1"}'}, branch="refs/pr/1")
    for name in (f"{NAME}@refs/pr/1", f"{NAME}@{other}", with_revision(NAME, "refs/pr/1"), with_revision(NAME, other)):
        assert (find_folder(name, "assets") / "config.json").read_bytes() == b'{"of": "v1"}'
    assert with_revision(NAME, None) == NAME


@pytest.mark.parametrize("name", ["nowhere", "folder/of", f"{NAME}@v1"])
def test_a_revision_that_nothing_takes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder/of").mkdir(parents=True)
    with pytest.raises(InvalidArgumentError, match=r"revision 'v2'.*leave out the revision"):
        with_revision(name, "v2")


# -- what fails --------------------------------------------------------------------------------------------


def test_a_token_goes_to_the_hub_and_nowhere_else(hub: HubServer, published: Path, tmp_path: Path) -> None:
    hub.add(NAME, published, token="hf_secret", is_gated=True)
    with hub.used(tmp_path / "home", HF_TOKEN="hf_secret"):
        find_folder(NAME, "all")
    assert {request.token for request in hub.requests if NAME in request.path and "/storage" not in request.path} == {
        "hf_secret"
    }
    assert {request.token for request in hub.requests if "/storage" in request.path} == {None}


def _private(hub: HubServer) -> None:
    hub.repositories[NAME].token = "hf_secret"


def _gated(hub: HubServer) -> None:
    _private(hub)
    hub.repositories[NAME].is_gated = True


def _down(hub: HubServer) -> None:
    hub.answers_with = 503


FAILURES: dict[str, tuple[str, Callable[[HubServer], object], dict[str, str], type[CheckpointError], str]] = {
    "unknown": (
        "tiny/other",
        lambda _: None,
        {},
        CheckpointNotFoundError,
        "has no such model, or it is private.*HF_TOKEN",
    ),
    "private": (NAME, _private, {}, CheckpointNotFoundError, "has no such model, or it is private.*HF_TOKEN"),
    "not ours": (NAME, _private, {"HF_TOKEN": "hf_other"}, CheckpointNotFoundError, "HF_TOKEN"),
    "gated": (NAME, _gated, {}, RemoteError, f"accepted its terms: accept them on .*/{NAME}, and set HF_TOKEN"),
    "gated for others": (NAME, _gated, {"HF_TOKEN": "hf_other"}, RemoteError, "accepted its terms"),
    "revision": (f"{NAME}@v9", lambda _: None, {}, CheckpointNotFoundError, f"{NAME}@v9: .* has no such revision"),
    "commit": (f"{NAME}@{'0' * 40}", lambda _: None, {}, CheckpointNotFoundError, "has no such revision"),
    "offline": (
        NAME,
        lambda _: None,
        {"HF_HUB_OFFLINE": "1"},
        CheckpointNotFoundError,
        "does not have this.*HF_HUB_OFFLINE",
    ),
    "down": (NAME, _down, {}, RemoteError, "answers with 503.*run again later"),
    "impossible": ("my--tiny/model", lambda _: None, {}, InvalidArgumentError, "cannot have a model of this name"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_fails_says_what_to_do(case: str, used: HubServer, tmp_path: Path) -> None:
    name, change, variables, expected, words = FAILURES[case]
    change(used)
    with used.used(tmp_path / "home", **variables), pytest.raises(expected, match=words) as caught:
        find_folder(name, "all")
    assert type(caught.value) is expected
    assert name in str(caught.value)
    assert "hf_" not in str(caught.value).replace("hf download", "")
    assert used.downloaded == []


def test_without_a_network(used: HubServer, tmp_path: Path) -> None:
    folder = find_folder(NAME, "assets")
    with HubServer() as gone:
        pass
    with gone.used(tmp_path / "home"):
        assert find_folder(NAME, "assets") == folder, "what is in the cache is found"
        with pytest.raises(CheckpointError, match=r"has only a part of this model|published as safetensors"):
            find_folder(NAME, "all")
    with gone.used(tmp_path / "empty"), pytest.raises(RemoteError, match=rf"{gone.endpoint} cannot be reached"):
        find_folder(NAME, "all")


def test_a_part_in_the_cache_is_not_the_whole(hub: HubServer, sharded: Path, tmp_path: Path) -> None:
    hub.add(NAME, sharded)
    with hub.used(tmp_path / "home"):
        folder = find_folder(NAME, "all")
    shard = next(folder.glob("model-00002-*"))
    shard.resolve().unlink()
    shard.unlink()
    words = f"has only a part of this model.*{shard.name}"
    with hub.used(tmp_path / "home", HF_HUB_OFFLINE="1"), pytest.raises(CheckpointNotFoundError, match=words):
        find_folder(NAME, "all")
    hub.requests.clear()
    with hub.used(tmp_path / "home"):
        assert_same_tensors(find_folder(NAME, "all"), sharded)
    assert hub.downloaded == [shard.name]


def test_a_cache_that_cannot_be_written(hub: HubServer, published: Path, tmp_path: Path) -> None:
    hub.add(NAME, published)
    (tmp_path / "file").write_text("")
    with hub.used(tmp_path / "file"), pytest.raises(CheckpointError, match=r"into the cache .*set HF_HOME"):
        find_folder(NAME, "all")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointNotFoundError, match="pip install huggingface_hub"):
        find_folder(NAME, "all")


def test_signatures_of_downloads_are_in_no_message() -> None:
    error = OSError("cannot get http://cdn/file?X-Signature=abc&Expires=1 (read timed out)\nmore")
    assert finding._words(error) == "OSError: cannot get http://cdn/file?... (read timed out)"


@pytest.mark.skipif(IS_OLD, reason="this huggingface_hub has no store that models share")
def test_files_that_models_share_in_the_cache(used: HubServer, published: Path, tmp_path: Path) -> None:
    """With hf_xet, huggingface_hub 2 keeps the bytes in one store for all models, and `blobs` has links to it."""
    from huggingface_hub.utils import _shared_blobs

    folder = find_folder(NAME, "all")
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = os.path.realpath(path)
        assert _shared_blobs.publish_blob_to_shared_store(
            blob_path=blob,
            xet_hash=f"{number:064x}",
            cache_dir=str(tmp_path / "home" / "hub"),
            expected_size=os.path.getsize(blob),
            replace_existing=False,
        )
        assert os.path.islink(blob)
    assert_same_tensors(folder, published)
    (tmp_path / "copied").mkdir()
    copy_side_files(folder, tmp_path / "copied")
    assert files_in(tmp_path / "copied") == sorted(ALWAYS)
    # Links to anywhere else are refused as ever.
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="leads out of"):
        read_contents(folder)


# -- ranks -------------------------------------------------------------------------------------------------


def agreements(count: int) -> list[Agreement]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [Agreement(store, rank, count, "test", 20.0) for rank in range(count)]


def on_ranks(count: int, work: Callable[[Agreement], Any]) -> list[Any]:
    """What `work` returns or raises on each of several ranks, which are threads."""
    results = on_threads({each.rank: lambda each=each: work(each) for each in agreements(count)})
    return [results[rank] for rank in range(count)]


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks 0 and 1 run on one host, ranks 2 and 3 on another. Returns the list of the ranks that use the network."""
    at = threading.local()
    here = threading.current_thread()
    downloaders: list[int] = []
    find = finding.find_folder_together

    def found(agreement: Agreement, *rest: Any, **options: Any) -> Path:
        at.rank = agreement.rank
        return find(agreement, *rest, **options)

    run = finding._HubFiles.run

    def download(self: Any) -> Path:
        if not self.cached_only and threading.current_thread() is not here:
            downloaders.append(at.rank)
        return run(self)

    monkeypatch.setattr(finding, "this_host", lambda: f"host {at.rank // 2}")
    monkeypatch.setattr(finding._HubFiles, "run", download)
    monkeypatch.setitem(globals(), "find_folder_together", found)
    return downloaders


def test_one_rank_of_each_node_downloads(used: HubServer, two_nodes: list[int]) -> None:
    folders = on_ranks(4, lambda agreement: find_folder_together(agreement, NAME, "all"))
    assert folders == [find_folder(NAME, "all")] * 4
    assert sorted(two_nodes) == [0, 2]


def test_only_rank_0_needs_what_only_rank_0_reads(used: HubServer, two_nodes: list[int]) -> None:
    def find(agreement: Agreement) -> Path:
        name = NAME if agreement.is_coordinator else "/nowhere"
        return find_folder_together(agreement, name, "all", everywhere=False)

    folders = on_ranks(4, find)
    assert two_nodes == [0]
    assert folders == [find_folder(NAME, "all")] * 4


@pytest.mark.parametrize("on_rank_0", [True, False])
def test_what_rank_0_says_counts_for_all(on_rank_0: bool, used: HubServer) -> None:
    """So that ranks which say different things still meet in the next round, where a caller compares them."""

    def find(agreement: Agreement) -> Path:
        everywhere = agreement.is_coordinator == on_rank_0
        return find_folder_together(agreement, NAME, "all", everywhere=everywhere)

    assert on_ranks(2, find) == [find_folder(NAME, "all")] * 2


def test_all_ranks_raise_what_one_fails_with(used: HubServer, two_nodes: list[int]) -> None:
    used.answers_with = 503
    errors = on_ranks(4, lambda agreement: find_folder_together(agreement, NAME, "all"))
    assert {type(error) for error in errors} == {RemoteError}
    (text,) = {str(error) for error in errors}
    assert text.startswith(f"rank 0: {NAME}")
    assert "answers with 503" in text


def test_ranks_must_name_the_same_model(used: HubServer) -> None:
    errors = on_ranks(2, lambda agreement: find_folder_together(agreement, f"tiny/model-{agreement.rank}", "all"))
    assert {type(error) for error in errors} == {AgreementError}
    assert "they must be the same" in str(errors[1])
    assert used.downloaded == []


def test_nodes_with_different_commits_are_told_apart(
    used: HubServer, two_nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iter(("a" * 40, "b" * 40))
    monkeypatch.setattr(finding._HubFiles, "run", lambda self: Path("/cache") / next(commits))
    errors = on_ranks(4, lambda agreement: find_folder_together(agreement, NAME, "all"))
    assert {type(error) for error in errors} == {CheckpointMismatchError}
    assert "the node of rank 0 has commit" in str(errors[3])
    assert f"{NAME}@COMMIT" in str(errors[3])


def test_a_download_that_hangs_ends_with_the_deadline(
    used: HubServer, two_nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_folder(NAME, "all")  # so that only the one that hangs takes long
    monkeypatch.setattr(finding, "DOWNLOAD_TIMEOUT_S", 1.0)
    download, release = finding._HubFiles.run, threading.Event()

    def hang(self: Any) -> Path:
        folder = download(self)
        if not self.cached_only and self.model.revision is None and threading.current_thread() in late:
            release.wait(30)
        return folder

    monkeypatch.setattr(finding._HubFiles, "run", hang)
    late, stuck = [], []

    def find(agreement: Agreement) -> Path:
        if agreement.rank == 2:
            late.append(threading.current_thread())
        try:
            return find_folder_together(agreement, NAME, "all")
        except CheckpointError:
            stuck.append(agreement.rank)
            if len(stuck) == 3:
                release.set()
            raise

    errors = on_ranks(4, find)
    assert {type(error) for error in errors} == {AgreementError}
    assert "no word from rank 2 within 1 s" in str(errors[0])


PROGRAM = """
import os, socket, sys
from tests.support import hub_server
rank = int(os.environ["RANK"])
socket.gethostname = lambda: f"node-{{rank // 2}}"
hub_server.use({variables!r} | {{"HF_HOME": f"{{sys.argv[1]}}/node-{{rank // 2}}"}})
from mcore_ckpt.cli.main import main
sys.exit(main(["convert", *sys.argv[2:]]))
"""


def test_processes_of_two_nodes_download_once_for_each(hub: HubServer, sharded: Path, tmp_path: Path) -> None:
    """Four processes as torchrun starts them, with a cache on each of two nodes."""
    hub.add(NAME, sharded)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(variables=hub.variables(tmp_path)))
    command = [program, tmp_path, "--hf_model_path", NAME, "--output_path", tmp_path / "out", "--test"]
    imports = ("mcore_ckpt.cli.main", "mcore_ckpt.tools.convert.to_native")
    done = forked(command, ranks=4, imports=imports)
    assert done.returncode == 0, done.stdout + done.stderr
    needed = files_in(find_cached(tmp_path / "node-0"))
    assert needed == files_in(find_cached(tmp_path / "node-1"))
    assert hub.downloaded == sorted(2 * [name.rpartition("/")[2] for name in needed])
    asked = [request.path for request in hub.requests if request.path.endswith("/revision/main")]
    assert len(asked) == 2
    assert (tmp_path / "out" / "global_steps_0" / "actor" / "huggingface" / "tokenizer.json").is_file()


def find_cached(home: Path) -> Path:
    (folder,) = home.glob("hub/models--*/snapshots/*")
    return folder


# -- another version ---------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(IS_OLD or not TRANSFORMERS_4.exists(), reason="runs itself with huggingface_hub 0.36")
def test_with_huggingface_hub_0(inner_pytest: list[str]) -> None:
    path = os.pathsep.join([str(REPOSITORY), str(TRANSFORMERS_4), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *inner_pytest, __file__, "-k", "not processes"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
