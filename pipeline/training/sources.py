"""Where training rows come from: a finished cache, or the frozen target running beside the drafter.

    reader = open_source(context, device)                  # offers index, spec, summary, encoded, batch

Both give the same rows at the same steps; `targets.mode: live` stores nothing and pays a target forward per row and
epoch.
"""

from __future__ import annotations

import torch

from pipeline.chain import StageContext
from pipeline.corpus.tokens import read_tokens
from pipeline.errors import ConfigError
from pipeline.frozen import text_config
from pipeline.preflight import default_layers
from pipeline.shards.layout import Spec
from pipeline.shards.live import LiveReader
from pipeline.shards.reader import ShardReader
from pipeline.target import Target


def open_source(context: StageContext, device: torch.device) -> ShardReader | LiveReader:
    """The reader `targets.mode` asks for. A live target is loaded onto `device`, in `targets.dtype`.

    Raises ConfigError for a target that is itself split over the ranks: every rank reads other rows.
    """
    config = context.config
    if config.targets.mode == "cached":
        return ShardReader.open(context.inputs["targets"])
    if config.target.tensor_parallel:
        raise ConfigError(
            f"targets.mode: {config.targets.mode} runs the target on every rank over that rank's rows; "
            "target.tensor_parallel cannot serve it: use a cache"
        )
    path = str(context.target_path)
    described = text_config(path, revision=config.target.revision, trust_remote_code=config.target.trust_remote_code)
    layers = config.targets.layers or default_layers(described.num_hidden_layers)
    target = Target.load(
        path,
        layers=layers,
        dtype=getattr(torch, config.targets.dtype),
        device=device,
        attention=config.target.attention,
        trust_remote_code=config.target.trust_remote_code,
        device_map=config.target.device_map,
        revision=config.target.revision,
    )
    target.check()
    spec = Spec(
        taps="bf16",
        logits="last_hidden",
        topk=config.targets.topk,
        positions=config.targets.positions,
        num_taps=len(layers),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=config.targets.dtype,
    )
    return LiveReader(
        context.chain["tokens"],
        target,
        spec,
        read=read_tokens,
        layers=layers,
        batch_tokens=config.targets.batch_tokens,
    )
