"""Content-addressed stage outputs: atomic files, shard rows, and the manifest written last.

    artifact = Artifact(work_dir, "tokens", request)
    artifact.create(config_yaml)
    for name in artifact.missing(names):
        with artifact.shard(name) as shard:
            write_rows(shard.path)                 # a temporary file
            shard.row.update(samples=1000)         # published with size and SHA-256 when the block ends
    artifact.finish(names)

A folder is `<work_dir>/<stage>/<fingerprint>`. It holds `request.json` (what the fingerprint hashes), the output files,
one `rows/<file>.json` per published shard, and at last `manifest.json`, the only proof of completion. Every write is
temporary name, fsync, rename; publishing the same shard twice is harmless. Imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.files import (
    atomic_path,
    canonical,
    clear_temporaries,
    digest,
    fsync_dir,
    read_json,
    sha256_file,
    write_json,
)

FORMAT = 1

__all__ = [
    "FORMAT",
    "Artifact",
    "Shard",
    "atomic_path",
    "canonical",
    "digest",
    "fsync_dir",
    "git_revision",
    "read_json",
    "sha256_file",
    "versions",
    "write_json",
]


@dataclass
class Shard:
    """A shard being written: the temporary `path`, and the `row` of facts published with it."""

    path: Path
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """One stage output. `request` is everything that determines it: stage, format, config read, inputs, target."""

    work_dir: Path
    stage: str
    request: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        return digest(self.request)

    @property
    def path(self) -> Path:
        return self.work_dir / self.stage / self.fingerprint

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def complete(self) -> bool:
        return self.manifest_path.exists()

    def manifest(self) -> dict[str, Any]:
        """Raises ArtifactError when absent, damaged, or made for another request."""
        if not self.complete:
            raise ArtifactError(f"{self.path}: not finished (no manifest.json); run the {self.stage} stage first")
        manifest = read_json(self.manifest_path)
        if manifest.get("fingerprint") != self.fingerprint:
            raise ArtifactError(
                f"{self.manifest_path}: belongs to {manifest.get('fingerprint')}, the folder is {self.fingerprint}"
            )
        return dict(manifest)

    # -------------------------------------------------------------------------------------------- writing

    def create(self, config_yaml: str = "") -> None:
        """Make the folder, or check that an existing one was made for the same request."""
        request_path = self.path / "request.json"
        if request_path.exists():
            found = digest(read_json(request_path))
            if found != self.fingerprint:
                raise ArtifactError(f"{request_path}: hashes to {found}, not to its folder's name; remove the folder")
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(request_path, self.request)
        if config_yaml:
            with atomic_path(self.path / "config.yaml") as temporary:
                temporary.write_text(config_yaml, encoding="utf-8")

    @contextlib.contextmanager
    def shard(self, name: str) -> Iterator[Shard]:
        """Write and publish one shard: the file first, then its row, which is what makes it count."""
        with atomic_path(self.path / name) as temporary:
            shard = Shard(temporary)
            yield shard
            facts = {"file": name, "bytes": temporary.stat().st_size, "sha256": sha256_file(temporary)}
        write_json(self._row_path(name), {**shard.row, **facts})

    def row(self, name: str) -> dict[str, Any] | None:
        """The row of a published shard, or None when it is missing, unreadable, or its file is absent or resized."""
        try:
            row = read_json(self._row_path(name))
            same = (self.path / name).stat().st_size == row["bytes"]
        except (ArtifactError, OSError, KeyError, TypeError):
            return None
        return row if same else None

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.row(name) is None]

    def forget(self, name: str) -> None:
        """Drop a shard's row, so that it counts as missing."""
        self._row_path(name).unlink(missing_ok=True)

    def facts(self) -> dict[str, dict[str, Any]]:
        """File name -> {file, bytes, sha256, …} of everything the manifest lists."""
        manifest = self.manifest()
        return {fact["file"]: fact for fact in [*manifest["shards"], *manifest["files"]]}

    def _row_path(self, name: str) -> Path:
        return self.path / "rows" / f"{name}.json"

    def finish(
        self,
        shards: Sequence[str] = (),
        files: Sequence[str] = (),
        skipped: Mapping[str, int] | None = None,
        **summary: Any,
    ) -> dict[str, Any]:
        """Write manifest.json. `shards` are published names, `files` other outputs below the folder (hashed here).

        Skip counts of the shard rows (`row["skipped"]`) are added to `skipped`. Extra keywords are stored as they are.
        Raises ArtifactError when a named shard was not published.
        """
        rows = []
        total = dict(skipped or {})
        for name in shards:
            row = self.row(name)
            if row is None:
                raise ArtifactError(f"{self.path / name}: not published; the stage cannot finish")
            facts: dict[str, Any] = {key: row[key] for key in ("file", "samples", "bytes", "sha256") if key in row}
            rows.append({**facts, "row": digest(row)})
            for reason, count in row.get("skipped", {}).items():
                total[reason] = total.get(reason, 0) + count
        manifest = {
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "format": self.request["format"],
            "inputs": self.request.get("inputs", {}),
            "config": self.request.get("config", {}),
            "target": self.request.get("target"),
            "shards": rows,
            "files": [self._file_fact(name) for name in files],
            "skipped": total,
            "versions": versions(),
            "git_revision": git_revision(),
            **summary,
        }
        write_json(self.manifest_path, manifest)
        clear_temporaries(self.path / ".tmp")
        return manifest

    def _file_fact(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return {"file": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}

    # -------------------------------------------------------------------------------------------- checking

    def check_sizes(self) -> None:
        """Cheap check before use: every file of the manifest is there with its length. Raises ArtifactError."""
        problems = []
        for fact in self.facts().values():
            path = self.path / fact["file"]
            if not path.exists():
                problems.append(f"{path}: missing")
            elif path.stat().st_size != fact["bytes"]:
                problems.append(f"{path}: {path.stat().st_size} bytes, the manifest says {fact['bytes']}")
        if problems:
            raise ArtifactError("\n".join([*problems, "run `dspark repair` or remove the folder"]))

    def verify(self) -> list[str]:
        """Names of files whose content, or whose shard row's, is not what the manifest states (missing ones included).

        A damaged manifest, or a request that does not hash to the folder's name, is named itself.
        """
        try:
            shards = [fact["file"] for fact in self.manifest()["shards"]]
        except ArtifactError:
            return ["manifest.json"]
        return [
            *self._bad_request(),
            *(
                name
                for name, fact in self.facts().items()
                if not (self.path / name).exists()
                or sha256_file(self.path / name) != fact["sha256"]
                or (name in shards and row_changed(self.row(name), fact))
            ),
        ]

    def _bad_request(self) -> list[str]:
        try:
            same = digest(read_json(self.path / "request.json")) == self.fingerprint
        except ArtifactError:
            same = False
        return [] if same else ["request.json"]


def row_changed(row: dict[str, Any] | None, fact: Mapping[str, Any]) -> bool:
    """Whether a shard's row is not the one its fact in the manifest was made from; older facts do not tell."""
    return row is None or digest(row) != fact.get("row", digest(row))


@cache
def versions() -> dict[str, str]:
    """Installed versions of the libraries results depend on."""
    names = ("torch", "transformers", "tokenizers", "accelerate", "deepspeed", "datasets", "webdataset", "numpy")
    found = {"dspark-pipeline": _version("dspark-pipeline")}
    return {**found, **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


@cache
def git_revision() -> str | None:
    """Commit of the checkout the code runs from, `-dirty` appended when it differs; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
            cwd=here, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None
