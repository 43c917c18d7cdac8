"""`dspark plan`: what a configuration costs before anything is spent, and which parts exist already.

Prices the whole chain from the configuration, the target's config.json and corpus statistics (counted in the tokens
artifact when it exists, else the data artifact's rows or the figures given, times an assumed length). No weights are
read. `--calibrate` measures this machine for half a minute and predicts CPU-seconds and memory instead of device-hours.
The formulas stand in `pipeline.operations.costs`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifact import Artifact, read_json
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.draft.derive import derive_config
from pipeline.errors import ConfigError
from pipeline.identity import target_json
from pipeline.operations.costs import compare
from pipeline.operations.costs import corpus as corpora
from pipeline.operations.costs.chain import Cost, Setting, price
from pipeline.operations.costs.disk import cache_bytes, targets_bytes
from pipeline.operations.costs.hardware import UTILISATION, Device
from pipeline.operations.costs.predict import predict
from pipeline.operations.costs.rates import Rates
from pipeline.operations.costs.work import ASSUMED_TAU, TAU_RANGE
from pipeline.operations.status import describe
from pipeline.preflight import default_layers
from pipeline.preflight.facts import tiny_shape
from pipeline.progress import say
from pipeline.shards.layout import Spec
from pipeline.shards.plan import Shape, show_bytes

TAPS = ("bf16", "fp8", "int8", "int4", "int3", "int2")
LOGITS = ("last_hidden", "topk")


def plan(config: Config, arguments: argparse.Namespace) -> None:
    chain, unknown = _chain(config)
    setting = setting_of(config, chain, arguments)
    device = Device(
        (arguments.device_tflops or 400.0) * 1e12,
        (arguments.device_bandwidth or 2000.0) * 1e9,
    )
    costs = price(setting, device)
    facts = {**_facts(setting, device, costs), "exists": [describe(artifact) for artifact in chain.values()]}
    known = {} if arguments.rows else chain  # what is finished was not made from the rows that were given
    compared = compare.disk(costs, known)
    if arguments.calibrate:
        from pipeline.operations.costs.measure import measure  # imports all that stages compute with

        rates = measure(setting)
        predicted = predict(setting, rates)
        compared += compare.usage_of(predicted, known)
        facts["calibration"] = {
            "rates": asdict(rates), "stages": [asdict(one) for one in predicted], "by_tau": by_tau(setting, rates),
        }  # fmt: skip
    facts["compared"] = [{**asdict(one), "error": one.error} for one in compared]
    if arguments.json:
        say(json.dumps(facts, indent=1), result=True)
        return
    for line in _told(setting, device, costs, facts, unknown):
        say(line)


def setting_of(config: Config, chain: dict[str, Artifact], arguments: argparse.Namespace) -> Setting:
    """Shapes and corpus of a configuration. Raises ConfigError for what cannot be priced."""
    described = described_target(config)
    shape = Shape.of(described)
    layers = config.targets.layers or default_layers(shape.layers)
    draft = derive_config(described, config.draft, target_layer_ids=layers)
    found = corpora.find(
        config, chain,
        rows=arguments.rows, tokens_per_row=arguments.tokens_per_row, share=arguments.supervised_share,
    )  # fmt: skip
    return Setting(config, shape, draft, spec_of(config, shape), found, *tau_of(chain, arguments.tau))


def described_target(config: Config) -> dict[str, Any]:
    """The target's config.json; of a tiny target what it will say (see `pipeline.tiny`)."""
    tiny = config.target.tiny
    if tiny is not None:
        return {**tiny_shape(tiny), "rope_theta": 1e4}
    described = target_json(config, "config.json")
    if not described:
        raise ConfigError(f"target.model: {config.target.model} has no config.json")
    return described


def spec_of(config: Config, shape: Shape, **codec: Any) -> Spec:
    """The cache's format; `codec` replaces fields of it."""
    layers = config.targets.layers or default_layers(shape.layers)
    facts: dict[str, Any] = {
        "taps": config.targets.taps, "logits": config.targets.logits, "topk": config.targets.topk,
        "positions": config.targets.positions, "num_taps": len(layers), "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size, "channel_rms": config.targets.channel_rms, "dtype": config.targets.dtype,
    }  # fmt: skip
    return Spec(**{**facts, **codec})


def _chain(config: Config) -> tuple[dict[str, Artifact], list[str]]:
    """The resolved chain; without the target's weights nothing can be said to exist, and why is told instead."""
    try:
        return resolve(config), []
    except ConfigError as error:
        return {}, list(error.problems)


def tau_of(chain: dict[str, Artifact], given: float | None) -> tuple[float, str]:
    """The accepted length to price with, and where it is from: given; what a finished evaluation of this very chain
    found, over its prompt sets and temperatures, or else calibrate's rounds; assumed.
    """
    if given:
        return given, "given"
    evaluate, calibrate = chain.get("evaluate"), chain.get("calibrate")
    found: list[float] = []
    if evaluate is not None and evaluate.complete:
        records = read_json(evaluate.path / "report.json")["records"]
        pooled = [record for record in records if record["domain"] is None and record["drafter"] != "prompt-lookup"]
        found = [record["tau"] for record in pooled if record["tau"]]
    elif calibrate is not None and calibrate.complete:
        for path in calibrate.path.glob("records-T*.npz"):
            with np.load(path) as stored:
                found.append(float((stored["accepted"] + ~stored["stopped"]).mean()))
    return (sum(found) / len(found), "measured") if found else (ASSUMED_TAU, "assumed")


def by_tau(setting: Setting, rates: Rates) -> dict[str, dict[float, float]]:
    """CPU-seconds of the stages that decode with a drafter over the range tau is usually in; {} once it is known."""
    if setting.tau_source != "assumed":
        return {}
    drafted = [stage for stage, runs in setting.decodings.items() if any(run.drafted for run in runs)]
    found = {
        tau: {one.stage: one.cpu_seconds for one in predict(replace(setting, tau=tau), rates)} for tau in TAU_RANGE
    }
    return {stage: {tau: seconds[stage] for tau, seconds in found.items()} for stage in drafted}


# ------------------------------------------------------------------------------------------------ telling


def _facts(setting: Setting, device: Device, costs: list[Cost]) -> dict[str, Any]:
    config, corpus = setting.config, setting.corpus
    whole = cache_bytes(setting.spec, corpus, config.data.shard_rows)
    counts = {key: getattr(corpus, key) for key in ("rows", "tokens", "supervised", "source", "longest")}
    flops = setting.target_flops()
    return {
        "corpus": counts,
        "hardware": vars(device),
        "tau": setting.tau,
        "tau_source": setting.tau_source,
        "stages": [cost.plain() for cost in costs],
        "cache_bytes_per_token": whole / corpus.tokens,
        "cache_bytes": whole,
        "mode": config.targets.mode,
        "disk_bytes": targets_bytes(config, setting.spec, corpus),
        "target_passes": setting.target_passes,
        "target_flops": flops,
        "device_hours": device.seconds(flops) / 3600,
        "free_bytes": shutil.disk_usage(_existing(config.work_dir)).free,
        "codecs": [_codec_row(setting, taps, logits) for taps in TAPS for logits in LOGITS],
    }


def _codec_row(setting: Setting, taps: str, logits: str) -> dict[str, Any]:
    spec = spec_of(setting.config, setting.shape, taps=taps, logits=logits, channel_rms=False)
    total = cache_bytes(spec, setting.corpus, setting.config.data.shard_rows)
    return {"taps": taps, "logits": logits, "bytes_per_token": total / setting.corpus.tokens, "bytes": total}


def _told(
    setting: Setting, device: Device, costs: list[Cost], facts: dict[str, Any], unknown: list[str]
) -> Iterator[str]:
    corpus, spec = setting.corpus, setting.spec
    yield (
        f"corpus: {corpus.rows:,} rows, {corpus.tokens:,} tokens, {corpus.supervised:,} supervised ({corpus.source})"
    )
    yield f"drafter: {setting.draft.kind}, tau {setting.tau:.3g} ({setting.tau_source})"
    yield ""
    yield from _stage_table(costs)
    yield (
        f"  device: {device.flops / 1e12:g} TFLOP/s and {device.bandwidth / 1e9:g} GB/s, {UTILISATION:.0%} of either "
        "reached; devices by the launch section"
    )
    for cost in costs:
        if cost.memory:
            parts = ", ".join(f"{what} {show_bytes(size)}" for what, size in cost.memory.items() if size)
            yield f"  {cost.stage}, memory per rank: {parts}"
    yield ""
    free, disk_bytes = facts["free_bytes"], sum(cost.disk_bytes or 0 for cost in costs)
    whole = show_bytes(facts["cache_bytes"])
    yield (
        f"disk: {show_bytes(disk_bytes)} in all, {show_bytes(free)} free"
        + ("" if free > disk_bytes else ": DOES NOT FIT")
    )
    yield (
        f"target cache ({spec.taps} taps x {spec.num_taps}, {spec.logits} logits, {spec.positions} positions, mode "
        f"{facts['mode']}): {facts['cache_bytes_per_token']:,.0f} bytes per token, {whole} in all; the target "
        f"reads the corpus {facts['target_passes']} x"
    )
    yield "  bytes per token and in all, by codec (int3 and int2 are lossy: measure before use)"
    for row in facts["codecs"]:
        yield f"  {row['taps']:5s} {row['logits']:12s} {row['bytes_per_token']:10,.0f} {show_bytes(row['bytes']):>10s}"
    if "calibration" in facts:
        yield ""
        yield from _calibrated(facts["calibration"])
    if facts["compared"]:
        yield ""
        yield "held against what is finished"
        for row in facts["compared"]:
            yield (
                f"  {row['stage']:10s} {row['what']:17s} {_shown(row['what'], row['predicted']):>10s} planned, "
                f"{_shown(row['what'], row['actual']):>10s} found ({row['error']:+.1%})"
            )
    yield ""
    yield "what exists"
    for item in facts["exists"]:
        yield f"  {item['stage']:10s} {item['state']:9s} {item['note']}"
    if unknown:
        yield f"  unknown: {unknown[0]}" + (f" (and {len(unknown) - 1} more reasons)" if len(unknown) > 1 else "")


def _stage_table(costs: list[Cost]) -> Iterator[str]:
    yield (
        f"  {'stage':10s} {'disk':>10s} {'FLOPs':>9s} {'device-hours':>12s} {'devices':>7s} {'wall hours':>10s} "
        f"{'memory/rank':>11s}"
    )
    for cost in costs:
        seconds = cost.device_seconds, cost.wall_seconds
        hours = ["-" if value is None else f"{value / 3600:,.3g}" for value in seconds]
        memory = show_bytes(cost.memory_bytes) if cost.memory else "-"
        size = "-" if cost.disk_bytes is None else ("" if cost.exact else "~") + show_bytes(cost.disk_bytes)
        yield (
            f"  {cost.stage:10s} {size:>10s} {f'{cost.flops:.3g}' if cost.flops else '-':>9s} {hours[0]:>12s} "
            f"{cost.devices:7d} {hours[1]:>10s} {memory:>11s}  {cost.note}"
        ).rstrip()
    hours_in_all = sum(cost.device_seconds or 0 for cost in costs) / 3600
    wall = sum(cost.wall_seconds or 0 for cost in costs) / 3600
    flops, stored = sum(cost.flops for cost in costs), sum(cost.disk_bytes or 0 for cost in costs)
    yield f"  {'in all':10s} {show_bytes(stored):>10s} {flops:9.3g} {hours_in_all:12,.3g} {'':7s} {wall:10,.3g}"


def _calibrated(found: dict[str, Any]) -> Iterator[str]:
    rates = found["rates"]
    yield (
        f"this machine, measured in {rates['seconds']:.0f} s with {rates['threads']} thread(s): CPU-seconds of all "
        "threads, anonymous memory of one process (mapped files left out)"
    )
    yield f"  {'stage':10s} {'CPU-seconds':>11s} {'peak memory':>11s}"
    for row in found["stages"]:
        peak = "-" if row["peak_memory_bytes"] is None else show_bytes(row["peak_memory_bytes"])
        yield f"  {row['stage']:10s} {row['cpu_seconds']:11,.0f} {peak:>11s}"
    yield f"  {'in all':10s} {sum(row['cpu_seconds'] for row in found['stages']):11,.0f}"
    yield f"  and {rates['start_cpu_seconds']:.0f} CPU-seconds for every process that is started"
    for stage, at_tau in found["by_tau"].items():
        yield f"  {stage}: " + ", ".join(f"{seconds:,.0f} s at tau {tau:g}" for tau, seconds in at_tau.items())


def _shown(what: str, value: float) -> str:
    return f"{value:,.0f} s" if what == "cpu_seconds" else show_bytes(value)


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.absolute().parent)
