"""A local stand-in for the model hub: enough of its API for snapshots and data sets, and a record of what was asked."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`root/models/<owner>/<name>` and `root/datasets/<owner>/<name>` are the repositories it serves.

    `main` stands at `commit`, a tag or branch in `names` at another; `past` holds the root of every earlier commit.
    """

    root: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)
    commit: str = COMMIT
    names: dict[str, str] = field(default_factory=dict)
    past: dict[str, Path] = field(default_factory=dict)

    def files(self, kind: str, name: str, commit: str) -> dict[str, Path]:
        folder = self.past.get(commit, self.root) / kind / name
        return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def resolve(self, revision: str) -> str | None:
        """Commit of a branch, tag or commit; None for one that never was."""
        commit = self.commit if revision == "main" else self.names.get(revision, revision)
        return commit if commit == self.commit or commit in self.past else None

    def move(self, commit: str) -> None:
        """Keep what there is under the present commit, and give `main` a new one: files may now be rewritten."""
        self.past[self.commit] = Path(shutil.copytree(self.root, self.root.parent / self.commit))
        self.commit = commit


@contextmanager
def serve_hub(root: Path) -> Iterator[Hub]:
    """Serve the repositories below `root` while the block runs; point HF_ENDPOINT at `hub.url`."""
    hub = Hub(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._route(body=False)

        def do_GET(self) -> None:
            self._route(body=True)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self._route(body=True, form=self.rfile.read(length))

        def _route(self, *, body: bool, form: bytes = b"") -> None:
            path = unquote(urlparse(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            if parts[0] == "api":
                self._api(parts[1], "/".join(parts[2:4]), parts[4:], form)
                return
            kind, parts = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
            commit = hub.resolve(parts[3])
            if commit is None:
                self._missing("RevisionNotFound")
                return
            files = hub.files(kind, "/".join(parts[:2]), commit)
            self._file(files.get("/".join(parts[4:])), commit, body)

        def _api(self, kind: str, name: str, rest: list[str], form: bytes) -> None:
            commit = hub.resolve(rest[1] if len(rest) > 1 else "main")
            files = hub.files(kind, name, commit) if commit else {}
            if commit is None:
                self._missing("RevisionNotFound")
            elif not files:
                self._missing("RepoNotFound")
            elif rest[:1] == ["tree"]:
                prefix = "/".join(rest[2:])
                self._json([entry(file, path) for file, path in files.items() if file.startswith(prefix)])
            elif rest[:1] == ["paths-info"]:
                asked = json.loads(form)["paths"] if form.startswith(b"{") else parse_qs(form.decode()).get("paths", [])
                self._json([entry(file, files[file]) for file in asked if file in files])
            else:
                siblings = [{"rfilename": file} for file in files]
                self._json(
                    {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
                )

        def _json(self, value: Any, status: int = 200) -> None:
            self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"}, body=True)

        def _missing(self, code: str) -> None:
            self._send(b"", 404, {"X-Error-Code": code}, body=True)

        def _file(self, path: Path | None, commit: str, body: bool) -> None:
            if path is None:
                self._send(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, body=body)
                return
            data = path.read_bytes()
            tags = {"ETag": f'"{digest(path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            self._send(data, 200, tags, body=body)

        def _send(self, data: bytes, status: int, headers: dict[str, str], *, body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def entry(file: str, path: Path) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": path.stat().st_size, "oid": digest(path)}
