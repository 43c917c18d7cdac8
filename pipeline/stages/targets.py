"""`targets`: the frozen target reads every token row once; its hidden states and distributions become shards.

    dspark targets -c FILE

One token shard is one unit of work: taken by any rank or array task, published whole. Killed anywhere, the same command
goes on from the shards that exist. Cost: one target forward per token, and `dspark plan` says how many bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline import stopping
from pipeline.artifact import Artifact
from pipeline.chain import StageContext, finished_cache, share
from pipeline.corpus.tokens import read_tokens
from pipeline.decoding.plots import codec_error_plot
from pipeline.errors import DataError
from pipeline.progress import Bar, progress, rank, say
from pipeline.shards.builder import Builder
from pipeline.shards.calibration import RMS_FILE, codec_errors, shared_channel_rms
from pipeline.shards.layout import CONVENTION, Spec
from pipeline.shards.plan import estimate, refuse_without_space, show_bytes
from pipeline.shards.remote import Remote
from pipeline.shards.streamed import declare
from pipeline.target import Target, default_layers, pick_device, text_config


def run(context: StageContext) -> None:
    """Publish this process's missing target shards; whoever finds all of them present writes the manifest.

    Raises StorageError when the disk cannot hold what is missing, DataError when too many rows are not finite.
    """
    artifact, tokens = context.artifact, context.inputs["tokens"]
    tokens.check_sizes()
    sources = [str(fact["file"]) for fact in tokens.manifest()["shards"]]
    names = [shard_name(source) for source in sources]
    layers, spec = describe(context)
    if context.config.targets.mode in ("rolling", "streamed"):
        if rank() == 0:
            (_declare_rolling if context.config.targets.mode == "rolling" else _declare_streamed)(context, layers, spec)
        return
    together = context.config.target.tensor_parallel
    mine = artifact.missing(names if together else share(names))
    if mine:
        missing = [tokens.row(sources[names.index(name)]) or {} for name in artifact.missing(names)]
        counts = {key: sum(row[key] for row in missing) for key in ("samples", "tokens", "supervised")}
        needed = estimate(spec, counts["samples"], counts["tokens"], counts["supervised"], shards=len(missing))
        refuse_without_space(artifact.path, needed)
        _build(context, layers, spec, [(names.index(name), sources[names.index(name)]) for name in mine])
    if not artifact.missing(names):
        _finish(context, layers, spec, names)


def shard_name(source: str) -> str:
    """train-00003.parquet -> train-00003.tar"""
    return source.removesuffix(".parquet") + ".tar"


def describe(context: StageContext) -> tuple[tuple[int, ...], Spec]:
    """Tapped layers and storage format, from the configuration and the target's config.json alone."""
    config = context.config
    target = text_config(
        str(context.target_path),
        revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
    )
    layers = config.targets.layers or default_layers(target.num_hidden_layers)
    return layers, Spec(
        taps=config.targets.taps,
        logits=config.targets.logits,
        topk=config.targets.topk,
        positions=config.targets.positions,
        num_taps=len(layers),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        channel_rms=config.targets.channel_rms,
        dtype=config.targets.dtype,
    )


def _declare_rolling(context: StageContext, layers: Sequence[int], spec: Spec) -> None:
    """A rolling cache has no shards of its own: they come and go beside training (or from `dspark feed`)."""
    artifact, tokens = context.artifact, context.inputs["tokens"]
    if spec.channel_rms:
        _rms(context, _load(context, layers), spec)
    files = [RMS_FILE] if spec.channel_rms else []
    artifact.finish(
        [], files, mode="rolling", targets=_summary(layers, spec), template=tokens.manifest().get("template")
    )
    say(f"targets: rolling, at most {show_bytes(context.config.targets.max_bytes or 0)} beside training")


def _declare_streamed(context: StageContext, layers: Sequence[int], spec: Spec) -> None:
    """A finished cache elsewhere: checked and pinned here, its shards come and go beside training."""
    artifact, tokens, settings = context.artifact, context.inputs["tokens"], context.config.targets
    manifest = tokens.manifest()
    made = declare(
        artifact,
        Remote(str(settings.url)),
        finished_cache(context.config),
        rows={fact["file"]: fact["samples"] for fact in manifest["shards"]},
        tokens=sum(int((tokens.row(fact["file"]) or {})["tokens"]) for fact in manifest["shards"]),
        summary=_summary(layers, spec),
        template=manifest.get("template"),
    )
    samples = sum(fact["samples"] for fact in made["remote"])
    say(f"targets: {samples} rows at {settings.url}, at most {show_bytes(settings.max_bytes or 0)} here at a time")


def _build(context: StageContext, layers: Sequence[int], spec: Spec, work: Sequence[tuple[int, str]]) -> None:
    config, artifact, folder = context.config, context.artifact, context.inputs["tokens"].path
    target = _load(context, layers)
    rms = _rms(context, target, spec)
    if work[0][0] == 0:
        _show_codec(context, layers, target, spec, rms)
    tokens = {source: int((context.inputs["tokens"].row(source) or {})["tokens"]) for _, source in work}
    write = not config.target.tensor_parallel or rank() == 0
    with (
        progress(sum(tokens.values()), what="targets", unit="tokens") as bar,
        Builder(target, spec, batch_tokens=config.targets.batch_tokens, channel_rms_LD=rms, write=write) as builder,
    ):
        started, bad, handed = time.monotonic(), 0, list[str]()
        for number, source in work:
            _check_stop(config.target.tensor_parallel)
            published = [name for name in handed if artifact.row(name) is not None]
            bad += _left_out(artifact, published)
            _check_share(context, bad)
            handed = [name for name in handed if name not in published] + [shard_name(source)]
            rows = list(read_tokens(folder / source))
            builder.build(artifact, shard_name(source), shard=number, rows=rows, advance=_shown(bar, started))


def _load(context: StageContext, layers: Sequence[int]) -> Target:
    config = context.config
    return Target.of(
        config.target, str(context.target_path), layers=layers, dtype=config.targets.dtype, device=pick_device()
    )


def _rms(context: StageContext, target: Target, spec: Spec) -> Tensor | None:
    """Per-channel RMS, from the first token shard whoever computes it."""
    if not spec.channel_rms:
        return None
    tokens = context.inputs["tokens"]
    first = tokens.path / tokens.manifest()["shards"][0]["file"]
    return shared_channel_rms(context.artifact.path, target, read_tokens(first))


def _check_stop(together: bool) -> None:
    """Stop between shards. Ranks that share each forward agree first: one leaving alone would hang the others."""
    if together:
        asked = torch.tensor([int(stopping.requested() is not None)], device=pick_device())
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        if asked.item():
            stopping.request("another rank was asked to stop")
    stopping.check()


def _show_codec(context: StageContext, layers: Sequence[int], target: Target, spec: Spec, rms: Tensor | None) -> None:
    """What the tap codec loses on the first rows, as numbers and a picture on this stage's run."""
    tokens = context.inputs["tokens"]
    errors = codec_errors(target, read_tokens(tokens.path / tokens.manifest()["shards"][0]["file"]), spec, rms)
    if errors and rank() == 0:
        by_layer = dict(zip(layers, errors, strict=True))
        plot = codec_error_plot(by_layer, spec.taps, context.artifact.path / "plots" / "codec.png")
        context.tracker.metrics({f"codec_error/layer_{layer}": error for layer, error in by_layer.items()})
        context.tracker.file(plot, "targets")


def _shown(bar: Bar, started: float) -> Callable[[int], None]:
    def advance(tokens: int) -> None:
        bar.advance(tokens, tokens_per_second=(bar.done + tokens) / (time.monotonic() - started))

    return advance


def _left_out(artifact: Artifact, names: Sequence[str]) -> int:
    """Rows that are not finite in these published shards."""
    return sum((artifact.row(name) or {}).get("skipped", {}).get("not_finite", 0) for name in names)


def _check_share(context: StageContext, bad: int) -> None:
    """Raise DataError once the rows left out exceed the allowed share of the whole corpus."""
    limit = context.config.targets.max_skip_fraction
    total = sum(int(fact["samples"]) for fact in context.inputs["tokens"].manifest()["shards"])
    if bad > limit * total:
        raise DataError(
            f"targets: {bad} of {total} rows have states or logits that are not finite, more than "
            f"targets.max_skip_fraction = {limit}; their ids are in {context.artifact.path / 'rows'}"
        )


def _finish(context: StageContext, layers: Sequence[int], spec: Spec, names: Sequence[str]) -> None:
    artifact = context.artifact
    rows = [artifact.row(name) or {} for name in names]
    _check_share(context, _left_out(artifact, names))
    samples = sum(row["samples"] for row in rows)
    summary = {
        **_summary(layers, spec),
        "samples": samples,
        "tokens": sum(sum(row["index"]["tokens"]) for row in rows),
        "supervised": sum(sum(row["index"]["supervised"]) for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
    }
    template = context.inputs["tokens"].manifest().get("template")
    artifact.finish(names, [RMS_FILE] if spec.channel_rms else [], targets=summary, template=template)
    per_token = summary["bytes"] / max(summary["tokens"], 1)
    say(f"targets: {samples} rows, {summary['tokens']} tokens, {per_token:.0f} bytes per token on disk")


def _summary(layers: Sequence[int], spec: Spec) -> dict[str, Any]:
    return {**spec.summary(), "layers": list(layers), "layer_convention": CONVENTION, "post_norm": True}
