"""What a stage run costs the process it runs in: `usage.jsonl` in the artifact's folder, one line per attempt and rank.

    {"rank": 0, "wall_seconds": 211.4, "cpu_seconds": 395.2, "peak_memory_bytes": 1187360768, "whole": true}

CPU-seconds are user and system time of all threads, and of child processes that ended. The peak is of resident memory:
Linux can forget the peaks of earlier stages, elsewhere it is the largest so far in this process (`peak_of`). On an
accelerator its own peak stands beside it. `dspark plan --calibrate` is held against these lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.progress import rank

FILE = "usage.jsonl"
_RESET_PEAK = "5"  # what /proc/self/clear_refs wants to hear to start a new peak of resident memory


@contextlib.contextmanager
def recorded(folder: Path, tell: Callable[[dict[str, float]], None]) -> Iterator[None]:
    """Append this attempt's line to `folder/usage.jsonl`, however it ends; `tell` gets the numbers as well."""
    give_back_memory()
    reset = reset_peak()
    cpu, wall, whole = cpu_seconds(), time.monotonic(), False
    try:
        yield
        whole = True
    finally:
        numbers = {
            "wall_seconds": round(time.monotonic() - wall, 2),
            "cpu_seconds": round(cpu_seconds() - cpu, 2),
            "peak_memory_bytes": peak_bytes(),
            **_accelerator(),
        }
        line = {"rank": rank(), **numbers, "whole": whole, "peak_of": "stage" if reset else "process"}
        with contextlib.suppress(OSError), (folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        tell({f"usage/{name}": value for name, value in numbers.items()})


def read(folder: Path) -> list[dict[str, Any]]:
    """Lines of all attempts and ranks; a line cut by a kill is left out."""
    found = []
    path = folder / FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(dict(json.loads(line)))
    return found


def cpu_seconds() -> float:
    """User and system seconds of this process, its threads, and its ended children."""
    who = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in who)


def reset_peak() -> bool:
    """Start a new peak of resident memory; False where the system offers no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return True


def peak_bytes() -> int:
    """Largest resident memory of this process since `reset_peak`."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status("VmRSS") or peak_bytes()


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _accelerator() -> dict[str, float]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {"accelerator_peak_bytes": float(torch.cuda.max_memory_allocated())}


def give_back_memory() -> None:
    """Return what was freed to the system: glibc keeps blocks below 32 MB, gigabytes after decoding."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
