"""What a stage run costs the process it runs in: `usage.jsonl` in the artifact's folder, one line per attempt and rank.

    {"rank": 0, "wall_seconds": 211.4, "cpu_seconds": 395.2, "peak_memory_bytes": 1187360768, "whole": true}

CPU-seconds are user and system time of all threads, and of child processes that ended. The peak is of anonymous memory,
what no file stands behind: pages of mapped files (a training run's shards, weights that are used in their file's own
dtype) are dropped when memory is short. Where the system does not tell them apart it is the largest resident memory of
this process so far (`peak_of`). On an accelerator its own peak stands beside it. `dspark plan --calibrate` is held
against these lines.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.heartbeat import heartbeat
from pipeline.progress import rank

FILE = "usage.jsonl"
OWN = "stage, anonymous"  # a peak that says something about the stage
_WHOLE = "process, resident"
_SAMPLE_SECONDS = 0.05
_RESET_PEAK = "5"  # what /proc/self/clear_refs wants to hear to start a new peak of resident memory


@contextlib.contextmanager
def recorded(folder: Path, tell: Callable[[dict[str, float]], None]) -> Iterator[None]:
    """Append this attempt's line to `folder/usage.jsonl`, however it ends; `tell` gets the numbers as well."""
    give_back_memory()
    cpu, wall, whole = cpu_seconds(), time.monotonic(), False
    peak = Peak()
    try:
        with peak.watched():
            yield
        whole = True
    finally:
        numbers = {
            "wall_seconds": round(time.monotonic() - wall, 2),
            "cpu_seconds": round(cpu_seconds() - cpu, 2),
            "peak_memory_bytes": peak.bytes,
            **_accelerator(),
        }
        line = {"rank": rank(), **numbers, "whole": whole, "peak_of": OWN if _memory() else _WHOLE}
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


def cpu_of(work: Callable[[], Any], repeats: int = 1) -> float:
    """CPU-seconds of one call, the mean of several; children do not count."""
    started = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - started) / repeats


@dataclass
class Peak:
    """The most anonymous memory of this process while it was watched.

    It is sampled. What comes and goes between two samples still shows in the system's own peak of resident memory:
    that, less the most that files were seen to take of it, is a lower bound as well.
    """

    sampled: int = 0
    files: int = 0
    resident: int = 0

    @property
    def bytes(self) -> int:
        return max(self.sampled, self.resident - self.files)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch during a with-block."""
        exact = _reset_peak()
        self._sample()
        try:
            with heartbeat(self._sample, seconds=_SAMPLE_SECONDS):
                yield
        finally:
            self._sample()
            self.resident = _memory().get("VmHWM", 0) if exact else 0

    def _sample(self) -> None:
        kinds = _memory()
        self.sampled = max(self.sampled, _anonymous(kinds))
        self.files = max(self.files, kinds.get("RssFile", 0))


def anonymous_bytes() -> int:
    """Resident memory of this process now that no file stands behind."""
    return _anonymous(_memory())


def _anonymous(kinds: dict[str, int]) -> int:
    if kinds:
        return kinds["VmRSS"] - kinds["RssFile"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _memory() -> dict[str, int]:
    """Bytes of the kinds of memory Linux tells apart: VmRSS, RssFile, VmHWM and others; empty elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    sizes = {name: int(words[0]) * 1024 for name, words in found.items() if words[1:] == ["kB"]}
    return sizes if "RssFile" in sizes else {}


def _reset_peak() -> bool:
    """Start a new peak of resident memory; False where the system offers no such thing."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _accelerator() -> dict[str, float]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {"accelerator_peak_bytes": float(torch.cuda.max_memory_allocated())}


def give_back_memory() -> None:
    """Collect garbage, and return what was freed to the system."""
    gc.collect()
    trim()


def trim() -> None:
    """Return what was freed to the system: glibc keeps blocks below 32 MB, gigabytes after decoding."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
