"""A checkpoint whose files lie on several nodes: the same bytes as of the whole one, whatever is missing or rotted."""

import logging
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.fast.peer_server import PeerServer
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.fast.spread_folder import Source, SpreadFolder
from mcore_ckpt.formats.native import folder as folder_module
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange, runs
from tests.support import small_model
from tests.support.waiting import LONG_S

KEY = f"global_steps_{small_model.STEP}/actor"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint of two ranks."""
    return small_model.make(tmp_path_factory.mktemp("whole"), small_model.tensors_of(), tp=2)


class NodesOfTest:
    """Nodes' folders, and the sources that a rank on node 0 sees. Other nodes have real servers."""

    def __init__(self, root: Path, whole: Path, stack: ExitStack) -> None:
        self.root, self.whole, self.stack = root, whole, stack
        self.manifest = read_manifest(whole)
        self.servers: dict[int, PeerServer] = {}
        self.stores: dict[int, PeerStore] = {}

    def place(self, node: int) -> Path:
        return self.root / str(node) / KEY

    def put(self, node: int, has: Sequence[int]) -> Source:
        """Gives a node some files of the checkpoint, and returns it as a source of node 0."""
        place = self.place(node)
        place.mkdir(parents=True)
        shutil.copy(self.whole / file_names.MANIFEST_FILE, place)
        for position in has:
            path = self.manifest.files[position].path
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.whole / path, place / path)
        if node == 0:
            return Source(LocalFolder(place), tuple(runs(has)))
        self.servers[node] = self.stack.enter_context(
            closing(PeerServer(self.root / str(node), b"secret", "127.0.0.1"))
        )
        store = PeerStore(self.servers[node].address, b"secret", f"node{node}", LONG_S)
        self.stores[node] = self.stack.enter_context(closing(store))
        return Source(RemoteFolder(store, KEY), tuple(runs(has)))

    def spread(self, *sources: Source) -> SpreadFolder:
        return SpreadFolder(self.place(0), self.manifest.attempt, sources)

    def rot(self, node: int, position: int, at: int | None = None) -> None:
        """Flips a bit of a file: of its first tensor, if the file has tensors."""
        file = self.manifest.files[position]
        if at is None:
            at = read_index(self.whole, file).shards[0].offset + 3 if file.index else file.size // 2
        with (self.place(node) / file.path).open("r+b") as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 4]))


@pytest.fixture
def nodes(tmp_path: Path, whole: Path) -> Iterator[NodesOfTest]:
    with ExitStack() as stack:
        yield NodesOfTest(tmp_path, whole, stack)


def everything(folder: Folder) -> dict[Any, Any]:
    """All tensors, by file, name and kind, and all small files."""
    manifest = folder.manifest()
    files = {file.path: file for file in manifest.files}
    folder.check(manifest.files)
    found: dict[Any, Any] = {}
    reads = []
    for file in manifest.files:
        if file.index is None:
            found[file.path] = folder.plain(file)
            continue
        entries = folder.index(file)
        for shard in (shard for name in manifest.tensors for shard in entries.of(name).shards):
            memory = torch.full((shard.region.numel,), -7, dtype=torch_dtype(shard.dtype))
            reads.append((ReadRange(shard, Rows(0, 0, shard.region.numel)), memory))
            found[file.path, shard.key] = memory
    folder.fill(files, reads)
    return found


@pytest.fixture(scope="module")
def expected(whole: Path) -> dict[Any, Any]:
    return everything(LocalFolder(whole))


def test_a_folder_is_read_where_the_system_tells_no_mounts(
    whole: Path, expected: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tells_not(place: Path) -> bool:
        raise FileNotFoundError("/proc/self/mountinfo")

    monkeypatch.setattr(folder_module, "is_memory", tells_not)
    assert_same(everything(LocalFolder(whole)), expected)


def assert_same(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key
        else:
            assert str(found[key]) == str(value)


def test_files_of_three_nodes_make_the_checkpoint(
    nodes: NodesOfTest, expected: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    count = len(nodes.manifest.files)
    sources = [nodes.put(node, range(node, count, 3)) for node in range(3)]
    folder = nodes.spread(*sources)
    with caplog.at_level(logging.WARNING):
        assert_same(everything(folder), expected)
        assert folder.verify(nodes.manifest.files) == []
    assert not caplog.records
    assert (str(folder), folder.place) == (str(nodes.place(0)), nodes.place(0))


def test_a_whole_file_is_fetched_from_a_peer_if_the_own_one_is_lost_or_rotted(
    nodes: NodesOfTest, tmp_path: Path
) -> None:
    file = nodes.manifest.files[0]
    folder = nodes.spread(nodes.put(0, [0]), nodes.put(1, [0]))
    own = nodes.place(0) / file.path
    for damage in (lambda: own.write_bytes(bytes(file.size)), own.unlink):
        damage()
        target = tmp_path / "fetched"
        folder.fetch(file, target)
        assert target.read_bytes() == (nodes.whole / file.path).read_bytes()
        target.unlink()


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_spread(
    tmp_path_factory: pytest.TempPathFactory,
    whole: Path,
    expected: dict[Any, Any],
    data: st.DataObject,
) -> None:
    """Each file on one or more nodes, any of its copies but one rotted or missing."""
    manifest = read_manifest(whole)
    count = len(manifest.files)
    some = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
    by_file = [data.draw(some) for _ in range(count)]
    with ExitStack() as stack:
        nodes = NodesOfTest(tmp_path_factory.mktemp("spread"), whole, stack)
        has = [[position for position, on in enumerate(by_file) if node in on] for node in range(3)]
        sources = [nodes.put(node, has[node]) for node in range(3)]
        for position, on in enumerate(by_file):
            for node in on[1:]:
                damage = data.draw(st.sampled_from(["none", "rot", "cut", "missing"]))
                path = nodes.place(node) / manifest.files[position].path
                if damage == "rot":
                    nodes.rot(node, position)
                elif damage == "cut":
                    os.truncate(path, manifest.files[position].size - 1)
                elif damage == "missing":
                    path.unlink()
        assert_same(everything(nodes.spread(*sources)), expected)
        assert nodes.spread(*sources).verify(manifest.files) == []


def test_the_nearest_source_is_read(nodes: NodesOfTest, expected: dict[Any, Any]) -> None:
    """The last one need not even exist, if the others have all."""
    count = len(nodes.manifest.files)
    near, far = nodes.put(0, range(count - 1)), nodes.put(1, [count - 1])
    nowhere = Source(LocalFolder(nodes.root / "nowhere"))
    assert_same(everything(nodes.spread(near, far, nowhere)), expected)


def test_the_root_has_what_the_nodes_have_not(nodes: NodesOfTest, expected: dict[Any, Any]) -> None:
    assert_same(everything(nodes.spread(nodes.put(0, [0, 3]), Source(LocalFolder(nodes.whole)))), expected)


@pytest.mark.parametrize("damage", ["rotted", "missing", "cut", "longer", "folder"])
@pytest.mark.parametrize("node", [0, 1])
def test_one_file_of_a_node_is_bad(
    nodes: NodesOfTest, expected: dict[Any, Any], caplog: pytest.LogCaptureFixture, damage: str, node: int
) -> None:
    """The other node's copy takes its place, and all other files still come from the first node."""
    every = range(len(nodes.manifest.files))
    sources = [nodes.put(node, every), nodes.put(2, every)]
    file = nodes.manifest.files[1]
    path = nodes.place(node) / file.path
    if damage == "rotted":
        nodes.rot(node, 1)
    elif damage in ("cut", "longer"):
        os.truncate(path, file.size + (1 if damage == "longer" else -1))
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert_same(everything(nodes.spread(*sources)), expected)
    assert f"{file.path} is read from node2:{KEY}, because" in caplog.text
    assert not any(other.path in caplog.text for other in nodes.manifest.files if other is not file)
    assert nodes.spread(*sources).verify(nodes.manifest.files) == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_rotted_block_without_another_copy_is_an_error(nodes: NodesOfTest, node: int) -> None:
    every = range(len(nodes.manifest.files))
    source = nodes.put(node, every)
    nodes.rot(node, 1)
    path = nodes.manifest.files[1].path
    with pytest.raises(CheckpointCorruptError, match=rf"{path}.* wrong CRC"):
        everything(nodes.spread(source))
    (damage,) = nodes.spread(source).verify(nodes.manifest.files)
    assert damage.file == path


def test_all_copies_are_rotted(nodes: NodesOfTest) -> None:
    """The message names every place."""
    every = range(len(nodes.manifest.files))
    sources = [nodes.put(0, every), nodes.put(1, every)]
    nodes.rot(0, 1)
    nodes.rot(1, 1)
    with pytest.raises(CheckpointCorruptError, match="cannot be read from any of 2 places") as caught:
        everything(nodes.spread(*sources))
    assert str(nodes.place(0)) in str(caught.value)
    assert f"node1:{KEY}" in str(caught.value)


def test_a_rotted_index_and_a_rotted_small_file(nodes: NodesOfTest, expected: dict[Any, Any]) -> None:
    every = range(len(nodes.manifest.files))
    sources = [nodes.put(0, every), nodes.put(1, every)]
    for position, file in enumerate(nodes.manifest.files):
        nodes.rot(0, position, file.index.offset + 5 if file.index else None)
    assert_same(everything(nodes.spread(*sources)), expected)


def test_a_dead_node(nodes: NodesOfTest, expected: dict[Any, Any]) -> None:
    every = range(len(nodes.manifest.files))
    sources = [nodes.put(1, every), nodes.put(2, every)]
    assert_same(everything(nodes.spread(*sources)), expected)
    nodes.servers[1].close()
    assert_same(everything(nodes.spread(*sources)), expected)
    assert nodes.spread(*sources).verify(nodes.manifest.files) == []
    nodes.servers[2].close()
    with pytest.raises(CheckpointCorruptError, match="its manifest cannot be read from any of 2 places"):
        everything(nodes.spread(*sources))


def test_a_node_that_dies_after_the_manifest(nodes: NodesOfTest, expected: dict[Any, Any]) -> None:
    every = range(len(nodes.manifest.files))
    sources = [nodes.put(1, every), nodes.put(2, every)]
    folder, verified = nodes.spread(*sources), nodes.spread(*sources)
    folder.manifest()
    verified.manifest()
    nodes.servers[1].close()
    assert_same(everything(folder), expected)
    assert verified.verify(nodes.manifest.files) == []


def test_a_silent_node_is_asked_once(
    nodes: NodesOfTest, expected: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost host answers no packet, so each question costs a whole timeout, and there are thousands of files."""
    every = range(len(nodes.manifest.files))
    good = nodes.put(2, every)
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        host, port = silent.getsockname()
        store = stack.enter_context(closing(PeerStore(f"{host}:{port}", b"secret", "node1", 0.05)))
        asked = []
        ask = store._ask
        monkeypatch.setattr(store, "_ask", lambda *question: asked.append(question) or ask(*question))
        folder = nodes.spread(Source(RemoteFolder(store, KEY)), good)
        assert_same(everything(folder), expected)
        assert folder.verify(nodes.manifest.files) == []
        assert len(asked) == 1


def test_another_save_in_the_same_place(nodes: NodesOfTest, expected: dict[Any, Any]) -> None:
    """Of the same step, committed since the sources were chosen. Its manifest is not taken."""
    every = range(len(nodes.manifest.files))
    sources = [nodes.put(0, every), nodes.put(1, every)]
    path = nodes.place(0) / file_names.MANIFEST_FILE
    path.write_bytes(encode_manifest(replace(nodes.manifest, attempt="b" * 32)))
    assert nodes.spread(*sources).manifest() == nodes.manifest
    with pytest.raises(CheckpointCorruptError, match="belongs to another save: the checkpoint was replaced meanwhile"):
        nodes.spread(sources[0]).manifest()


def test_no_manifest_anywhere(nodes: NodesOfTest) -> None:
    sources = [nodes.put(0, [0]), nodes.put(1, [1])]
    for node in (0, 1):
        (nodes.place(node) / file_names.MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointNotFoundError):
        nodes.spread(sources[0]).manifest()
    with pytest.raises(CheckpointCorruptError, match="its manifest cannot be read from any of 2 places"):
        nodes.spread(*sources).manifest()


def test_a_file_that_no_node_has(nodes: NodesOfTest) -> None:
    folder = nodes.spread(nodes.put(0, [0, 1]), nodes.put(1, [1, 2]))
    file = nodes.manifest.files[3]
    for use in (folder.index, folder.plain, lambda file: folder.check([file]), lambda file: folder.verify([file])):
        with pytest.raises(CheckpointCorruptError, match=f"{file.path}: is on no node that is left"):
            use(file)


def test_tensors_are_fetched_by_source(nodes: NodesOfTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all files of a source, so that it can merge and overlap its reads."""
    calls: list[tuple[str, set[str]]] = []
    for kind in (LocalFolder, RemoteFolder):
        fill = kind.fill

        def noting(self: Any, files: Any, reads: Any, check: bool = True, fill: Any = fill) -> int:
            calls.append((str(self), {read.stored.file for read, _ in reads}))
            return fill(self, files, reads, check)  # type: ignore[no-any-return]

        monkeypatch.setattr(kind, "fill", noting)
    with_tensors = [position for position, file in enumerate(nodes.manifest.files) if file.index]
    small = [position for position, file in enumerate(nodes.manifest.files) if not file.index]
    first, *others = with_tensors
    everything(nodes.spread(nodes.put(0, [first, *small]), nodes.put(1, others)))
    paths = [nodes.manifest.files[position].path for position in with_tensors]
    assert calls == [(str(nodes.place(0)), {paths[0]}), (f"node1:{KEY}", set(paths[1:]))]
