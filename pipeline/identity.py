"""What external inputs *are*: hashes of local files, commits of hub ids, versions of demo packages.

Fingerprints rest on these. A local file is hashed once and remembered by (path, size, mtime) in the work directory, so
asking again costs a `stat`. Imports no torch.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.artifact import digest, sha256_file, write_json
from pipeline.benchmarks import BENCHMARKS, HELDOUT
from pipeline.config import Config, Source, Target
from pipeline.errors import ArtifactError, ConfigError

_WEIGHTS = ("*.safetensors", "*.bin")
_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "vocab*",
    "merges*",
    "special_*",
)
DATA_FORMATS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet", ".arrow", ".feather")
_DEMO_PACKAGES = {"gsm_symbolic": "reasoning-gym", "codeio": "reasoning-gym", "chatterbot": "chatterbot-corpus"}


# An answer may take as long as the hub needs to write a commit down.
HUB_CONNECT_SECONDS, HUB_ANSWER_SECONDS = 10.0, 120.0


class Hashes:
    """SHA-256 of files, cached in `<work_dir>/cache/hashes.json`."""

    def __init__(self, work_dir: Path) -> None:
        self.path = work_dir / "cache" / "hashes.json"
        try:
            self.known: dict[str, str] = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.known = {}

    def file(self, path: Path) -> str:
        facts = path.stat()
        key = f"{path.resolve()}|{facts.st_size}|{facts.st_mtime_ns}"
        if key not in self.known:
            self.known[key] = sha256_file(path)
            write_json(self.path, self.known)
        return self.known[key]


def target_folder(config: Config) -> str:
    """Where the target is read from: a local folder, or a hub id."""
    if config.target.tiny is not None:
        return str(config.work_dir / "models" / f"tiny-{digest(config.target.tiny.model_dump(mode='json'))}")
    model = str(config.target.model)
    looks_like_a_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~", "work/"))
    if not Path(model).is_dir() and not looks_like_a_hub_id:
        raise ConfigError(
            f"target.model: {model} is neither an existing folder nor a hub id (owner/name). "
            "The demo target is made by `python -m tools.fetch_smollm2 FOLDER`"
        )
    return model


def target_identity(config: Config) -> dict[str, Any]:
    """Revision of a hub target, weights hash of a local one, recipe of a tiny one.

    Raises ConfigError when a local folder lacks its files, or a hub id resolves to nothing.
    """
    target = config.target
    if target.tiny is not None:
        return {"tiny": target.tiny.model_dump(mode="json")}
    folder = Path(target_folder(config))
    if folder.is_dir():
        files = sorted({path for pattern in (*_WEIGHTS, *_DESCRIPTION) for path in folder.glob(pattern)})
        if not any(path.match(pattern) for path in files for pattern in _WEIGHTS):
            raise ConfigError(f"target.model: {folder} holds no weights (*.safetensors)")
        hashes = Hashes(config.work_dir)
        return {"sha256": digest({path.name: hashes.file(path) for path in files}, 64)}
    return {"hub": target.model, "revision": hub_revision(target)}


def hub_revision(target: Target) -> str:
    """The commit a hub id stands for: asked from the hub, or taken from the local cache when offline."""
    from huggingface_hub import HfApi, constants, snapshot_download

    model = str(target.model)
    limit_hub_waits()
    try:
        if not constants.HF_HUB_OFFLINE:
            return str(HfApi().model_info(model, revision=target.revision).sha)
    except Exception as error:  # noqa: BLE001 - any failure to reach the hub falls back to the local cache, or is told
        online_error = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        online_error = "HF_HUB_OFFLINE is set"
    try:
        return Path(
            snapshot_download(model, revision=target.revision, local_files_only=True, allow_patterns=["config.json"])
        ).name
    except Exception as error:  # noqa: BLE001
        raise ConfigError(
            f"target.model: {model} is no local folder, the hub did not answer ({online_error}), and the local hub "
            "cache does not hold it; `dspark fetch -c FILE` brings it where there is a network"
        ) from error


def source_identity(config: Config, source: Source) -> dict[str, Any]:
    """Content hashes of local files, the package version behind a demo set, or the commit of a hub data set."""
    if source.demo is not None:
        package = _DEMO_PACKAGES[source.demo]
        try:
            return {"package": package, "version": importlib.metadata.version(package)}
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"demo {source.demo} needs {package}; install the demo extra: pip install -e '.[demo]'"
            ) from error
    text = str(source.path)
    files = local_files(text)
    if unknown := [path for path in files if not path.name.lower().endswith(DATA_FORMATS)]:
        raise ConfigError(f"{text}: {unknown[0].name} is of no known format; read are {', '.join(DATA_FORMATS)}")
    if files:
        hashes = Hashes(config.work_dir)
        return {"files": [[path.name, hashes.file(path)] for path in files]}
    if Path(text).expanduser().is_dir():
        raise ConfigError(f"{text}: this folder holds no data file; read are {', '.join(DATA_FORMATS)}")
    if text.count("/") != 1 or text.startswith((".", "/", "~")) or Path(text).suffix:
        raise ConfigError(f"{text}: no such file, and not a hub id (owner/name)")
    return {"hub": text, "revision": hub_commit(text, source.revision)}


def recorded_files(pattern: str) -> list[Path]:
    """Files that `calibrate.records` names, sorted; its last part may be a glob."""
    path = Path(pattern)
    return sorted(file for file in path.parent.glob(path.name) if file.is_file()) if path.name else []


def prompt_sets_identity(
    config: Config, names: Sequence[str], *, setting: str, heldout: bool = False
) -> dict[str, dict[str, str]]:
    """Hashes of the prompt sets that are files, commits of those that lie on the hub.

    Raises ConfigError naming `setting` and every set that is neither. `heldout` says whether that split may be named.
    """
    files: dict[str, str] = {}
    benchmarks: dict[str, str] = {}
    problems: list[str] = []
    hashes = Hashes(config.work_dir)
    for name in names:
        try:
            if Path(name).is_file():
                short = Path(name).name
                files[short if short not in files else name] = hashes.file(Path(name))
            elif name in BENCHMARKS:
                benchmarks[name] = hub_commit(BENCHMARKS[name].repository, None)
            elif name != HELDOUT:
                known = ", ".join([HELDOUT, *BENCHMARKS])
                problems.append(f"{setting}: {name!r}: no such file, and not one of {known}")
            elif not heldout:
                problems.append(f"{setting}: {HELDOUT} is the evaluation split itself, which the corpus never holds")
        except ConfigError as error:
            problems += [f"{setting}: {name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return {"prompt_files": files, "benchmarks": benchmarks}


def limit_hub_waits() -> None:
    """From here on the hub client's requests end with a time-out; by itself it waits for an answer for ever."""
    from huggingface_hub import get_session

    session = get_session()
    if _limited not in session.event_hooks["request"]:  # its `timeout` would not do: most requests say "none"
        session.event_hooks = {**session.event_hooks, "request": [*session.event_hooks["request"], _limited]}


def _limited(request: Any) -> None:
    own = {name: seconds for name, seconds in request.extensions["timeout"].items() if seconds is not None}
    limits = {"connect": HUB_CONNECT_SECONDS, "read": HUB_ANSWER_SECONDS, "write": HUB_ANSWER_SECONDS}
    request.extensions["timeout"] = {**limits, **own}


@cache
def hub_commit(repository: str, revision: str | None) -> str:
    """The commit of a hub data set that a branch, tag or commit stands for.

    Asked from the hub once a process; where it does not answer, the local hub cache knows what it last answered.
    Raises ConfigError when neither can tell.
    """
    from huggingface_hub import resolve_revision
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    limit_hub_waits()
    try:
        return resolve_revision(repository, repo_type="dataset", revision=revision).resolved
    except RevisionNotFoundError as error:
        raise ConfigError(f"{repository}: the hub has no revision {revision or 'main'} of this data set") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"{repository}: no such file, and no data set the hub shows you (private? log in)") from error
    except Exception as error:  # noqa: BLE001 - the hub client raises many kinds; all mean that nobody can tell
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{repository}: neither the hub nor the local hub cache knows its revision {revision or 'main'} ({told}); "
            "`dspark fetch -c FILE` brings the data set where there is a network"
        ) from error


def local_files(pattern: str) -> list[Path]:
    """Files a path or glob names, sorted; a folder stands for the data files in it. Empty for a hub id."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = (p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        return sorted(p for p in files if p.name.lower().endswith(DATA_FORMATS))  # a folder also holds READMEs
    return sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207


def target_json(config: Config, name: str) -> dict[str, Any]:
    """A JSON file of the target (config.json, tokenizer_config.json …) as plain data; {} when it has none.

    No weights are read and no torch is imported.
    """
    path = target_file(config, name)
    if path is None:
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON ({error})") from error


def target_file(config: Config, name: str) -> Path | None:
    """Where a file of the target lies; None when it has none. Of a hub target, the file is fetched."""
    folder = Path(target_folder(config))
    if folder.is_dir():
        return folder / name if (folder / name).exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(str(folder), name, revision=config.target.revision))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None
