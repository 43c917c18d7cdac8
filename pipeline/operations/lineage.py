"""`dspark lineage ARTIFACT`: from any artifact back to the corpus, and forward to what was made from it.
`dspark gc`: artifacts that neither an experiment nor this configuration refers to, and what deleting them frees.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.artifact import digest, read_json
from pipeline.chain import STAGES, resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, DsparkError
from pipeline.progress import say
from pipeline.trace import alive

Step = tuple[int, tuple[str, str], str]  # depth, (stage, fingerprint), input or output


def requests(work_dir: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(stage, fingerprint) -> request, of every artifact folder below a work directory."""
    found = {}
    for stage in STAGES:
        for path in sorted((work_dir / stage).glob("*/request.json")):
            found[stage, path.parent.name] = dict(read_json(path))
    return found


def lineage(config: Config, arguments: argparse.Namespace) -> None:
    """ARTIFACT is a stage of this configuration, a fingerprint (a prefix will do), or an artifact's folder."""
    known = requests(config.work_dir)
    key = _find(config, arguments.artifact, known)
    back = [*_back(key, known)]
    forward = [*_forward(key, known)]
    if arguments.json:
        say(json.dumps({"artifact": key, "made_from": back, "made_into": forward}, indent=1), result=True)
        return
    say(f"{key[0]} {key[1]}  {config.work_dir / key[0] / key[1]}", result=True)
    for title, steps, nothing in (
        ("made from:", back, "the sources named in its request.json"),
        ("made into:", forward, "nothing yet"),
    ):
        say(title, result=True)
        for depth, source, told in _once(steps):
            facts = "  (as above)" if told else _facts(config.work_dir, known.get(source), source[1])
            say(f"{'  ' * depth}{source[0]} {source[1]}{facts}", result=True)
        if not steps:
            say(f"  {nothing}", result=True)


def _once(steps: list[Step]) -> Iterator[tuple[int, tuple[str, str], bool]]:
    """(depth, artifact, whether it was told before): what lies behind an artifact is told where it first appears."""
    seen: set[tuple[str, str]] = set()
    below = None
    depths = [depth for depth, _, _ in steps]
    for (depth, source, _), following in zip(steps, [*depths[1:], 0], strict=False):
        if below is not None and depth > below:
            continue
        told = source in seen and following > depth
        below = depth if told else None
        seen.add(source)
        yield depth, source, told


def _facts(work_dir: Path, request: dict[str, Any] | None, fingerprint: str) -> str:
    if request is None:
        return "  (deleted)"
    sources = request.get("sources")
    text = f"  sources {json.dumps(sources)[:120]}" if sources else ""
    return text if (work_dir / request["stage"] / fingerprint / "manifest.json").exists() else f"{text}  (unfinished)"


def _find(config: Config, text: str, known: dict[tuple[str, str], Any]) -> tuple[str, str]:
    if text in STAGES:
        chain = resolve(config)
        if text not in chain:
            raise ConfigError(f"lineage: stage {text} is off in this configuration")
        matches = [(text, chain[text].fingerprint)]
        if matches[0] not in known:
            others = ", ".join(fingerprint for stage, fingerprint in known if stage == text) or "none"
            raise ConfigError(
                f"lineage: {text} {matches[0][1]} of this configuration is not made yet; existing: {others}"
            )
    else:
        name = Path(text).resolve().name if "/" in text else text
        matches = [key for key in known if key[1].startswith(name)]
    if len(matches) != 1 or matches[0] not in known:
        found = ", ".join(f"{stage} {fingerprint}" for stage, fingerprint in matches) or "none"
        raise ConfigError(f"lineage: {text!r} should name one artifact below {config.work_dir}; matches: {found}")
    return matches[0]


def _back(key: tuple[str, str], known: dict[tuple[str, str], Any], depth: int = 1) -> Iterator[Step]:
    for source in known.get(key, {}).get("inputs", {}).items():
        yield depth, source, "input"
        yield from _back(source, known, depth + 1)


def _forward(key: tuple[str, str], known: dict[tuple[str, str], Any], depth: int = 1) -> Iterator[Step]:
    for other, request in known.items():
        if request.get("inputs", {}).get(key[0]) == key[1]:
            yield depth, other, "output"
            yield from _forward(other, known, depth + 1)


# ------------------------------------------------------------------------------------------------ gc


def gc(config: Config, arguments: argparse.Namespace) -> None:
    """Lists artifacts that no experiment's link reaches, directly or as an input. Deletes them only with --yes.

    An experiment links to what it last ran: what this configuration would find again is kept besides.
    """
    known = requests(config.work_dir)
    kept = _reachable(config.work_dir, known) | {(name, made.fingerprint) for name, made in resolve(config).items()}
    loose = [key for key in known if key not in kept and not alive(config.work_dir / key[0] / key[1])]
    sizes: dict[str, int] = {}
    for stage, fingerprint in loose:
        folder = config.work_dir / stage / fingerprint
        size = sizes[str(folder)] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        say(f"{size / 1e6:10.1f} MB  {folder}", result=not arguments.json)
        if arguments.yes:
            shutil.rmtree(folder)
    if arguments.json:
        say(json.dumps({"bytes": sizes, "deleted": arguments.yes}, indent=1), result=True)
        return
    verb = "freed" if arguments.yes else "would be freed (add --yes to delete)"
    total = sum(sizes.values()) / 1e6
    say(f"{total:10.1f} MB  {verb}; {len(loose)} of {len(known)} artifacts are unreferenced", result=True)


def _reachable(work_dir: Path, known: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    kept: set[tuple[str, str]] = set()
    for link in (work_dir / "runs").glob("*/*"):
        if not link.is_symlink():
            continue
        folder = link.resolve()
        key = (folder.parent.name, folder.name)
        if key not in known:
            continue
        if digest(known[key]) != key[1]:
            raise ArtifactError(f"{folder}: its request does not hash to its name; nothing was deleted")
        kept.add(key)
        kept.update(step[1] for step in _back(key, known))
    if known and not kept:
        raise DsparkError(
            f"{work_dir / 'runs'}: no experiment refers to any artifact; refusing to call them all garbage"
        )
    return kept
