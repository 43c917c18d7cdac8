"""Memory and load of this process and its GPU, sampled now and then onto the run's own time axis."""

from __future__ import annotations

import sys
import time
from typing import Any

from pipeline.tracking.journal import Journal

_EVERY_SECONDS = 15.0


class SystemMetrics:
    """Steps are seconds of the run, its earlier attempts included, so a resumed curve goes on to the right."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._origin = journal.last_step.get("system/memory_bytes", 0)
        self._started = self._last = time.monotonic()
        self._process: Any = None

    def maybe_sample(self) -> None:
        if time.monotonic() - self._last >= _EVERY_SECONDS:
            self.sample()

    def sample(self) -> None:
        import psutil

        if self._process is None:
            self._process = psutil.Process()
        self._last = time.monotonic()
        values = {
            "system/memory_bytes": float(self._process.memory_info().rss),
            "system/cpu_percent": float(self._process.cpu_percent()),
            "system/machine_memory_percent": float(psutil.virtual_memory().percent),
        }
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            values["system/gpu_memory_bytes"] = float(torch.cuda.memory_allocated())
            values["system/gpu_peak_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        self._journal.metrics(values, self._origin + 1 + int(self._last - self._started))
