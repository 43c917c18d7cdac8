"""`dspark verify`: every file against its manifest's hash. `dspark repair`: rebuild exactly the bad ones."""

from __future__ import annotations

import argparse
import json

from pipeline.artifact import Artifact
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError
from pipeline.progress import progress, say
from pipeline.runner import run_chain


def bad_files(artifacts: dict[str, Artifact]) -> dict[str, list[str]]:
    """Stage -> files that are missing or do not hash to the manifest's value. Unfinished artifacts are passed over."""
    finished = {name: artifact for name, artifact in artifacts.items() if artifact.complete}
    found: dict[str, list[str]] = {}
    with progress(len(finished), what="verify", unit="artifacts") as bar:
        for name, artifact in finished.items():
            if bad := artifact.verify():
                found[name] = bad
            bar.advance()
    return found


def verify(config: Config, arguments: argparse.Namespace) -> None:
    """Raises ArtifactError naming every bad file."""
    artifacts = resolve(config)
    found = bad_files(artifacts)
    if arguments.json:
        done = [name for name, artifact in artifacts.items() if artifact.complete]
        say(json.dumps({"checked": done, "bad": found}, indent=1), result=True)
    if found:
        raise ArtifactError(
            "\n".join(
                [
                    *(
                        f"{artifacts[name].path / file}: damaged or missing"
                        for name, files in found.items()
                        for file in files
                    ),
                    "`dspark repair` rebuilds them",
                ]
            )
        )
    say("verify: every file of every finished artifact has the content its manifest states")


def repair(config: Config, arguments: argparse.Namespace) -> None:
    """Remove bad files and their manifests, then run the stages again: good shards are kept.

    A rebuilt shard must hash to what the old manifest said, since everything downstream was made from that content.
    """
    artifacts = resolve(config)
    found = bad_files(artifacts)
    for name, files in found.items():
        artifact = artifacts[name]
        damaged = "manifest.json" in files
        stated = {} if damaged else {file: fact["sha256"] for file, fact in artifact.facts().items()}
        say(f"repair: {name}: rebuilding {', '.join(files)}")
        for file in files:
            (artifact.path / file).unlink(missing_ok=True)
            artifact.forget(file)
        artifact.manifest_path.unlink(missing_ok=True)
        run_chain(config, [name])
        differ = [file for file in files if artifact.facts().get(file, {}).get("sha256") != stated.get(file)]
        if differ:
            say(
                f"{name}: {', '.join(differ)} came out different from before (another machine, library or dtype?); "
                "what was made from the old content no longer matches it",
                warning=True,
            )
    say(f"repair: {sum(map(len, found.values()))} file(s) rebuilt" if found else "repair: nothing to do")
