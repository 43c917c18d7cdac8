"""`dspark push` from the command line, against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.__main__ import main
from pipeline.chain import resolve
from pipeline.config import load
from pipeline.layouts import files
from tests.unit.layouts.test_hub import Hub, hub

__all__ = ["hub"]  # a fixture
ROOT = Path(__file__).resolve().parents[3]
DEBUG = str(ROOT / "configs/debug.yaml")
LAYOUTS = "export.layouts=[deepspec,speculators]"


def words(work_dir: Path, *more: str) -> list[str]:
    return ["push", *more, "-c", DEBUG, f"work_dir={work_dir}", "tracking.enabled=false", LAYOUTS]


@pytest.fixture
def exported(work_dir: Path) -> Path:
    """The folder of a finished export of two layouts, as far as push looks at it."""
    artifact = resolve(load(DEBUG, [f"work_dir={work_dir}", LAYOUTS]))["export"]
    artifact.create()
    names = []
    for layout in ("deepspec", "speculators"):
        folder = artifact.path / layout
        folder.mkdir()
        files.write_tensors(folder, {"fc.weight": torch.ones(2, 2)}, max_shard_bytes=10**9)
        (folder / "config.json").write_text(f'{{"layout": "{layout}"}}')
        (folder / "README.md").write_text(f"card of {layout}")
        files.write_hashes(folder)
        names += [f"{layout}/{path.name}" for path in folder.iterdir()]
    artifact.finish(files=names)
    return artifact.path


def test_uploads_the_named_layout_in_one_commit(hub: Hub, work_dir: Path, exported: Path) -> None:
    env = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": "secret-token", "HF_HUB_DISABLE_XET": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pipeline", *words(work_dir, "owner/name", "--layout=speculators", "--revision=draft")],
        cwd=ROOT, env={**env, "HF_HUB_OFFLINE": "0"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{hub.address}/owner/name/commit/" in run.stdout and "secret-token" not in run.stdout + run.stderr
    uploaded = {name: data for name, data in hub.files.items() if name != ".gitattributes"}
    assert uploaded == {path.name: path.read_bytes() for path in (exported / "speculators").iterdir()}
    assert "Bearer secret-token" in hub.tokens
    assert "POST /api/models/owner/name/branch/draft" in hub.seen
    assert [path for path in hub.seen if "/commit/" in path] == ["POST /api/models/owner/name/commit/draft"]


def _against(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret-token")


def test_a_refusal_is_told_without_the_token(
    hub: Hub, work_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _against(monkeypatch, hub.address)
    hub.refuse = True
    assert main(words(work_dir, "owner/name", "--layout=deepspec")) == 5
    told = capsys.readouterr()
    assert "refused the upload" in told.err and "secret-token" not in told.out + told.err


def test_an_absent_hub_is_told(
    work_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _against(monkeypatch, "http://127.0.0.1:9")
    assert main(words(work_dir, "owner/name", "--layout=deepspec")) == 5
    assert "owner/name: not uploaded" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(words(work_dir, "owner/name", "--layout=deepspec")) == 5
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (("owner/name",), 2, "name one of export.layouts: deepspec, speculators"),
        (("owner/name", "--layout=dflash"), 2, "name one of export.layouts"),
        (("no/such/name", "--layout=deepspec"), 2, "no/such/name"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_a_server_is_asked(
    hub: Hub, work_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...], code: int, told: str,
) -> None:  # fmt: skip
    _against(monkeypatch, hub.address)
    assert main(words(work_dir, *more)) == code
    assert told in capsys.readouterr().err and hub.seen == []


def test_only_a_finished_unchanged_export_leaves(
    hub: Hub, work_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _against(monkeypatch, hub.address)
    (exported / "deepspec" / "config.json").write_text("{}")
    assert main(words(work_dir, "owner/name", "--layout=deepspec")) == 4
    assert "config.json" in capsys.readouterr().err
    (exported / "manifest.json").unlink()
    assert main(words(work_dir, "owner/name", "--layout=speculators")) == 4
    assert "not finished" in capsys.readouterr().err and hub.seen == []
