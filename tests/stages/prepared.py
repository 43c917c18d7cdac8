"""A chain whose data and train artifacts are made by hand, so that the later stages can be tested in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline import chain as chain_table
from pipeline.artifact import Artifact
from pipeline.chain import STAGES, StageContext
from pipeline.config import Config, load
from pipeline.corpus.rows import Row
from pipeline.corpus.template import ChatTemplate
from pipeline.draft.build import build_drafter
from pipeline.draft.derive import derive_config
from pipeline.draft.io import save_drafter
from pipeline.frozen import text_config
from pipeline.identity import target_folder
from pipeline.tiny import make_tiny_target
from pipeline.tracking import NullTracker

QUESTIONS = {
    "apples": [f"Ana has {n} apples and buys {n + 3} more. How many apples does Ana have now?" for n in range(2, 12)],
    "counting": [f"Count from {n} to {n + 5}." for n in range(20, 30)],
}


def prepare(work_dir: Path, *overrides: str, train_steps: int = 0, drafter: Any = None) -> Config:
    """A debug configuration with a tiny target, hand-made splits and a drafter with random weights.

    Called again with the same work directory, it makes only what the overrides changed.
    """
    config = load(
        "configs/debug.yaml",
        [
            f"work_dir={work_dir}",
            f"target.tiny={{layers: 4, hidden_size: 32, vocabulary: 300, train_steps: {train_steps}}}",
            "targets.layers=[0, 1]", "draft.vocabulary=null", "draft.mask_token_id=299", "draft.init=random",
            "draft.markov_rank=8", "evaluate.num_prompts=6", "evaluate.max_new_tokens=12", "evaluate.batch_size=4",
            "evaluate.bootstrap=50", "calibrate.num_prompts=8", "calibrate.max_new_tokens=12", *overrides,
        ],
    )  # fmt: skip
    make_tiny_target(config)
    artifacts = chain_table.resolve(config)
    for name, make in (("data", _data), ("train", lambda made: _train(config, made, drafter)), ("profile", _plain)):
        if not artifacts[name].complete:
            make(artifacts[name])
    return config


def context_of(config: Config, stage: str) -> StageContext:
    artifacts = chain_table.resolve(config)
    artifacts[stage].create()
    inputs = {name: artifacts[name] for name in STAGES[stage].inputs(config)}
    return StageContext(config, artifacts[stage], inputs, NullTracker(), artifacts)


def _data(artifact: Artifact) -> None:
    artifact.create()
    names = []
    for split in ("calibration", "evaluation"):
        name = f"{split}-00000.jsonl"
        with artifact.shard(name) as shard:
            rows = [
                Row.of(source=source, messages=[{"role": "user", "content": f"{text} ({split})"}])
                for source, texts in QUESTIONS.items()
                for text in texts
            ]
            shard.path.write_bytes(b"".join(row.line() for row in rows))
            shard.row["samples"] = len(rows)
        names.append(name)
    artifact.finish(names)


def _train(config: Config, artifact: Artifact, drafter: Any) -> None:
    path = target_folder(config)
    artifact.create()
    if drafter is None:
        described = derive_config(
            text_config(path).to_dict(), config.draft, target_layer_ids=config.targets.layers or ()
        )  # fmt: skip
        drafter = build_drafter(described, seed=0)
        with torch.no_grad():
            drafter.confidence_head.proj.weight.normal_(0.0, 0.3) if drafter.confidence_head is not None else None
    folder = artifact.path / "draft"
    folder.mkdir()
    save_drafter(folder, drafter, {"template": ChatTemplate(path, config.template).info()})
    artifact.finish(files=["draft/draft.safetensors", "draft/draft.json"])


def _plain(artifact: Artifact) -> None:
    from pipeline.artifact import write_json
    from pipeline.decoding.sps import synthetic

    artifact.create()
    write_json(artifact.path / "sps.json", synthetic("sqrt", [1, 2, 4, 8, 16, 32]))
    artifact.finish(files=["sps.json"])
