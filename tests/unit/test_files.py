"""What `clear_temporaries` may remove: two ranks can finish one artifact at the same moment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from pipeline.files import clear_temporaries


def test_only_what_ended_processes_left_is_removed(tmp_path):
    folder, host = tmp_path / ".tmp", socket.gethostname()
    folder.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [f"{host}.{os.getppid()}.report.json", "elsewhere.12.report.json"]
    gone = [f"{host}.{ended.pid}.report.json", f"{host}.{os.getpid()}.report.json", "elsewhere.12.old.json"]
    for name in [*kept, *gone]:
        (folder / name).write_text("half")
    os.utime(folder / "elsewhere.12.old.json", (0, 0))
    clear_temporaries(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)
    for name in kept:
        (folder / name).unlink()
    clear_temporaries(folder)
    assert not folder.exists()
    clear_temporaries(folder)
