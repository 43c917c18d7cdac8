"""`train`: the drafter learns from the target's hidden states and distributions.

    dspark train -c FILE
    accelerate launch --config_file configs/accelerate/ddp.yaml -m pipeline train -c FILE
    torchrun --nproc_per_node 8 -m pipeline train -c FILE

One optimizer step is one global batch, whatever computes it. Killed, preempted or resized anywhere, the same command
goes on from the last checkpoint, and ends with the same weights. A finished artifact is never trained again.

Sent SIGTERM, torchrun and accelerate pass it on to the ranks, which save and end with 0; the launcher itself exits with
1 all the same, and kills ranks that take longer than TORCH_ELASTIC_SHUTDOWN_TIMEOUT (30 s). SIGUSR1 ends the launcher
and leaves its ranks running. So scripts around them read `stopped.json`, and signal the ranks as `dspark run` does.
"""

from __future__ import annotations

import torch

from pipeline.chain import StageContext
from pipeline.distributed import started
from pipeline.preflight import refuse_mask_token_in_corpus
from pipeline.progress import progress, rank, say
from pipeline.trace import shared
from pipeline.training.adopt import adopt
from pipeline.training.loop import train
from pipeline.training.session import Session
from pipeline.training.sources import open_source


def run(context: StageContext) -> None:
    """Train to the last step, then publish `draft/` and the manifest.

    Raises Stopped after a save when asked to stop, DataError for losses that are not finite or nothing to train on,
    ArtifactError when a checkpoint does not fit, ConfigError for a mask token that the corpus contains (S6).
    """
    if context.config.train.published is not None:
        if rank() == 0:
            adopt(context)
        return
    special_tokens = context.chain["tokens"].manifest().get("special_tokens", {}) if "tokens" in context.chain else {}
    refuse_mask_token_in_corpus(context.config, special_tokens)
    with started(context.config.train) as ranks, shared(context.artifact), open_source(context, ranks) as reader:
        _train(Session.open(context, ranks, reader))


def _train(session: Session) -> None:
    context, ranks = session.context, session.ranks
    for line in session.summary():
        say(line)
    total, start = session.total, session.point.start
    with progress(total, what="train", unit="steps", done=start) as bar:
        run, recorder = session.prepare(bar.advance)
        try:
            torch.manual_seed(context.config.seed * 1000 + ranks.rank)
            session.restore_random()
            train(run)
        finally:
            recorder.close()
    if ranks.rank == 0:
        session.publish(recorder)
