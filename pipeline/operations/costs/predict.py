"""CPU-seconds and peak memory of every stage on a measured machine, in one process on its CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.chain import active
from pipeline.operations.costs import memory, work
from pipeline.operations.costs.chain import Setting
from pipeline.operations.costs.rates import Rates, round_name
from pipeline.operations.costs.sizes import DraftSize

_READ_AGAIN = 8  # answers of an evaluation unit at most (pipeline.decoding.units.TEACHER_FORCED)
_SHOWN_TOKENS = 1024  # forwarded once more for the codec's errors (pipeline.shards.calibration)
_FOLLOWED = 1 / 3  # a forward's share of a training step


@dataclass(frozen=True)
class Predicted:
    """`peak_memory_bytes` is anonymous memory, mapped files left out; None where nothing measured bears on it."""

    stage: str
    cpu_seconds: float
    peak_memory_bytes: float | None


def predict(setting: Setting, rates: Rates) -> list[Predicted]:
    """Per active stage. Starting a process (`rates.start_cpu_seconds`) is paid once per process and not in here.

    The first stage that runs a model finds the process as it starts, later ones what work before them left behind.
    """
    found: list[Predicted] = []
    for stage in active(setting.config):
        first = all(earlier.peak_memory_bytes is None for earlier in found)
        now = replace(rates, base_bytes=rates.start_bytes) if first else rates
        found.append(_STAGES[stage](setting, now, stage))
    return found


def _text(setting: Setting, rates: Rates, stage: str) -> Predicted:
    """Stages over text: rendering a chat is what is measured, and reading or writing one costs about as much. They
    hold a shard's text, little beside what the process has loaded by then.
    """
    return Predicted(stage, rates.render_per_row * setting.corpus.conversations, None)


def _targets(setting: Setting, rates: Rates, stage: str) -> Predicted:
    """Loading, then every token at the measured rate (forward, codecs, writing)."""
    config, spec = setting.config, setting.spec
    loading = rates.loading[config.targets.dtype]
    parts = memory.targets_memory(config, setting.shape, spec)
    parts["logits"] *= memory.logit_rows(spec, on_cpu=True) / memory.logit_rows(spec, on_cpu=False)
    working = sum(size for what, size in parts.items() if what != "target")
    seconds = loading.cpu_seconds + (rates.targets_per_token or 0.0) * (setting.corpus.tokens + _SHOWN_TOKENS)
    return Predicted(stage, seconds, rates.base_bytes + max(loading.peak_bytes, loading.kept_bytes + working))


def _train(setting: Setting, rates: Rates, stage: str) -> Predicted:
    """Steps at the measured rate; validation is a forward of a step's rows.

    Memory: what the loop was seen to take (or, where that is less, what a single process must hold), the target's
    embedding, and checkpoints' copies of weights and moments.
    """
    config, steps = setting.config, setting.training
    seconds = (rates.train_per_step or 0.0) * (steps.steps + steps.validated_rows / steps.rows * _FOLLOWED)
    parts = memory.training_memory(config, setting.shape, setting.draft, setting.spec, steps, engine="single", ranks=1)
    parts["read ahead"] = parts["micro-batches"] * config.train.workers
    embedding = parts.pop("frozen embedding and head")
    parts = {"loop": max(sum(parts.values()), rates.train_bytes), "frozen embedding and head": embedding}
    snapshots = 2 if steps.steps > config.train.save_every else 1  # the last one is held while the next is taken
    parts["checkpoints"] = snapshots * 12.0 * DraftSize.of(setting.draft).total
    return Predicted(stage, seconds, rates.base_bytes + sum(parts.values()))


def _decoding(setting: Setting, rates: Rates, stage: str) -> Predicted:
    """Loading, prefills, rounds; evaluate reads a few answers of every unit once more (S23)."""
    runs = setting.decodings[stage]
    if not runs:
        return Predicted(stage, 0.0, None)
    seconds, largest = rates.loading[runs[0].dtype].cpu_seconds, 0.0
    for run in runs:
        loading, prefill = rates.loading[run.dtype], rates.prefill_per_token[run.dtype]
        seconds += prefill * run.prefill_tokens
        rounds = rates.rounds[round_name(stage, run)]
        seconds += rounds.seconds(run.rounds, run.row_rounds)
        if stage == "evaluate" and run.drafted:
            seconds += rates.read_again[run.dtype] * min(_READ_AGAIN * run.units, run.prompts)
        drafter = memory.decoding_memory(setting.config, setting.shape, setting.draft, run).get("drafter", 0.0)
        largest = max(largest, loading.peak_bytes, loading.kept_bytes + drafter + rounds.memory_bytes)
    return Predicted(stage, seconds, rates.base_bytes + largest)


def _profile(setting: Setting, rates: Rates, stage: str) -> Predicted:
    """Its forwards are plain rounds of the same dtype, by tokens."""
    config, amount = setting.config, work.ProfileWork.of(setting.config)
    dtype = config.profile.dtype
    loading = rates.loading[dtype]
    if not amount.forwards:
        return Predicted(stage, 0.0, None)
    seconds = loading.cpu_seconds + amount.filled_tokens * rates.prefill_per_token[dtype]
    seconds += _plain_round(setting, rates, dtype)(amount.forwards, amount.tokens)
    parts = memory.decoding_memory(config, setting.shape, setting.draft, work.profiled(config))
    working = sum(size for what, size in parts.items() if what != "target")
    largest = max(loading.peak_bytes, loading.kept_bytes + working)
    return Predicted(stage, seconds, rates.base_bytes + largest)


def _plain_round(setting: Setting, rates: Rates, dtype: str) -> Callable[[float, float], float]:
    """Seconds of forwards with so many tokens in all: from rounds of that dtype, else from the prefill rate."""
    for stage, runs in setting.decodings.items():
        for run in runs:
            if run.dtype == dtype and not run.drafted:
                return rates.rounds[round_name(stage, run)].seconds
    return lambda forwards, tokens: tokens * rates.prefill_per_token[dtype]


_STAGES: dict[str, Callable[[Setting, Rates, str], Predicted]] = {
    "data": _text,
    "answers": _decoding,
    "tokens": _text,
    "targets": _targets,
    "train": _train,
    "calibrate": _decoding,
    "profile": _profile,
    "evaluate": _decoding,
    "export": _text,
}
