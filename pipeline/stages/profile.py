"""`profile`: steps per second of the target, here or on a running server, by forward batch in tokens (S28).

    dspark profile -c FILE

Run it on a quiet machine: the scheduler believes what it says. Writes `sps.json`.
"""

from __future__ import annotations

import torch

from pipeline.artifact import write_json
from pipeline.chain import StageContext
from pipeline.decoding.plots import sps_plot
from pipeline.decoding.portions import grid
from pipeline.decoding.served import measure_server
from pipeline.decoding.sps import measure, synthetic
from pipeline.progress import say
from pipeline.target import Target, pick_device


def run(context: StageContext) -> None:
    """Measure (or make up, where a synthetic curve is asked for) the table and publish it."""
    config, artifact = context.config, context.artifact
    settings = config.profile
    sizes = grid(settings.grid, settings.max_batch_tokens)
    if settings.synthetic is not None:
        found = synthetic(settings.synthetic, sizes)
        say(f"profile: {found['source']}, not a measurement; every output that uses it says so", warning=True)
    elif settings.endpoint is not None:
        found = measure_server(config, sizes)
    else:
        target = Target.load(
            context.target_path, dtype=getattr(torch, settings.dtype), device=pick_device(),
            attention=config.target.attention, revision=config.target.revision,
            trust_remote_code=config.target.trust_remote_code, device_map=config.target.device_map,
            tensor_parallel=config.target.tensor_parallel,
        )  # fmt: skip
        found = measure(target, sizes, context_length=settings.context_length, repeats=settings.repeats)
    write_json(artifact.path / "sps.json", found)
    for size, speed in zip(found["sample_batch_tokens"], found["sample_steps_per_sec"], strict=True):
        context.tracker.metrics({"steps_per_second": speed}, step=size)
    plot = sps_plot(found, artifact.path / "plots" / "sps.png")
    for path in (artifact.path / "sps.json", plot):
        context.tracker.file(path, "profile")
    artifact.finish(files=["sps.json", "plots/sps.png"], source=found["source"])
    say(f"profile: {found['source']}; " + ", ".join(
        f"{size} tokens {speed:.3g}/s" for size, speed in _shown(found)))  # fmt: skip


def _shown(found: dict[str, list]) -> list[tuple[int, float]]:
    pairs = list(zip(found["sample_batch_tokens"], found["sample_steps_per_sec"], strict=True))
    return [pair for pair in pairs if pair[0] & (pair[0] - 1) == 0]
