"""Make the virtual environment and install everything into it: `python3 tools/set_up.py .venv`, or `make setup`.

Runs before anything is installed, so it uses the standard library only. It stops with one clear message when Python is
too old, and before a CUDA build of torch is downloaded onto a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
CUDA_BUILD = "about 3 GB to download and 7 GB on disk"
_SOURCES = ("find-links", "extra-index-url", "index-url")
_LOOKUP_SECONDS = 120


def main(folder: str) -> int:
    """Returns the exit code; 2 when the machine is not set up for this."""
    venv = Path(folder)
    python = venv / "bin" / "python"
    problem = python_problem(sys.version_info[:2], sys.executable)
    if not problem and not python.exists():
        problem = _make_venv(venv)
    if not problem and not _has_torch(python):
        problem = torch_problem(
            has_gpu=has_gpu(),
            allowed=os.environ.get("ALLOW_CUDA_WHEEL") == "1",
            sources=pip_sources(python),
            offered=lambda: offered_torch(python),
        )
    if problem:
        sys.stderr.write(f"setup: {problem}\n")
        return 2
    command = [python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", "-e", f"{ROOT}[demo,dev]"]
    return subprocess.run([str(part) for part in command], check=False).returncode


def python_problem(version: tuple[int, ...], executable: str) -> str:
    """Why this Python cannot be used, or an empty string."""
    if version >= OLDEST_PYTHON:
        return ""
    needed, found = ".".join(map(str, OLDEST_PYTHON)), ".".join(map(str, version))
    others = [name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if shutil.which(name)]
    hint = f"make PYTHON={others[0]} …" if others else "install one and run `make PYTHON=/path/to/python3 …`"
    return f"Python {needed} or newer is needed, {executable} is {found}. Use: {hint}"


def _make_venv(venv: Path) -> str:
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False)
    if made.returncode == 0:
        return ""
    shutil.rmtree(venv, ignore_errors=True)
    return f"{sys.executable} cannot make virtual environments (on Debian and Ubuntu: apt-get install python3-venv)"


def _has_torch(python: Path) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0


def has_gpu() -> bool:
    """An NVIDIA or AMD device, or a machine whose default torch build is small anyway (not Linux)."""
    devices = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")
    return platform.system() != "Linux" or any(Path(name).exists() for name in devices)


def pip_sources(python: Path) -> dict[str, str]:
    """Where pip's settings (files and environment) make it look, beyond its default index."""
    listed = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    found = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.rpartition(".")[2] in _SOURCES:
            found[name] = value.strip("'\"")
    return found


def offered_torch(python: Path) -> dict[str, object] | None:
    """Metadata of the torch that pip would install, without installing it; None when that cannot be told in time."""
    command = (
        f"{python} -m pip install --dry-run --no-deps --quiet --report - -c {ROOT / 'constraints.txt'} torch".split()
    )
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LOOKUP_SECONDS, check=True)
        metadata: dict[str, object] = json.loads(run.stdout)["install"][0]["metadata"]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return None
    return metadata


def torch_problem(*, has_gpu: bool, allowed: bool, sources: dict[str, str], offered: object) -> str:
    """Why installing torch should not begin, or an empty string. `offered` is called only when pip has sources."""
    if has_gpu or allowed:
        return ""
    metadata = offered() if sources and callable(offered) else None
    if metadata is not None and not is_cuda_build(metadata):
        return ""
    where = ", ".join(f"{name}={value}" for name, value in sources.items()) or "none set"
    return (
        f"this machine has no GPU, and pip would take torch's CUDA build ({CUDA_BUILD}).\n"
        "  Point pip at a CPU wheel instead: PIP_FIND_LINKS=/folder/with/the/cpu/wheel, or\n"
        "  PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU wheels>,\n"
        f"  or the same in pip's settings (find-links, extra-index-url; now: {where}).\n"
        "  To go on with the CUDA build all the same: ALLOW_CUDA_WHEEL=1 make …"
    )


def is_cuda_build(metadata: dict[str, object]) -> bool:
    """CUDA builds require nvidia packages; CPU builds carry `+cpu` or require none."""
    if str(metadata.get("version", "")).partition("+")[2].startswith("cpu"):
        return False
    needs = metadata.get("requires_dist") or []
    return any(str(need).lower().startswith(("nvidia", "cuda")) for need in needs)  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ".venv"))
