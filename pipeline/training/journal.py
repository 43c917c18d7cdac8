"""What a run leaves to read: `metrics.jsonl`, one line per step and validation, and `timings.jsonl`.

Numbers that any machine reproduces are in the first, which the manifest hashes; seconds and rates are in the second.
A resumed run cuts both back to the step it goes on from, so no step occurs twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"


class Journal:
    """Appends lines; the lines of a step appear together. Only rank 0 writes."""

    def __init__(self, folder: Path, step: int, *, validated: bool = True) -> None:
        """Keep what was written before step `step` (counting from 0), drop the rest.

        Not `validated`: the validation after the last step kept is still to come, whatever a killed run has written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {}
        for name in (METRICS, TIMINGS):
            path = folder / name
            again = None if validated else (step, "validation")
            kept = [line for line in read(path) if line["step"] <= step and (line["step"], line.get("split")) != again]
            text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in kept)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
            self._files[name] = path.open("a", encoding="utf-8")

    def write(self, name: str, line: Mapping[str, Any]) -> None:
        """`line["step"]` counts finished steps: 1 after the first."""
        self._files[name].write(json.dumps(line, sort_keys=True) + "\n")
        self._files[name].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a journal; one cut by a kill is left out."""
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            yield line
