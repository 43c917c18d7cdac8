"""Bytes every artifact takes. Exact where tensors are stored; text is estimated from its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.draft.config import DraftConfig
from pipeline.identity import target_folder
from pipeline.operations.costs.corpus import Corpus
from pipeline.operations.costs.sizes import DraftSize
from pipeline.operations.costs.work import WIDTH, Training
from pipeline.shards.layout import Spec
from pipeline.shards.plan import Shape, estimate

TEXT_PER_TOKEN = 4.0  # UTF-8 bytes, of English and code
_ROW = 200.0  # JSON around a conversation's text
_PARQUET_PER_TOKEN = 1.7  # ids and mask after zstd
_PER_STEP = 850.0  # lines of metrics and timings


@dataclass(frozen=True)
class Bytes:
    """`exact`: from tensor shapes, so within a few percent; otherwise an estimate from the amount of text."""

    count: float
    exact: bool


def stage_bytes(
    config: Config, shape: Shape, draft: DraftConfig, spec: Spec, corpus: Corpus, work: Training
) -> dict[str, Bytes]:
    """The size of each stage's finished artifact; calibrate, profile and evaluate leave kilobytes per prompt.

    A gathered checkpoint holds weights and both moments in fp32, 12 bytes per trained weight; `keep_checkpoints` of
    them stay, beside the best weights and the published drafter, 4 bytes each. An export layout holds the weights once,
    the head's rows of a draft vocabulary where engines want them, and with `include_target_tensors` embedding and head.
    """
    train, size = config.train, DraftSize.of(draft).total
    kept = 0 if train.published else min(train.keep_checkpoints, -(-work.steps // train.save_every))
    best = 4.0 * size if work.validated_rows else 0.0
    text = corpus.tokens * TEXT_PER_TOKEN + corpus.rows * _ROW
    return {
        "data": Bytes(text, exact=False),
        "answers": Bytes(text, exact=False),
        "tokens": Bytes(corpus.tokens * _PARQUET_PER_TOKEN, exact=False),
        "targets": Bytes(targets_bytes(config, spec, corpus), exact=True),
        "train": Bytes(kept * 12.0 * size + best + 4.0 * size + _PER_STEP * work.steps, exact=True),
        "export": Bytes(len(config.export.layouts) * export_bytes(config, shape, draft), exact=True),
    }


def targets_bytes(config: Config, spec: Spec, corpus: Corpus) -> float:
    """What the cache takes of the disk: all of it, the budget at most where it rolls, nothing beside a live target."""
    whole = cache_bytes(spec, corpus, config.data.shard_rows)
    budget = min(whole, float(config.targets.max_bytes or 0))
    return {"live": 0.0, "rolling": budget, "streamed": budget}.get(config.targets.mode, whole)


def cache_bytes(spec: Spec, corpus: Corpus, shard_rows: int) -> float:
    """The whole cache in shards."""
    shards = max(1, -(-corpus.conversations // shard_rows))
    return float(estimate(spec, corpus.rows, corpus.tokens, corpus.supervised, shards=shards))


def export_bytes(config: Config, shape: Shape, draft: DraftConfig) -> float:
    """One layout: its tensors, and the target's tokenizer where that lies in a local folder (else megabytes more)."""
    width = WIDTH[config.export.dtype]
    rows = draft.draft_vocab_size or 0
    own = DraftSize.of(draft).total + rows * draft.hidden_size
    shared = 2 * shape.vocab_size * shape.hidden_size if config.export.include_target_tensors else 0
    tables = 8 * rows + shape.vocab_size if rows else 0
    return float(width * (own + shared) + tables + _tokenizer_bytes(config))


def _tokenizer_bytes(config: Config) -> int:
    folder = Path(target_folder(config))
    return sum(path.stat().st_size for pattern in ("tokenizer*", "chat_template*") for path in folder.glob(pattern))


def counted(artifact: Artifact) -> float | None:
    """Bytes of everything in a finished artifact's folder, its records of tracking left out; None without one."""
    if not artifact.complete:
        return None
    files = (path for path in artifact.path.rglob("*") if path.is_file())
    return float(sum(path.stat().st_size for path in files if "tracking" not in path.relative_to(artifact.path).parts))
