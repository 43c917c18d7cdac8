"""A chain whose tokens artifact is made by hand, so that the targets stage can be tested in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from pipeline import chain as chain_table
from pipeline.artifact import Artifact
from pipeline.chain import STAGES, StageContext
from pipeline.config import Config, load
from pipeline.corpus.tokens import SCHEMA
from pipeline.tiny import make_tiny_target
from pipeline.tracking import NullTracker

SIZES = (8, 8, 8)


def prepare(work_dir: Path, *overrides: str, sizes: tuple[int, ...] = SIZES) -> Config:
    """A tiny random target of 4 layers, and token shards of 3 to 60 tokens a row."""
    settings = [
        f"work_dir={work_dir}",
        "target.tiny={layers: 4, hidden_size: 64, vocabulary: 320, train_steps: 0}",
        "targets={layers: [0, 2], taps: int8, logits: topk, topk: 16, dtype: float32, batch_tokens: 128}",
        "draft.mask_token_id=319",
        "draft.vocabulary=null",
    ]
    config = load("configs/debug.yaml", [*settings, *overrides])
    make_tiny_target(config)
    tokens = chain_table.resolve(config)["tokens"]
    if not tokens.complete:
        _tokens(tokens, sizes)
    return config


def _tokens(artifact: Artifact, sizes: tuple[int, ...]) -> None:
    artifact.create()
    random = np.random.default_rng(0)
    names = [f"train-{number:05d}.parquet" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        lengths = random.integers(3, 61, size)
        ids = [random.integers(3, 300, length).tolist() for length in lengths]
        masks = [(np.arange(length) >= max(1, length // 3)).astype(int).tolist() for length in lengths]
        columns = [[f"{name[6:11]}{n:011d}" for n in range(size)], ["toy"] * size, [0] * size, ids, masks]
        with artifact.shard(name) as shard:
            parquet.write_table(pa.table(columns, schema=SCHEMA), shard.path)
            shard.row.update(
                samples=size, tokens=int(lengths.sum()), supervised=sum(map(sum, masks)), conversations=size
            )
    artifact.finish(names, template={"hash": "toy"}, stop_ids=[2], vocabulary=320)


def context_of(config: Config) -> StageContext:
    artifacts = chain_table.resolve(config)
    artifacts["targets"].create()
    inputs = {name: artifacts[name] for name in STAGES["targets"].inputs(config)}
    return StageContext(config, artifacts["targets"], inputs, NullTracker(), artifacts)
