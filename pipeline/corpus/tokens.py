"""Token shards: one parquet file per text shard, written by the tokens stage and read by targets and train.

    facts = write_tokens(text_path, parquet_path, template, config.tokens)
    for row in read_tokens(parquet_path): row.ids, row.mask

Columns: id, source, turn, ids (int32 list), mask (uint8 list, 1 = supervised). Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from pipeline import config as schema
from pipeline.artifact import Artifact
from pipeline.corpus.masks import training_rows
from pipeline.corpus.rows import read_rows
from pipeline.corpus.template import ChatTemplate

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("turn", pa.int32()),
        ("ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
    ]
)
_GROUP_ROWS = 256
PRELOAD = ("transformers.models.auto.tokenization_auto",)  # what worker processes should import once for all


@dataclass(frozen=True)
class TokenRecord:
    """One training row as read back: ids int32[T], mask uint8[T]."""

    id: str
    source: str
    turn: int
    ids: np.ndarray
    mask: np.ndarray


def read_tokens(path: Path) -> Iterator[TokenRecord]:
    """Rows of a token shard in order, a group at a time."""
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_GROUP_ROWS, use_threads=False):
            ids, mask = batch.column("ids"), batch.column("mask")
            for at in range(batch.num_rows):
                yield TokenRecord(
                    batch.column("id")[at].as_py(),
                    batch.column("source")[at].as_py(),
                    batch.column("turn")[at].as_py(),
                    ids[at].values.to_numpy(),
                    mask[at].values.to_numpy(),
                )


def write_tokens(text: Path, tokens: Path, template: ChatTemplate, settings: schema.Tokens) -> dict[str, Any]:
    """Render a text shard. Returns the shard's facts: samples, tokens, supervised, skipped, special tokens by count.

    Every assistant turn (or conversation without one) is one sample or one counted skip.
    """
    skipped: Counter[str] = Counter()
    listing: list[dict[str, Any]] = []
    sums: Counter[str] = Counter()
    special: Counter[int] = Counter()
    added = template.added_ids
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    with parquet.ParquetWriter(tokens, SCHEMA, compression="zstd") as writer:
        for row in read_rows(text):
            rendered = training_rows(template, row, settings)
            for made in rendered.rows:
                values = (row.id, row.source, made.turn, made.ids, made.mask)
                for name, value in zip(SCHEMA.names, values, strict=True):
                    columns[name].append(value)
                sums.update(samples=1, tokens=len(made.ids), supervised=sum(made.mask))
                special.update(token for token in made.ids if token in added)
            for turn, reason, detail in rendered.skipped:
                skipped[reason] += 1
                listing.append({"id": row.id, "turn": turn, "reason": reason, "detail": detail[:500]})
            sums["conversations"] += 1
            if len(columns["id"]) >= _GROUP_ROWS:
                _flush(writer, columns)
        _flush(writer, columns)
    facts: dict[str, Any] = {name: sums[name] for name in ("samples", "tokens", "supervised", "conversations")}
    facts["special_tokens"] = {str(token): count for token, count in sorted(special.items())}
    return {**facts, "skipped": dict(sorted(skipped.items())), "skipped_rows": listing}


def _flush(writer: parquet.ParquetWriter, columns: dict[str, list[Any]]) -> None:
    if columns["id"]:
        writer.write_table(pa.table(columns, schema=SCHEMA))
    for values in columns.values():
        values.clear()


@dataclass(frozen=True)
class TokenShards:
    """Publishes token shards of one artifact; picklable, so that worker processes can share the list."""

    source: Path
    artifact: Artifact
    model: str
    revision: str | None
    trust_remote_code: bool
    template: schema.Template
    settings: schema.Tokens

    def publish(self, name: str) -> int:
        """Render `<source>/<name>.jsonl` into `<name>.parquet`; returns the number of samples."""
        template = _template(self.model, self.revision, self.trust_remote_code, self.template)
        with self.artifact.shard(f"{name}.parquet") as shard:
            shard.row.update(write_tokens(self.source / f"{name}.jsonl", shard.path, template, self.settings))
            return int(shard.row["samples"])


@cache
def _template(model: str, revision: str | None, trust_remote_code: bool, template: schema.Template) -> ChatTemplate:
    """One tokenizer per process."""
    return ChatTemplate(model, template, revision=revision, trust_remote_code=trust_remote_code)
