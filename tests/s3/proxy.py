"""A proxy before an S3 server that answers, breaks off, or changes what goes through it, as a hook says."""

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What is done with a request: "pass" it on; "drop" it; "lose" the answer; answer "500"; "change" a byte of its body.
Hook = Callable[[int, str, str], str]


def passing(number: int, method: str, path: str) -> str:
    return "pass"


class Proxy:
    """Counts the requests that come, and asks `hook` about each: its number, its method, its path."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.hook: Hook = passing
        self.count = 0
        self.seen: list[tuple[str, str, int]] = []  # method, path, bytes answered
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def start_counting(self, hook: Hook = passing) -> None:
        with self.lock:
            self.count, self.hook, self.seen = 0, hook, []


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self._body()
            with proxy.lock:
                proxy.count += 1
                number, hook = proxy.count, proxy.hook
            what = hook(number, self.command, self.path)
            if what == "drop":
                self.close_connection = True
                return
            if what == "500":
                self._answer(500, [], b"")
                return
            if what == "change" and body:
                body = bytes([body[0] ^ 1]) + body[1:]
            status, headers, answer = self._ask(body)
            proxy.seen.append((self.command, self.path, len(answer)))
            if what == "lose":
                self.close_connection = True
                return
            self._answer(status, headers, answer)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(*proxy.server)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect")}
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            result = (answer.status, answer.getheaders(), data)
            connection.close()
            return result

        def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response_only(status)
            skipped = ("transfer-encoding", "connection") + (() if self.command == "HEAD" else ("content-length",))
            for name, value in headers:
                if name.lower() not in skipped:
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
