"""The small local artifact that stands for a finished cache elsewhere (`targets.mode: streamed`).

    declare(artifact, remote, expected, rows={"train-00000.parquet": 1000, …}, tokens=…, summary=…)

Its manifest pins the remote's shards (`remote`: file, samples, bytes, sha256, in the order of the token shards) and
says which rows that cache leaves out (`left_out`: token shard -> rows), so training never asks for them and notices
when anything behind the URL changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.artifact import Artifact, atomic_path
from pipeline.differences import differences
from pipeline.errors import ArtifactError, ConfigError
from pipeline.shards.calibration import RMS_FILE
from pipeline.shards.layout import Spec
from pipeline.shards.reader import row_problem, summary_problems
from pipeline.shards.remote import Remote, refuse_another, retried
from pipeline.shards.stream import ShardStream


def declare(
    artifact: Artifact,
    remote: Remote,
    expected: Artifact,
    *,
    rows: Mapping[str, int],
    tokens: int,
    summary: Mapping[str, Any],
    template: Any,
) -> dict[str, Any]:
    """Check the remote's manifest and finish `artifact`; returns its manifest.

    `rows` counts those of each token shard, `tokens` all their tokens, `summary` is what the manifest must say of the
    format. Raises ConfigError when the remote is not what `expected` would hold, ArtifactError when it cannot be read.
    """
    manifest = remote.manifest()
    refuse_another(manifest, expected, remote.url)
    theirs = manifest.get("targets") or {}
    problems = summary_problems(theirs) + differences({key: theirs.get(key) for key in summary}, dict(summary))
    problems += _shard_problems(manifest["shards"], rows)
    left_out = {}
    if not problems:
        left_out = _left_out(ShardStream(remote, Spec.of(theirs), manifest["shards"]), rows)
        if not left_out and theirs.get("tokens") != tokens:
            problems.append(f"{theirs.get('tokens')} tokens there, {tokens} here: the corpus was answered twice?")
    if problems:
        raise ConfigError([f"targets.url: {remote.url}: {problem}" for problem in problems])
    if summary["channel_rms"]:
        _fetch_rms(artifact, remote, manifest["files"])
    return artifact.finish(
        files=[RMS_FILE] if summary["channel_rms"] else [], mode="streamed", targets=dict(theirs), template=template,
        remote=manifest["shards"], left_out=left_out,
    )  # fmt: skip


def _fetch_rms(artifact: Artifact, remote: Remote, files: Sequence[Mapping[str, Any]]) -> None:
    data = retried(lambda: remote.fetch(RMS_FILE))
    if hashlib.sha256(data).hexdigest() not in [fact["sha256"] for fact in files if fact["file"] == RMS_FILE]:
        raise ArtifactError(f"{remote.where(RMS_FILE)}: does not hash to what the manifest there says of it")
    with atomic_path(artifact.path / RMS_FILE) as temporary:
        temporary.write_bytes(data)


def _shard_problems(shards: Sequence[Mapping[str, Any]], rows: Mapping[str, int]) -> list[str]:
    names = [file.removesuffix(".parquet") + ".tar" for file in rows]
    if [fact["file"] for fact in shards] != names:
        return [f"{len(shards)} shards there, {len(names)} token shards here"]
    return [
        f"{fact['file']}: {fact['samples']} samples there, {count} rows here"
        for fact, count in zip(shards, rows.values(), strict=True)
        if fact["samples"] > count
    ]


def _left_out(stream: ShardStream, rows: Mapping[str, int]) -> dict[str, list[int]]:
    """Rows that were not finite when the cache was built: by the shard's index row, or else by reading the shard."""
    found = {}
    for number, (file, count) in enumerate(rows.items()):
        fact = stream.shards[number]
        if fact["samples"] < count:
            present = _indexed(stream.remote, fact)
            if present is None:
                present = retried(lambda number=number: [row for row, _ in stream.rows(number)])  # type: ignore[misc]
            found[file] = sorted(set(range(count)) - set(present))
    return found


def _indexed(remote: Remote, fact: dict[str, Any]) -> list[int] | None:
    """Rows a shard holds by its index row; None where that was not copied along, or belongs to another build."""
    try:
        row = json.loads(remote.fetch(f"rows/{fact['file']}.json"))
    except (ArtifactError, ValueError):
        return None
    return list(row["index"]["row"]) if row_problem(row, fact) is None else None
