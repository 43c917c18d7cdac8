"""Upload to a hub, against a local server that speaks the protocol and keeps what it is sent."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import identity
from pipeline.config import Target
from pipeline.errors import ArtifactError, ConfigError, StorageError
from pipeline.layouts import files
from pipeline.layouts.hub import push


class Hub(ThreadingHTTPServer):
    """Keeps uploaded files; `refuse` answers commits with 403, `full` the upload of a large file with 413."""

    daemon_threads = True
    refuse = False
    full = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.seen: list[str] = []
        self.tokens: set[str | None] = set()
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        return

    def _answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        self.server.seen.append(f"GET {self.path}")
        self._answer({"error": "none"}, 404)

    def do_PUT(self) -> None:
        data = self._body()
        if self.server.full:
            self._answer({"error": "too large"}, 413)
            return
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self._answer({})

    def do_POST(self) -> None:
        self.server.seen.append(f"POST {self.path}")
        self.server.tokens.add(self.headers.get("Authorization"))
        body = self._body()
        if self.path == "/api/repos/create":
            self._answer({"url": f"{self.server.address}/owner/name"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            modes = [
                {"path": item["path"], "uploadMode": "lfs" if item["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False}
                for item in asked
            ]  # fmt: skip
            self._answer({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": item["oid"], "size": item["size"],
                 "actions": {"upload": {"href": f"{self.server.address}/put/{item['oid']}?sig=signed", "header": {}}}}
                for item in json.loads(body)["objects"]
            ]  # fmt: skip
            self._answer({"transfer": "basic", "objects": objects})
        elif "/branch/" in self.path:
            self._answer({})
        elif "/commit/" in self.path:
            self._commit(body)
        else:
            self._answer({"error": "unknown"}, 404)

    def _commit(self, body: bytes) -> None:
        if self.server.refuse:
            self._answer({"error": "forbidden"}, 403)
            return
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                self.server.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "lfsFile":
                self.server.files[item["value"]["path"]] = self.server.objects[item["value"]["oid"]]
        commit = "0" * 40
        url = f"{self.server.address}/owner/name/commit/{commit}"
        self._answer({"success": True, "commitUrl": url, "commitOid": commit, "pullRequestUrl": None})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the hub of this test is on this machine
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "deepspec"
    out.mkdir()
    files.write_tensors(out, {"fc.weight": torch.ones(2, 2)}, max_shard_bytes=10**9)
    (out / "config.json").write_text("{}")
    (out / "README.md").write_text("card")
    files.write_hashes(out)
    return out


def test_push_uploads_the_folder_as_it_was_checked(hub: Hub, folder: Path) -> None:
    address = push(folder, "owner/name", endpoint=hub.address, token="secret-token")
    assert address.startswith(hub.address)
    assert {name: data for name, data in hub.files.items() if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert "Bearer secret-token" in hub.tokens


def test_a_name_without_owner_is_the_users_own(hub: Hub, folder: Path) -> None:
    """The server says whose it became; the files must follow there."""
    push(folder, "name", endpoint=hub.address, token="t")
    assert "POST /api/models/owner/name/commit/main" in hub.seen


def test_the_reason_behind_a_failed_upload_is_told(hub: Hub, folder: Path) -> None:
    hub.full = True
    with pytest.raises(StorageError, match=r"model\.safetensors.*413") as caught:
        push(folder, "owner/name", endpoint=hub.address, token="t")
    assert "signed" not in str(caught.value) and hub.files == {}


def test_push_refuses_what_was_changed_or_is_no_export(hub: Hub, folder: Path) -> None:
    (folder / "config.json").write_text('{"block_size": 8}')
    with pytest.raises(ArtifactError, match=r"config\.json"):
        push(folder, "owner/name", endpoint=hub.address, token="t")
    (folder / files.HASHES).unlink()
    with pytest.raises(ArtifactError, match="layout folder"):
        push(folder, "owner/name", endpoint=hub.address, token="t")
    assert hub.seen == []


def test_push_tells_a_refusal_without_the_token(hub: Hub, folder: Path) -> None:
    hub.refuse = True
    with pytest.raises(StorageError, match="refused") as caught:
        push(folder, "owner/name", endpoint=hub.address, token="secret-token")
    assert "secret-token" not in str(caught.value)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(identity, "HUB_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_never_answers_is_given_up(silent: str, folder: Path) -> None:
    with pytest.raises(StorageError, match=rf"owner/name: not known.*{silent} took the.*silent for 0\.2 seconds"):
        push(folder, "owner/name", endpoint=silent, token="t")


def test_a_hub_that_never_answers_holds_no_fingerprint_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command asks it first what a hub id stands for."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", silent)
    with pytest.raises(ConfigError, match="the hub did not answer .ReadTimeout"):
        identity.hub_revision(Target(model="owner/absent"))
    with pytest.raises(ConfigError, match="neither the hub nor the local hub cache knows"):
        identity.hub_commit("owner/absent", None)
