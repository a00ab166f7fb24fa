"""A server on loopback that speaks as much of the Hugging Face Hub's API as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "7b1d0c2f" * 5


@dataclass
class FakeHub:
    """
    repositories    files by name, by repository; those of more than 10 KB are in LFS
    cuts            bytes after which a connection is cut, for each of the next requests of a file of megabytes
    corrupted       names of files that are sent with one changed byte
    sent            bytes sent of each file
    ranges          the Range headers of requests
    """

    repositories: dict[str, dict[str, bytes]]
    cuts: list[int] = field(default_factory=list)
    corrupted: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    url: str = ""

    def siblings(self, repository: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, content in self.repositories[repository].items():
            entry: dict[str, object] = {"rfilename": name, "path": name, "type": "file", "size": len(content)}
            git_id = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            entry |= {"oid": git_id, "blobId": git_id}
            if len(content) > 10_000:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 130}
            found.append(entry)
        return found


@contextmanager
def fake_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    hub = FakeHub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_GET(self) -> None:
            self._answer(is_head=False)

        def _answer(self, is_head: bool) -> None:
            path = self.path.split("?")[0].strip("/").split("/")
            name = "/".join(path[4:])
            if path[:2] == ["api", "models"] and "/".join(path[2:4]) in hub.repositories:
                siblings = hub.siblings("/".join(path[2:4]))
                is_tree = path[4:5] == ["tree"]
                about = {"id": "/".join(path[2:4]), "sha": REVISION, "siblings": siblings, "private": False}
                self._send(json.dumps(siblings if is_tree else about).encode(), {"Content-Type": "application/json"})
            elif path[2:3] == ["resolve"] and name in (files := hub.repositories.get("/".join(path[:2]), {})):
                self._send_file(name, files[name], is_head)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send(self, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def _send_file(self, name: str, content: bytes, is_head: bool) -> None:
            is_large = len(content) > 10_000
            etag = (hashlib.sha256 if is_large else hashlib.sha1)(content).hexdigest()
            start = 0
            if wanted := self.headers.get("Range"):
                hub.ranges.append(wanted)
                start = int(wanted.removeprefix("bytes=").split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("Content-Length", str(len(content) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if is_head:
                return
            if name in hub.corrupted:
                content = content[:-1] + bytes([content[-1] ^ 1])
            end = len(content)
            if len(content) > 1_000_000 and hub.cuts:
                end = min(end, start + hub.cuts.pop(0))
            self.wfile.write(content[start:end])
            hub.sent[name] = hub.sent.get(name, 0) + end - start
            if end < len(content):
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
