"""Imports go one way. This reads them from the source, function bodies included, and checks the table below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A part may import itself, the foundation, and what its row names. Everything in pipeline/ without a row of its own is
# foundation: single files that know nothing of torch, targets or stages.
ALLOWED: dict[str, set[str]] = {
    "speculative": {"kernels"},
    "draft": set(),
    "tracking": set(),
    "frozen": {"kernels"},
    "target": {"frozen", "kernels", "preflight"},
    "tiny": {"preflight"},
    "corpus": set(),
    "preflight": {"corpus", "draft", "layouts"},  # of the last two what a checkpoint says of itself: no torch
    "shards": {"preflight"},
    "layouts": {"draft", "frozen"},
    "kernels": set(),
    "distributed": set(),
    "training": {
        "distributed", "draft", "speculative", "kernels", "target", "frozen", "shards", "corpus", "layouts", "tracking",
        "preflight",
    },
    "decoding": {"draft", "speculative", "kernels", "target", "frozen", "shards", "corpus"},
    "stages": {
        "training", "decoding", "distributed", "draft", "speculative", "layouts", "target", "frozen", "shards",
        "corpus", "tracking", "preflight",
    },
    "runner": {"tracking", "tiny", "shards", "preflight"},
    "operations": {
        "runner", "tiny", "training", "decoding", "distributed", "draft", "speculative", "layouts", "target", "frozen",
        "shards", "corpus", "tracking", "launch", "preflight",
    },
    "commands": set(),
    "__main__": {"commands", "runner"},
    "launch": {"preflight"},
    "tools": {
        "training", "decoding", "distributed", "draft", "speculative", "kernels", "layouts", "target", "frozen", "tiny",
        "shards", "corpus", "tracking", "runner", "operations", "launch", "stages",
    },
}  # fmt: skip

# Libraries that only some parts may know. None of them, nor torch, may be known to the foundation or to launch.
ONLY_IN: dict[str, set[str]] = {
    "mlflow": {"tracking"},
    "accelerate": {"distributed", "training", "tools"},
    "deepspeed": {"distributed", "training", "tools"},
    "webdataset": {"shards", "tools"},
    "openai": {"corpus", "decoding"},
    "transformers": {
        "corpus",
        "target",
        "frozen",
        "kernels",
        "tiny",
        "decoding",
        "layouts",
        "operations",
        "training",
        "tools",
    },
    "datasets": {"corpus", "decoding", "tools"},
    "torch": set(ALLOWED) - {"launch", "corpus", "preflight", "tracking", "commands", "__main__"},
}
CPU_ONLY = ["pipeline.__main__", "pipeline.config", "pipeline.artifact", "pipeline.chain", "pipeline.tracking"]


def part_of(module: str) -> str:
    """The row a module belongs to: `pipeline.draft.block` -> draft, `launch.submit` -> launch, else foundation."""
    top, _, rest = module.partition(".")
    if top != "pipeline":
        return top
    name = rest.partition(".")[0]
    return name if name in ALLOWED else "foundation"


def imported(path: Path, module: str) -> list[tuple[int, str]]:
    """(line, absolute module) of every import in a file. `from pipeline import x` counts as importing pipeline.x."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import in {module}"
            inside = node.module in ("pipeline", "launch", "tools")
            names = [f"{node.module}.{alias.name}" for alias in node.names] if inside else [str(node.module)]
            found += [(node.lineno, name) for name in names]
    return found


def files() -> list[Path]:
    return sorted(path for top in ("pipeline", "launch", "tools") for path in (ROOT / top).rglob("*.py"))


def test_parts_import_only_what_lies_below_them() -> None:
    problems = []
    for path in files():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        part = part_of(module)
        for line, name in imported(path, module):
            where = f"{path.relative_to(ROOT)}:{line}"
            library = name.partition(".")[0]
            if library in ("pipeline", "launch", "tools"):
                other = part_of(name)
                if other not in ("foundation", part) and other not in ALLOWED.get(part, set()):
                    problems.append(f"{where}: {part} must not import {other}")
                if part == other == "stages" and name != module:
                    problems.append(f"{where}: stages do not import each other")
            elif library in ONLY_IN and part not in ONLY_IN[library]:
                problems.append(f"{where}: {part} must not import {library}")
    assert problems == []


def test_the_table_itself_has_no_cycles() -> None:
    def below(part: str, seen: tuple[str, ...] = ()) -> None:
        assert part not in seen, f"cycle: {seen}"
        for other in ALLOWED[part]:
            below(other, (*seen, part))

    for part in ALLOWED:
        below(part)


@pytest.mark.case("DEP-02")
def test_command_line_and_foundation_load_no_heavy_library() -> None:
    launch = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "launch").rglob("*.py")]
    names = [name.removesuffix(".__init__") for name in [*CPU_ONLY, *launch]]
    heavy = ["torch", "transformers", "accelerate", "deepspeed", "mlflow", "datasets", "webdataset", "pandas"]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        f"found = [name for name in {heavy} if name in sys.modules]\nsys.exit(repr(found) if found else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
