"""`dspark doctor`: what would silently cost accepted length or stop a run, one line a check: ok, warning, or the fix.

Looks at the environment, the target's description, the disk, the tracking store, and at N chats as the drafter would
see them: token, role, mask, anchor-eligible. Reads no weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from pipeline import preflight
from pipeline.artifact import versions
from pipeline.chain import active, resolve
from pipeline.config import Config
from pipeline.corpus.inspect import Findings, examine
from pipeline.corpus.rows import read_rows
from pipeline.errors import ConfigError, DsparkError
from pipeline.identity import target_folder
from pipeline.preflight import machine
from pipeline.progress import say

Check = tuple[str, str, str]  # state (ok, warning, problem), what, finding


def doctor(config: Config, arguments: argparse.Namespace) -> None:
    """Print every check; raises ConfigError at the end when there are problems."""
    checks = [*_environment(), *_target(config), *_places(config)]
    for state, what, finding in checks:
        say(f"{state:8s} {what:14s} {finding}", result=not arguments.json)
    problems = [f"{what}: {finding}" for state, what, finding in checks if state == "problem"]
    if not any(what == "target" for what in (check[1] for check in checks if check[0] == "problem")):
        findings = _chats(config, arguments.samples or 2, arguments.endpoint)
        say(findings.text, result=not arguments.json)
        problems += findings.problems
    if arguments.json:
        rows = [dict(zip(("state", "what", "finding"), check, strict=True)) for check in checks]
        say(json.dumps({"checks": rows, "problems": problems}, indent=1), result=True)
    if problems:
        raise ConfigError(problems)


def _environment() -> Iterator[Check]:
    found = sys.version_info
    yield ("ok" if found >= (3, 11) else "problem"), "python", f"{platform.python_version()} (3.11 or newer is needed)"
    known = versions()
    for name in ("torch", "transformers", "accelerate", "deepspeed", "webdataset"):
        absent = known[name] == "absent"
        state = ("warning" if name == "deepspeed" else "problem") if absent else "ok"
        yield (
            state,
            name,
            "not installed" + (": only the ZeRO engines need it" if state == "warning" else "")
            if (absent)
            else known[name],
        )
    yield "ok", "devices", "GPU driver found" if preflight.has_gpu() else "CPU only: no GPU driver"


def _target(config: Config) -> Iterator[Check]:
    """What of the configuration the target, a stage after hours, or this machine would refuse."""
    problems: list[str] = []
    for check in (preflight.check, lambda made: preflight.check_stages(made, active(made))):
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
    for problem in dict.fromkeys(problems):
        yield "problem", "target", problem
    if not problems:
        yield "ok", "target", f"{target_folder(config)}: layers, mask token, draft vocabulary and stages fit"
    for problem in machine.problems(config, active(config)):
        yield "problem", "machine", problem


def _places(config: Config) -> Iterator[Check]:
    folder = config.work_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    yield ("ok" if free > 1e9 else "warning"), "disk", f"{free / 1e9:.1f} GB free below {config.work_dir}"
    uri = config.tracking.uri
    if not config.tracking.enabled:
        yield "ok", "tracking", "off"
    elif uri is None or urlsplit(uri).scheme in ("sqlite", "file", ""):
        yield "ok", "tracking", uri or f"sqlite store in {config.work_dir}"
    else:
        yield _reachable(uri)


def _reachable(uri: str) -> Check:
    import socket

    parts = urlsplit(uri)
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), 3
        ):
            return "ok", "tracking", f"{parts.hostname} answers"
    except OSError as error:
        return (
            "warning",
            "tracking",
            f"{parts.hostname}: {error}; runs go on and send later what waits in their journal",
        )


def _chats(config: Config, samples: int, endpoint: str | None) -> Findings:
    """The first rows of the data artifact where it exists, else of the sources."""
    rows, special = [], None
    try:
        chain = resolve(config)
    except ConfigError:
        chain = {}
    if "data" in chain and chain["data"].complete:
        artifact = chain["data"]
        train = [fact["file"] for fact in artifact.manifest()["shards"] if fact["file"].startswith("train")]
        rows = (
            [row for _, row in zip(range(samples), read_rows(artifact.path / train[0]), strict=False)] if train else []
        )
    if "tokens" in chain and chain["tokens"].complete:
        counts = chain["tokens"].manifest().get("special_tokens")
        special = {str(key): int(value) for key, value in counts.items()} if counts is not None else None
    if config.target.tiny is not None:
        from pipeline.tiny import make_tiny_target

        make_tiny_target(config)
    try:
        return examine(
            config, target_folder(config), samples=samples, endpoint=endpoint, rows=rows, special_tokens=special
        )
    except DsparkError as error:
        return Findings(problems=[str(error)])
