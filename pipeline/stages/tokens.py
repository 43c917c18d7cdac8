"""`tokens`: conversations in, token ids and loss masks out, by the target's own chat template.

    dspark tokens -c FILE

One parquet file per text shard of the train split; a training row per assistant turn (S29). No model is loaded.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pipeline.artifact import Artifact
from pipeline.chain import StageContext, share
from pipeline.corpus.accounts import check_share, write_listing
from pipeline.corpus.rows import shards_of
from pipeline.corpus.template import ChatTemplate
from pipeline.corpus.tokens import PRELOAD, TokenShards
from pipeline.corpus.workers import each
from pipeline.errors import DataError
from pipeline.progress import progress, say


def run(context: StageContext) -> None:
    """Publish this process's token shards; the process that finds all of them there writes the manifest.

    Raises DataError when more than `tokens.max_skip_fraction` of the rows gave nothing, or none is left.
    """
    config, artifact = context.config, context.artifact
    source = context.inputs["answers" if config.answers.enabled else "data"]
    stems = [Path(name).stem for name in shards_of(source.manifest(), "train")]
    names = [f"{stem}.parquet" for stem in stems]
    writer = TokenShards(
        source.path, artifact, str(context.target_path), config.target.revision, config.target.trust_remote_code,
        config.template, config.tokens,
    )  # fmt: skip
    missing = [Path(name).stem for name in artifact.missing(share(names))]
    with progress(len(missing), what="rendering chats", unit="shards") as bar:
        for samples in each(writer.publish, missing, workers=config.tokens.workers, preload=PRELOAD):
            bar.advance(rows=samples)
    if not artifact.missing(names):
        _finish(context, artifact, names)


def _finish(context: StageContext, artifact: Artifact, names: list[str]) -> None:
    config = context.config
    rows = [artifact.row(name) or {} for name in names]
    sums = {key: sum(row[key] for row in rows) for key in ("samples", "tokens", "supervised", "conversations")}
    special: Counter[str] = Counter()
    for row in rows:
        special.update(row["special_tokens"])
    skipped = write_listing(artifact.path / "skipped.jsonl", rows)
    total = sums["samples"] + sum(skipped.values())
    faults = {reason: count for reason, count in skipped.items() if reason != "given"}
    limit, listing = config.tokens.max_skip_fraction, artifact.path / "skipped.jsonl"
    if not sums["samples"]:
        raise DataError(
            f"tokens: no row is left of {total} with tokens.max_length = {config.tokens.max_length} and "
            f"tokens.min_loss_tokens = {config.tokens.min_loss_tokens}: {skipped}; {listing} names them"
        )
    check_share(faults, total=total, limit=limit, setting="tokens.max_skip_fraction", listing=listing)
    template = ChatTemplate(
        context.target_path, config.template,
        revision=config.target.revision, trust_remote_code=config.target.trust_remote_code,
    )  # fmt: skip
    artifact.finish(
        names, ["skipped.jsonl"],
        template={**template.info(), "max_length": config.tokens.max_length},
        stop_ids=list(template.stop_ids), vocabulary=len(template.tokenizer), special_tokens=dict(special), **sums,
    )  # fmt: skip
    context.tracker.file(artifact.path / "skipped.jsonl", "tokens")
    say(f"tokens: {sums['samples']} rows from {sums['conversations']} conversations, {sums['tokens']} tokens, "
        f"{sums['supervised']} supervised" + (f"; left out: {skipped}" if skipped else ""))  # fmt: skip
