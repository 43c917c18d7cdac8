"""`answers`: the same prompts, answered by the target itself (the paper's recipe).

    dspark answers -c FILE

In process, or through any OpenAI-compatible server: that path imports neither torch nor transformers. Multi-turn
conversations are played turn by turn. One output shard per text shard of the train split, under the same name.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifact import Artifact
from pipeline.chain import StageContext, share
from pipeline.corpus.accounts import check_share, write_listing
from pipeline.corpus.dialogue import SERVER_ERROR, expected_answers
from pipeline.corpus.rows import read_rows, shards_of
from pipeline.errors import DataError
from pipeline.progress import Bar, progress, say


class Answerer(Protocol):
    """Answers the named shards of a folder and publishes them under the same names."""

    def run(self, names: Sequence[str], source: Path, artifact: Artifact, bar: Bar) -> None: ...


def run(context: StageContext) -> None:
    """Publish this process's answered shards; the process that finds all of them there writes the manifest.

    Raises DataError when more than `answers.max_skip_fraction` of the rows got no answer.
    """
    config, artifact = context.config, context.artifact
    source = context.inputs["data"]
    names = shards_of(source.manifest(), "train")
    mine = artifact.missing(names if config.target.tensor_parallel else share(names))
    if mine:
        answerer = _answerer(context)
        total = sum(expected_answers(row) for name in mine for row in read_rows(source.path / name))
        with progress(total, what="answers", unit="answers") as bar:
            answerer.run(mine, source.path, artifact, bar)
    if not artifact.missing(names):
        _finish(context, artifact, names)


def _answerer(context: StageContext) -> Answerer:
    if context.config.answers.backend == "local":
        from pipeline.decoding.answering import LocalAnswers

        return LocalAnswers(context.config, str(context.target_path))
    from pipeline.corpus.server import ServerAnswers

    return ServerAnswers(context.config)


def _finish(context: StageContext, artifact: Artifact, names: list[str]) -> None:
    rows = [artifact.row(name) or {} for name in names]
    listing = artifact.path / "skipped.jsonl"
    skipped = write_listing(listing, rows)
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["finish_reasons"])
    total = sum(row["rows"] for row in rows)
    limit = context.config.answers.max_skip_fraction
    try:
        check_share(skipped, total=total, limit=limit, setting="answers.max_skip_fraction", listing=listing)
        if not sum(row["samples"] for row in rows):
            raise DataError(f"answers: none of {total} conversations was answered: {skipped}; {listing} names them")
    except DataError as error:
        raise _asking_again(error, artifact, rows) from None
    artifact.finish(names, ["skipped.jsonl"], rows=total, finish_reasons=dict(sorted(reasons.items())))
    shutil.rmtree(artifact.path / "journal", ignore_errors=True)
    cut = reasons["length"] / max(sum(reasons.values()), 1)
    say(f"answers: {sum(reasons.values())} to {total} conversations, {cut:.0%} cut at the length limit"
        + (f"; left out: {skipped}" if skipped else ""))  # fmt: skip


def _asking_again(error: DataError, artifact: Artifact, rows: list[dict[str, Any]]) -> DataError:
    """Take back the shards with rows that no server answered: a server that was down is no fault of the data."""
    unanswered = [row for row in rows if SERVER_ERROR in row["skipped"]]
    for row in unanswered:
        artifact.forget(row["file"])
    count = sum(row["skipped"][SERVER_ERROR] for row in unanswered)
    return DataError(f"{error}. The same command asks the {count} again that no server answered") if count else error
