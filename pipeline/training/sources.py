"""Where training rows come from: a finished cache, one that rolls, or the frozen target beside the drafter.

    with open_source(context, ranks) as reader:            # offers index, spec, summary, encoded, batch
        ...

All give the same row for the same number; `targets.mode: live` stores nothing and pays a target forward per row and
epoch, `rolling` pays the same in another thread or process, through a cache of `targets.max_bytes`; `streamed` fills
such a cache from a finished one under a URL, without a target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from pipeline.chain import StageContext
from pipeline.corpus.tokens import read_tokens
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError
from pipeline.frozen import text_config
from pipeline.preflight import default_layers
from pipeline.progress import rank
from pipeline.shards.layout import Spec
from pipeline.shards.live import LiveReader
from pipeline.shards.reader import ShardReader, load_rms
from pipeline.shards.rolling import RollingReader
from pipeline.training.feeding import Feeding, load_target, validation_of

Source = ShardReader | LiveReader | RollingReader


@contextmanager
def open_source(context: StageContext, ranks: Ranks) -> Iterator[Source]:
    """The reader `targets.mode` asks for; a target that runs beside training is loaded onto the rank's device.

    Raises ConfigError for a target that is itself split over the ranks: every rank reads other rows. What one rank
    raises, a damaged shard that only its node sees, is raised on all.
    """
    with ExitStack() as stack:
        yield ranks.together(lambda: _open(context, ranks.device, stack))


def _open(context: StageContext, device: torch.device, stack: ExitStack) -> Source:
    mode = context.config.targets.mode
    if mode == "cached":
        return ShardReader.open(context.inputs["targets"])
    if mode != "streamed" and context.config.target.tensor_parallel:
        raise ConfigError(
            f"targets.mode: {mode} runs the target over one rank's rows; target.tensor_parallel cannot serve it: "
            "use a cache"
        )
    return _live(context, device) if mode == "live" else _rolling(context, device, stack)


def _live(context: StageContext, device: torch.device) -> LiveReader:
    config = context.config
    described = text_config(
        str(context.target_path), revision=config.target.revision, trust_remote_code=config.target.trust_remote_code
    )
    layers = config.targets.layers or default_layers(described.num_hidden_layers)
    target = load_target(context, layers, device)
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
    tokens = context.chain["tokens"]
    return LiveReader(
        tokens, target, spec, read=read_tokens, layers=layers, batch_tokens=config.targets.batch_tokens
    )  # fmt: skip


def _rolling(context: StageContext, device: torch.device, stack: ExitStack) -> RollingReader:
    artifact = context.inputs["targets"]
    manifest = artifact.manifest()
    summary = manifest["targets"]
    spec = Spec.of(summary)
    feeding = Feeding.beside(context, device) if rank() == 0 else Feeding(context)
    stack.callback(feeding.close)
    return RollingReader(
        context.chain["tokens"],
        artifact,
        spec,
        read=read_tokens,
        summary=summary,
        validation=validation_of(context),
        seed=context.config.seed,
        rank=rank(),
        world=int(os.environ.get("WORLD_SIZE", "1")),
        alive=feeding.alive,
        channel_rms_LD=load_rms(artifact.path, spec),
        left_out=manifest.get("left_out"),
    )
