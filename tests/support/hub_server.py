"""A HuggingFace hub on this machine: the parts of its HTTP interface that huggingface_hub downloads models and makes
repositories through.

    with HubServer() as hub:
        hub.add("owner/name", folder)
        with hub.used(cache_home):
            snapshot_download("owner/name")
        assert hub.downloaded == [...]

A server has models with branches and commits, private and gated ones, and keeps a list of the requests. Weights come
from a second host name by a redirect, as they do from the hub's storage, and in parts if a client asks for the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

# The hub stores files with these suffixes apart, and answers with a redirect to the storage.
STORED_APART = (".safetensors", ".bin", ".pth", ".onnx")
# So small that models of a few files have several pages.
FILES_PER_PAGE = 5
# Not the name of the hub's host: clients must not send the token there.
STORAGE_HOST = "localhost"


@dataclass
class Repository:
    """One model: the files of each commit, and the commit of each branch. A token, if one is needed to see it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    token: str | None = None
    is_gated: bool = False


@dataclass(frozen=True)
class Request:
    """One request: "storage" is the path's first part if the storage got it."""

    method: str
    path: str
    token: str | None
    agent: str


class HubServer:
    """A hub. Use it with `with`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.cut_once: dict[str, int] = {}
        """Files that are sent only as far as this number of bytes the first time."""
        self.answers_with: int | None = None
        """The status of every answer, such as 503; None: the right one."""
        self._server = _Quiet(("127.0.0.1", 0), _handler(self))

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, files: Path | Mapping[str, bytes], branch: str = "main", **access: Any) -> str:
        """Commits files, or those of a folder, and returns the commit. `access` are fields of Repository."""
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        repository = self.repositories.setdefault(name, Repository(**access))
        commit = hashlib.sha1(b"".join(k.encode() + files[k] for k in sorted(files)) + branch.encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.branches[branch] = commit
        return commit

    @property
    def downloaded(self) -> list[str]:
        """The files whose contents were asked for, each as often as it was."""
        gets = (request.path for request in self.requests if request.method == "GET")
        return sorted(unquote(path.rpartition("/")[2]) for path in gets if "/api/" not in path and "/resolve/" in path)

    def variables(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a program that uses this hub. `home` is HF_HOME."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_OFFLINE": "",
            "HF_TOKEN": "",
            "NO_PROXY": "127.0.0.1,localhost",
            **more,
        }

    @contextmanager
    def used(self, home: Path, **more: str) -> Iterator[HubServer]:
        """This process uses the hub, even if it has imported huggingface_hub before."""
        variables = self.variables(home, **more)
        before = {name: os.environ.get(name) for name in variables}
        restore = use(variables)
        try:
            yield self
        finally:
            restore()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def use(variables: Mapping[str, str]) -> Callable[[], None]:
    """Sets variables of huggingface_hub, and what it has made of them at import. Returns what undoes the latter."""
    os.environ.update(variables)
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    endpoint, home = variables["HF_ENDPOINT"], variables["HF_HOME"]
    wanted = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": home,
        "HF_HUB_CACHE": str(Path(home) / "hub"),
        "HF_TOKEN_PATH": str(Path(home) / "token"),
        "HF_HUB_OFFLINE": bool(variables["HF_HUB_OFFLINE"]),
        "HF_URL_HOSTS": frozenset({"127.0.0.1"}),
    }
    before = {name: getattr(constants, name) for name in wanted if hasattr(constants, name)}

    def set_all(values: Mapping[str, Any]) -> None:
        for name in before:
            for module in (constants, file_download):  # huggingface_hub 0.36 imports some by their names
                if hasattr(module, name):
                    setattr(module, name, values[name])
        # huggingface_hub 0.36 makes a session for offline mode, and keeps it.
        getattr(_http, "reset_sessions", lambda: None)()

    set_all(wanted)
    return lambda: set_all(before)


_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_FILE = re.compile(r"(/storage)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client has closed its connection, as all do in the end."""


class _Refused(Exception):
    """An answer that is no success: its status and the hub's word for it."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            """Makes a repository, as `create_repo` asks for it."""
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = f"{asked['organization']}/{asked['name']}"
            status = 409 if name in hub.repositories else 200
            is_private = asked.get("visibility") == "private" or asked.get("private", False)  # old clients
            hub.repositories.setdefault(name, Repository(is_private=is_private))
            self._send(status, {}, json.dumps({"url": f"{hub.endpoint}/{name}"}).encode())

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            url = urlsplit(self.path)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            hub.requests.append(Request(self.command, url.path, token, self.headers.get("User-Agent") or ""))
            try:
                if hub.answers_with is not None:
                    raise _Refused(hub.answers_with)
                if match := _TREE.fullmatch(url.path):
                    self._tree(*self._found(match[1], match[2], token), url.path, parse_qs(url.query))
                elif match := _INFO.fullmatch(url.path):
                    self._info(match[1], *self._found(match[1], match[2] or "main", token))
                elif match := _FILE.fullmatch(url.path):
                    # The storage does not ask for a token: only who has asked the hub knows the address.
                    seen = hub.repositories[match[2]].token if match[1] else token
                    self._file(bool(match[1]), *self._found(match[2], match[3], seen), unquote(match[4]))
                else:
                    raise _Refused(404)
            except _Refused as refused:
                headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
                self._send(refused.status, {name: text for name, text in headers.items() if text}, b"")

        def _found(self, name: str, revision: str, token: str | None) -> tuple[str, dict[str, bytes]]:
            """The commit and its files. Who may not see a private model is told that there is none."""
            repository = hub.repositories.get(name)
            if repository is None:
                raise _Refused(401 if token is None else 404, "RepoNotFound", "Repository not found")
            if repository.token not in (None, token):
                if repository.is_gated:
                    raise _Refused(401 if token is None else 403, "GatedRepo", f"Access to model {name} is restricted.")
                raise _Refused(401 if token is None else 404, "RepoNotFound", "Repository not found")
            revision = unquote(revision)
            commit = repository.branches.get(revision, revision)
            if commit not in repository.commits:
                raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return commit, repository.commits[commit]

        def _info(self, name: str, commit: str, files: dict[str, bytes]) -> None:
            siblings = [{"rfilename": path} for path in files]
            self._send_json({"_id": "0", "id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})

        def _tree(self, commit: str, files: dict[str, bytes], path: str, query: dict[str, list[str]]) -> None:
            start = int(query.get("cursor", ["0"])[0])
            page = sorted(files)[start : start + FILES_PER_PAGE]
            link = {}
            if start + FILES_PER_PAGE < len(files):
                following = f"{hub.endpoint}{path}?recursive=True&cursor={start + FILES_PER_PAGE}"
                link = {"Link": f'<{following}>; rel="next"'}
            self._send_json([_entry(name, files[name]) for name in page], link)

        def _file(self, from_storage: bool, commit: str, files: dict[str, bytes], path: str) -> None:
            if path not in files:
                raise _Refused(404, "EntryNotFound", "Entry not found")
            data = files[path]
            headers = {"X-Repo-Commit": commit}
            if path.endswith(STORED_APART) and not from_storage:
                storage = f"http://{STORAGE_HOST}:{self.server.server_address[1]}"  # type: ignore[attr-defined]
                headers |= {
                    "Location": f"{storage}/storage{quote(urlsplit(self.path).path)}?signature=secret",
                    "X-Linked-Etag": f'"{_entry(path, data)["lfs"]["oid"]}"',
                    "X-Linked-Size": str(len(data)),
                }
                self._send(302, headers, b"")
                return
            headers |= {"ETag": f'"{_entry(path, data)["oid"]}"', "Accept-Ranges": "bytes"}
            start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if start is None:
                self._send(200, headers, data, hub.cut_once.pop(path, None) if self.command == "GET" else None)
            else:
                first = int(start[1])
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                self._send(206, headers, data[first:])

        def _send_json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
            self._send(200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

        def _send(self, status: int, headers: Mapping[str, str], data: bytes, most: int | None = None) -> None:
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:most])
            if most is not None:
                self.close_connection = True

    return Handler


def _entry(path: str, data: bytes) -> dict[str, Any]:
    """What the hub's listing says of a file."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if path.endswith(STORED_APART):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
