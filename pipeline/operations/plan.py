"""`dspark plan`: what a configuration costs before anything is spent, and which parts exist already.

Reads the configuration, the target's config.json and corpus statistics: the tokens artifact's when it exists, the data
artifact's row count, or the figures given on the command line. No weights are read.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.identity import target_json
from pipeline.operations.status import describe
from pipeline.preflight import default_layers
from pipeline.progress import say
from pipeline.shards.layout import Spec
from pipeline.shards.plan import Shape, estimate, hours, show_bytes

TAPS = ("bf16", "fp8", "int8", "int4", "int3", "int2")
LOGITS = ("last_hidden", "topk")
DEFAULT_TOKENS_PER_ROW, DEFAULT_SUPERVISED = 885, 0.65  # Open-PerfectBlend: 1.24 G tokens in 1.4 M rows


@dataclass(frozen=True)
class Corpus:
    """Rows, tokens and supervised tokens, and where the figures come from."""

    rows: int
    tokens: int
    supervised: int
    source: str


def plan(config: Config, arguments: argparse.Namespace) -> None:
    shape = _shape(config)
    chain, unknown = _chain(config)
    corpus = _corpus(chain, arguments)
    spec = _spec(config, shape)
    tflops = _positive(arguments.device_tflops or "400", "--device-tflops")
    bytes_total = _bytes(spec, corpus)
    head = corpus.supervised if config.targets.logits == "topk" else 0
    passes = _passes(config, corpus)
    flops = passes * shape.forward_flops(tokens=corpus.tokens, samples=corpus.rows, head_positions=head)
    on_disk = {"live": 0, "rolling": min(bytes_total, config.targets.max_bytes or 0)}.get(
        config.targets.mode, bytes_total
    )
    free = shutil.disk_usage(_existing(config.work_dir)).free
    facts: dict[str, Any] = {
        "corpus": vars(corpus),
        "cache_bytes_per_token": bytes_total / corpus.tokens,
        "cache_bytes": bytes_total,
        "mode": config.targets.mode,
        "disk_bytes": on_disk,
        "target_passes": passes,
        "target_flops": flops,
        "device_hours": hours(flops, device_flops=tflops * 1e12),
        "free_bytes": free,
        "codecs": [_codec_row(config, shape, corpus, taps, logits) for taps in TAPS for logits in LOGITS],
        "exists": [describe(artifact) for artifact in chain.values()],
    }
    if arguments.json:
        say(json.dumps(facts, indent=1), result=True)
        return
    say(f"corpus: {corpus.rows:,} rows, {corpus.tokens:,} tokens, {corpus.supervised:,} supervised ({corpus.source})")
    say(f"target cache ({spec.taps} taps x {spec.num_taps}, {spec.logits} logits, {spec.positions} positions): "
        f"{facts['cache_bytes_per_token']:,.0f} bytes per token, {show_bytes(bytes_total)} in all; "
        f"mode {config.targets.mode}: {show_bytes(on_disk)} on disk, "
        f"{show_bytes(free)} free" + ("" if free > on_disk else ": DOES NOT FIT"))  # fmt: skip
    say(f"target forward ({passes} x the corpus): {flops:.3g} FLOPs, {facts['device_hours']:.2f} device-hours at 40 % "
        f"of {tflops:g} TFLOP/s")  # fmt: skip
    say("\nbytes per token and in all, by codec (int3 and int2 are lossy: measure before use)")
    for row in facts["codecs"]:
        say(f"  {row['taps']:5s} {row['logits']:12s} {row['bytes_per_token']:10,.0f} {show_bytes(row['bytes']):>10s}")
    say("\nwhat exists")
    for item in facts["exists"]:
        say(f"  {item['stage']:10s} {item['state']:9s} {item['note']}")
    if unknown:
        say(f"  unknown: {unknown}")


def _passes(config: Config, corpus: Corpus) -> int:
    """How often the target reads the corpus: once into a finished cache, else once per epoch of training."""
    if config.targets.mode == "cached":
        return 1
    steps = config.train.steps
    return config.train.epochs if steps is None else max(1, -(-steps * config.train.global_batch_size // corpus.rows))


def _shape(config: Config) -> Shape:
    tiny = config.target.tiny
    if tiny is not None:
        return Shape(
            layers=tiny.layers, hidden_size=tiny.hidden_size, vocab_size=tiny.vocabulary, heads=4, kv_heads=2,
            head_dim=max(tiny.hidden_size // 4, 2), intermediate_size=3 * tiny.hidden_size,
        )  # fmt: skip
    described = target_json(config, "config.json")
    if not described:
        raise ConfigError(f"target.model: {config.target.model} has no config.json")
    return Shape.of(described)


def _chain(config: Config) -> tuple[dict[str, Artifact], str]:
    """The resolved chain; without the target's weights nothing can be said to exist, and why is told instead."""
    try:
        return resolve(config), ""
    except ConfigError as error:
        return {}, "; ".join(error.problems)


def _corpus(chain: dict[str, Artifact], arguments: argparse.Namespace) -> Corpus:
    if "tokens" in chain and chain["tokens"].complete and not arguments.rows:
        facts = chain["tokens"].manifest()
        return Corpus(facts["samples"], facts["tokens"], facts["supervised"], "counted in the tokens artifact")
    rows, source = 0, "given"
    if arguments.rows:
        rows = int(_positive(arguments.rows, "--rows"))
    elif "data" in chain and chain["data"].complete:
        rows = int(chain["data"].manifest()["rows"]["train"])
        source = "rows counted in the data artifact, length assumed"
    else:
        raise ConfigError("plan: no corpus statistics yet: run the data stage, or give --rows (and --tokens-per-row)")
    each = _positive(arguments.tokens_per_row or str(DEFAULT_TOKENS_PER_ROW), "--tokens-per-row")
    share = _positive(arguments.supervised_share or str(DEFAULT_SUPERVISED), "--supervised-share")
    return Corpus(rows, int(rows * each), int(rows * each * share), source)


def _positive(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"{name}: a positive number is expected, found {text!r}")
    return value


def _spec(config: Config, shape: Shape, **codec: Any) -> Spec:
    layers = config.targets.layers or default_layers(shape.layers)
    facts: dict[str, Any] = {
        "taps": config.targets.taps, "logits": config.targets.logits, "topk": config.targets.topk,
        "positions": config.targets.positions, "num_taps": len(layers), "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size, "channel_rms": config.targets.channel_rms, "dtype": config.targets.dtype,
    }  # fmt: skip
    return Spec(**{**facts, **codec})


def _bytes(spec: Spec, corpus: Corpus) -> int:
    return estimate(spec, corpus.rows, corpus.tokens, corpus.supervised)


def _codec_row(config: Config, shape: Shape, corpus: Corpus, taps: str, logits: str) -> dict[str, Any]:
    total = _bytes(_spec(config, shape, taps=taps, logits=logits, channel_rms=False), corpus)
    return {"taps": taps, "logits": logits, "bytes_per_token": total / corpus.tokens, "bytes": total}


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.absolute().parent)
