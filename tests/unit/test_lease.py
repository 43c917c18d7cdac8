"""Two runs never write one artifact."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.errors import ArtifactError
from pipeline.lease import lease


def take_elsewhere(path: Path) -> str:
    """What another process meets when it takes the lease."""
    code = f"from pathlib import Path\nfrom pipeline.lease import lease\nlease(Path({str(path)!r})).__enter__()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


def test_a_live_holder_keeps_others_out_and_a_finished_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with lease(path):
        assert f"process {os.getpid()} on {socket.gethostname()} is writing this artifact" in take_elsewhere(path)
    assert not path.exists() and take_elsewhere(path) == ""


@pytest.mark.case("SLM-04")
def test_a_killed_holder_is_replaced(tmp_path: Path) -> None:
    """On this host the process is gone; on another one, a failed node, the heartbeat stopped or stops coming."""
    path = tmp_path / "lease.json"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 7, "start": 0}))
    with lease(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": 0}))
    with lease(path, stale=0.2):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": 0}))
    os.utime(path, (time.time() - 100, time.time() - 100))
    with lease(path):
        pass


def test_a_live_holder_on_another_host_keeps_others_out(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": 0}))
    beat = threading.Timer(0.2, os.utime, (path,))
    beat.start()
    with pytest.raises(ArtifactError, match="process 1 on elsewhere"), lease(path):
        pass
    beat.join()


def test_the_heartbeat_keeps_the_lease_fresh(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with lease(path, every=0.01):
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
