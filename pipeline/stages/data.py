"""`data`: corpora in, normalised conversations out, as text shards split into train, calibration and evaluation.

    dspark data -c FILE

Two passes. Units of the sources are read in parallel (processes, ranks, array tasks) into sorted parts; then one
process, whichever finds all parts there, removes duplicates and publishes the shards. Killed anywhere, the same command
goes on from the units and shards that exist.
"""

from __future__ import annotations

import json
import shutil

from pipeline.artifact import atomic_path, write_json
from pipeline.chain import StageContext, share
from pipeline.corpus.accounts import check_skips, describe, report_of
from pipeline.corpus.assemble import Assembly, ShardWriter
from pipeline.corpus.duplicates import Signer
from pipeline.corpus.leaks import Leaks, load_leaks
from pipeline.corpus.parts import PartWriter
from pipeline.corpus.sources import plan_units
from pipeline.corpus.workers import each
from pipeline.progress import progress, say


def run(context: StageContext) -> None:
    """Publish the data artifact, or only this process's share of its first pass while others still read theirs.

    Raises DataError when more than `data.max_skip_fraction` of the rows had to be skipped, or none is left.
    """
    data, artifact = context.config.data, context.artifact
    units = plan_units(data, seed=context.config.seed)
    parts = artifact.path / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    leaks = load_leaks(data.decontaminate)
    writer = PartWriter(parts, data, leaks=leaks, signer=Signer(data.near_duplicates) if data.near_duplicates else None)
    mine = set(share([unit.key for unit in units]))
    unread = [unit for unit in units if unit.key in mine and not writer.done(unit)]
    with progress(len(mine), what="reading sources", unit="units", done=len(mine) - len(unread)) as bar:
        for _ in each(writer.run, unread, workers=data.workers):
            bar.advance()
    assembly = Assembly(parts, units, data)
    if not assembly.ready:
        say("data: this process's share is read; the process that finishes last publishes the shards")
        return
    try:
        _publish(context, assembly, leaks)
    except FileNotFoundError:
        if not artifact.complete:  # another process may have finished, and taken the parts away
            raise


def _publish(context: StageContext, assembly: Assembly, leaks: Leaks | None) -> None:
    artifact = context.artifact
    assembly.decide()
    listing = artifact.path / "skipped.jsonl"
    with atomic_path(listing) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, sort_keys=True) + "\n" for entry in assembly.listing())
    check_skips(assembly, listing)
    names = assembly.shards()
    missing = artifact.missing(names)
    with progress(len(names), what="writing shards", unit="shards", done=len(names) - len(missing)) as bar:
        for _ in each(ShardWriter(artifact, assembly).publish, missing, workers=assembly.data.workers):
            bar.advance()
    report = report_of(assembly, listing, too_short=leaks.too_short if leaks else None)
    write_json(artifact.path / "report.json", report)
    artifact.finish(names, ["skipped.jsonl", "report.json"], assembly.skipped(), rows=report["rows"])
    shutil.rmtree(assembly.folder, ignore_errors=True)
    for name in ("report.json", "skipped.jsonl"):
        context.tracker.file(artifact.path / name, "data")
    context.tracker.metrics({f"data/rows_{key}": count for key, count in report["rows"].items()})
    say(describe(report))
