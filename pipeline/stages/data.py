"""`data`: corpora in, normalised conversations out, as text shards split into train, calibration and evaluation.

    dspark data -c FILE

Two passes. Units of the sources are read in parallel (processes, ranks, array tasks) into sorted parts; then one
process, whichever finds all parts there, removes duplicates and publishes the shards. Killed anywhere, the same command
goes on from the units and shards that exist.
"""

from __future__ import annotations

import json
import shutil

from pipeline.artifact import atomic_path
from pipeline.chain import StageContext, share
from pipeline.corpus.accounts import check_skips, describe, report_of
from pipeline.corpus.assemble import Assembly
from pipeline.corpus.parts import PartWriter
from pipeline.corpus.sources import plan_units
from pipeline.corpus.workers import each
from pipeline.progress import progress, say


def run(context: StageContext) -> None:
    """Publish the data artifact, or this process's share of its first pass when others still read theirs.

    Raises DataError when more than `data.max_skip_fraction` of the rows had to be skipped, or none is left.
    """
    data, artifact = context.config.data, context.artifact
    units = plan_units(data, seed=context.config.seed)
    parts = artifact.path / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    writer = PartWriter(parts, data)
    mine = [unit for unit in units if unit.key in set(share([unit.key for unit in units]))]
    with progress(len(mine), what="reading sources", unit="units") as bar:
        for rows in each(writer.run, mine, workers=data.workers):
            bar.advance(rows=rows)
    assembly = Assembly(parts, units, data)
    if not assembly.ready:
        say("data: this process's share is read; the process that finishes last publishes the shards")
        return
    assembly.decide()
    with atomic_path(artifact.path / "skipped.jsonl") as path, path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, sort_keys=True) + "\n" for entry in assembly.listing())
    check_skips(assembly, artifact.path / "skipped.jsonl")
    names = assembly.shards()
    missing = artifact.missing(names)
    with progress(len(names), what="writing shards", unit="shards", done=len(names) - len(missing)) as bar:
        for name in missing:
            with artifact.shard(name) as shard:
                shard.row.update(assembly.write(name, shard.path))
            bar.advance()
    report = report_of(assembly)
    with atomic_path(artifact.path / "report.json") as path:
        path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    artifact.finish(names, ["skipped.jsonl", "report.json"], assembly.skipped(), rows=report["rows"])
    shutil.rmtree(parts, ignore_errors=True)
    context.tracker.file(artifact.path / "report.json", "data")
    say(describe(report))
