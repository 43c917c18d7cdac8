"""Rows per second and memory of the data stage, on synthetic ShareGPT rows with 2 % dirt.

    python -m tools.bench_data --rows 10000 100000 --near-duplicates
    python -m tools.bench_data --rows 100000 --workers 2

Every run happens in a process of its own, so that its peak memory is its own. Prints one line a run (rows per CPU
second is the figure to trust on a busy machine), then the growth of memory per row from the smallest to the largest.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import chain, config, progress
from pipeline.progress import say
from pipeline.stages import data

_WORDS_PER_TURN = 60


class _NoTracker:
    def file(self, path: Path, folder: str = "") -> None: ...

    def metrics(self, values: dict[str, float], step: int | None = None) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--near-duplicates", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        _measure(Path(arguments.inside), arguments)
        return
    found = []
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder) / "corpus.jsonl", rows)
            flags = ["--near-duplicates"] if arguments.near_duplicates else []
            command = [
                sys.executable,
                "-m",
                "tools.bench_data",
                "--inside",
                folder,
                "--workers",
                str(arguments.workers),
            ]
            run = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
            found.append(json.loads(run.stdout.splitlines()[-1]))
            say(f"{rows} rows: " + ", ".join(f"{key} {value}" for key, value in found[-1].items()))
    if len(found) > 1:
        low, high = found[0], found[-1]
        growth = (high["peak_bytes"] - low["peak_bytes"]) / (high["rows"] - low["rows"])
        say(f"peak memory grew by {high['peak_bytes'] / low['peak_bytes'] - 1:+.1%}: {growth:.0f} bytes a row")


def write_corpus(path: Path, rows: int, *, seed: int = 0) -> None:
    """ShareGPT rows of one to three exchanges; 2 % damaged in five ways, 1 % exact and 1 % near copies."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in _lines(rows, random.Random(seed)))


def _lines(rows: int, rng: random.Random) -> Iterator[str]:
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(20_000)]
    recent: list[list[str]] = [["first", "row"]]
    for number in range(rows):
        kind = rng.random()
        if kind < 0.02:
            yield _dirt(number)
            continue
        turns = list(rng.choice(recent)) if kind < 0.04 else []
        if 0.03 < kind < 0.04:
            turns[-1] = f"{turns[-1]} {rng.choice(vocabulary)}"
        if not turns:
            count = 2 * rng.randint(1, 3)
            turns = [" ".join(rng.choices(vocabulary, k=_WORDS_PER_TURN)) for _ in range(count)]
            recent = [*recent[-500:], turns]
        speakers = ("human", "gpt")
        turned = [{"from": speakers[at % 2], "value": text} for at, text in enumerate(turns)]
        yield json.dumps({"conversations": turned, "source": f"s{number % 4}"})


def _dirt(number: int) -> str:
    return (
        '{"conversations": [{"from": "hum',
        '{"conversations": []}',
        '{"conversations": [{"from": "gpt", "value": "x"}]}',
        '{"conversations": [{"from": "human", "value": null}]}',
        '{"conversations": [{"from": "human", "value": "x"}, {"from": "some-model", "value": "y"}]}',
    )[number % 5]


def _measure(folder: Path, arguments: argparse.Namespace) -> None:
    near: dict[str, Any] | None = {} if arguments.near_duplicates else None
    sources = [{"path": str(folder / "corpus.jsonl")}]
    made = config.validate(
        {
            "work_dir": str(folder / "work"),
            "target": {"tiny": {}},
            "data": {"sources": sources, "near_duplicates": near, "workers": arguments.workers},
        }
    )
    progress.configure(quiet=True)
    artifacts = chain.resolve(made)
    artifact = artifacts["data"]
    artifact.create()
    started = time.monotonic()
    data.run(chain.StageContext(made, artifact, {}, _NoTracker(), artifacts))
    seconds = time.monotonic() - started
    rows = artifact.manifest()["rows"]
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    facts: dict[str, Any] = {"rows": rows["in"], "kept": rows["out"], "seconds": round(seconds, 1), "peak_bytes": peak}
    facts["rows_per_cpu_second"] = round(rows["in"] / cpu)
    progress.configure()
    say(json.dumps({**facts, "rows_per_second": round(rows["in"] / seconds)}))


if __name__ == "__main__":
    main()
