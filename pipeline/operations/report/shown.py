"""Which chain an experiment's report.html shows. Its own head says so; nothing is drawn to read that.

An experiment may hold several chains: the same configuration with other settings. The page is that of the one run last,
with the others beside it where they measured the same. One that is not finished does not take the place of a finished
one: it is shown on a page of its own, `report-<fingerprint>.html`, until it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.artifact import Artifact

PAGE = "report.html"
_HEAD = re.compile(r'<meta name="chain" content="(\w+) (finished|open)">')
_HEAD_CHARACTERS = 2000

Chain = Mapping[str, Artifact]


def name_of(chain: Chain) -> str:
    """The fingerprint of the last stage, which follows from all others."""
    return list(chain.values())[-1].fingerprint


def head_of(chain: Chain) -> str:
    """What the page says of its chain: "<fingerprint> finished" or "<fingerprint> open"."""
    return f"{name_of(chain)} {'finished' if _finished(chain) else 'open'}"


def place_of(folder: Path, chain: Chain) -> Path:
    """Where a chain's page is to be written: not over that of another one that is finished."""
    name, state = _shown(folder / PAGE)
    kept = state == "finished" and name != name_of(chain) and not _finished(chain)
    return folder / (f"report-{name_of(chain)}.html" if kept else PAGE)


def current(folder: Path, work_dir: Path, chain: Chain) -> bool:
    """Whether report.html shows this chain finished, and everything it shows was there when it was written."""
    page = folder / PAGE
    if not _finished(chain) or _shown(page) != (name_of(chain), "finished"):
        return False
    manifests = [*(artifact.manifest_path for artifact in chain.values()), *work_dir.glob("evaluate/*/manifest.json")]
    return all(path.stat().st_mtime_ns <= page.stat().st_mtime_ns for path in manifests)


def _finished(chain: Chain) -> bool:
    return all(artifact.complete for artifact in chain.values())


def _shown(page: Path) -> tuple[str, str]:
    """(fingerprint, finished or open) of the chain a page shows; empty where there is none that says so."""
    if not page.exists():
        return "", ""
    with page.open(encoding="utf-8") as file:
        found = _HEAD.search(file.read(_HEAD_CHARACTERS))
    return (found[1], found[2]) if found else ("", "")
