"""About half a minute of small real pieces on this machine's CPU: what every stage's time is made of.

    rates = measure(setting)           # the target is loaded, forwards and train steps of the configured shapes are run

The pieces are the stages' own code on the real target: rounds of the engine with rows of unlike lengths, forwards that
are encoded and written as a shard, optimizer steps fed from that shard. Lengths are spread as the corpus' are, because
oneDNN compiles a product for every new shape and a stage meets new ones all the time. All times are CPU-seconds of all
threads, as many as a stage would have here (OMP_NUM_THREADS): on a busy machine waiting at barriers is part of them.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipeline import usage
from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.corpus.template import ChatTemplate
from pipeline.corpus.tokens import TokenRecord
from pipeline.distributed import started
from pipeline.draft.build import build_drafter
from pipeline.errors import ConfigError
from pipeline.frozen import Frozen
from pipeline.identity import target_folder
from pipeline.operations.costs import decoding
from pipeline.operations.costs.chain import Setting
from pipeline.operations.costs.rates import Loading, Rates
from pipeline.progress import say
from pipeline.shards.builder import Builder
from pipeline.shards.layout import CONVENTION
from pipeline.shards.reader import ShardReader
from pipeline.target import Target
from pipeline.training import setup
from pipeline.training.batches import Schedule
from pipeline.training.loader import Reader
from pipeline.training.loop import Run, train
from pipeline.training.objective import Objective
from pipeline.training.optimizer import LearningRate, adamw
from pipeline.training.rows import CachedRows
from pipeline.training.terms import Terms

_FORWARD_TOKENS = 3072  # of the targets piece
_STEPS, _WARM_STEPS = 96, 4  # steps of unlike sizes leave gaps in the heap: what it takes levels off at about a hundred
_LEAST_STEPS = 32  # however long they take
_TRAIN_SECONDS = 20.0  # no more than these after this long
LIBRARIES = ("accelerate", "matplotlib.pyplot", "mlflow")  # what a run has loaded besides: part of every peak


def measure(setting: Setting) -> Rates:
    """Raises ConfigError when the target is not on this machine; what is measured is told while it runs."""
    began, config = time.monotonic(), setting.config
    for library in LIBRARIES:
        importlib.import_module(library)
    start_cpu, base = usage.cpu_seconds(), usage.anonymous_bytes()
    if not any(Path(target_folder(config)).glob("*.safetensors")):
        raise ConfigError(f"plan --calibrate: {target_folder(config)} holds no weights here; fetch the target first")
    say("measuring this machine: target forwards, decoding rounds, train steps")
    rates = _measured(
        setting, Rates(torch.get_num_threads(), start_bytes=base, base_bytes=base, start_cpu_seconds=start_cpu)
    )
    usage.give_back_memory()
    kept = max(usage.anonymous_bytes(), base)  # what a process in the middle of the chain keeps
    return replace(rates, base_bytes=kept, seconds=round(time.monotonic() - began, 1))


def _measured(setting: Setting, rates: Rates) -> Rates:
    config = setting.config
    rates = replace(rates, render_per_row=_render(setting))
    drafter = build_drafter(setting.draft, seed=0, token_ids=_words(setting))
    for dtype in sorted(_dtypes(config), reverse=True):  # float32 first: bfloat16 stays for training
        rates.matmul[dtype] = _matmul(setting, dtype)
        target = _loaded(setting, dtype, rates)
        with _seeded():
            decoding.measure(setting, dtype, target, drafter, rates)
        if dtype == config.targets.dtype:
            with tempfile.TemporaryDirectory() as folder, _seeded():
                artifact, per_token = _targets_piece(setting, target, Path(folder))
                per_step, held = _train_piece(setting, artifact, target.frozen)
                rates = replace(rates, targets_per_token=per_token, train_per_step=per_step, train_bytes=held)
        del target
    return rates


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Random ids and weights that are the same every time; the caller's generators stay as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _dtypes(config: Config) -> set[str]:
    used = {config.targets.dtype, config.calibrate.dtype, config.profile.dtype, config.evaluate.dtype}
    return used | ({config.answers.dtype} if config.answers.enabled else set())


def _words(setting: Setting) -> torch.Tensor | None:
    size = setting.draft.draft_vocab_size
    return None if size is None else torch.arange(size)


def _render(setting: Setting) -> float:
    """CPU-seconds of rendering and tokenising one chat about as long as a mean row."""
    config = setting.config
    template = ChatTemplate(
        target_folder(config), config.template, revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
    )  # fmt: skip
    words = "word " * round(setting.corpus.tokens / setting.corpus.rows)
    return usage.cpu_of(lambda: template.render_prompt([{"role": "user", "content": words}]), 20)


def _matmul(setting: Setting, dtype: str) -> float:
    shape, rows = setting.shape, 512
    kind = getattr(torch, dtype)
    a, b = (
        torch.randn(rows, shape.hidden_size).to(kind),
        torch.randn(shape.hidden_size, shape.intermediate_size).to(kind),
    )
    torch.mm(a, b)
    return 2.0 * rows * shape.hidden_size * shape.intermediate_size / usage.cpu_of(lambda: torch.mm(a, b), 3)


def _loaded(setting: Setting, dtype: str, rates: Rates) -> Target:
    usage.give_back_memory()
    before, cpu, peak = usage.anonymous_bytes(), time.process_time(), usage.Peak()
    with peak.watched():
        target = Target.of(
            setting.config.target, target_folder(setting.config), layers=setting.draft.target_layer_ids, dtype=dtype,
            device="cpu",
        )  # fmt: skip
    cpu = time.process_time() - cpu
    rates.loading[dtype] = Loading(cpu, usage.anonymous_bytes() - before, peak.bytes - before)
    return target


# ------------------------------------------------------------------------------------------------ targets and training


def _targets_piece(setting: Setting, target: Target, folder: Path) -> tuple[Artifact, float]:
    """Encode rows into a real shard, in batches of the configured size; returns it and CPU-seconds per token."""
    config, spec = setting.config, setting.spec
    rows = _rows(setting)
    request = {"stage": "targets", "format": 1, **spec.summary()}
    artifact = Artifact(folder, "targets", request)
    artifact.create()
    plain = replace(spec, channel_rms=False)
    with Builder(target, plain, batch_tokens=min(config.targets.batch_tokens, _FORWARD_TOKENS)) as builder:
        cpu = usage.cpu_of(lambda: builder.build(artifact, "train-00000.tar", shard=0, rows=rows))
    summary = {**plain.summary(), "layers": list(setting.draft.target_layer_ids), "layer_convention": CONVENTION}
    artifact.finish(["train-00000.tar"], targets={**summary, "post_norm": True})
    return artifact, cpu / sum(len(row.ids) for row in rows)


def _rows(setting: Setting) -> list[TokenRecord]:
    """Random ids, as long and as far supervised as rows from all over the corpus, about `_FORWARD_TOKENS` together."""
    lengths = sorted(row for row in setting.corpus.lengths if row[1] >= 2) or [(4, 2)]
    count = max(4, round(_FORWARD_TOKENS * setting.corpus.rows / setting.corpus.tokens))
    chosen = [lengths[(2 * row + 1) * len(lengths) // (2 * count)] for row in range(count)]
    draw = np.random.default_rng(0)
    return [
        TokenRecord(
            f"row {number}", "calibration", 0, draw.integers(0, setting.shape.vocab_size, length, np.int32),
            (np.arange(length) >= length - answer).astype(np.uint8),
        )
        for number, (length, answer) in enumerate(chosen)
    ]  # fmt: skip


class _Watch:
    """Events of the loop: the CPU-seconds of every step after the first few."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.until = time.monotonic() + _TRAIN_SECONDS

    def stepped(self, done: int, numbers: dict[str, float], timing: dict[str, float]) -> None:
        self.at.append(time.process_time())
        if time.monotonic() > self.until and len(self.at) >= _LEAST_STEPS:
            raise _Enough

    def validated(self, done: int, numbers: dict[str, float]) -> None: ...

    def save(self, done: int, begun: object = None) -> None: ...

    def flush(self) -> None: ...

    def per_step(self) -> float:
        warm = min(_WARM_STEPS, len(self.at) - 2)
        return (self.at[-1] - self.at[warm]) / (len(self.at) - 1 - warm)


class _Enough(Exception):
    pass


def _train_piece(setting: Setting, artifact: Artifact, frozen: Frozen) -> tuple[float, int]:
    """The real loop over the piece's shard, in one process: CPU-seconds of an optimizer step, and the memory it takes
    beside the target's embedding: state, activations, and what the allocator keeps between steps of unlike sizes.
    """
    usage.give_back_memory()
    before, peak = usage.anonymous_bytes(), usage.Peak()
    config = setting.config
    settings = config.train.model_copy(update={"engine": "single"})
    dtype, token_ids = getattr(torch, settings.precision), _words(setting)
    drafter = build_drafter(setting.draft, seed=0, token_ids=token_ids)
    drafter.configure(attention=settings.attention, device=torch.device("cpu"))
    terms, watch = Terms.of(settings), _Watch()
    objective = Objective(drafter, terms, dtype)
    reader = ShardReader.open(artifact)
    recipe = setup.recipe_of(config, setting.shape.vocab_size, token_ids, last_hidden=drafter.config.uses_last_hidden)
    with started(settings) as ranks:
        engine = ranks.prepare(objective, adamw(objective, settings))
        tensors = setup.frozen_tensors(frozen.to(dtype=dtype), token_ids)
        rows = _drawn(len(reader), config.train.global_batch_size)
        run = Run(
            engine=engine, frozen=tensors,
            schedule=Schedule(len(rows), config.train.global_batch_size, lambda epoch: rows),
            reader=Reader(CachedRows(reader, dtype, torch.device("cpu")), recipe, tensors.head),
            validation=[], terms=terms, rate=LearningRate.of(settings, _STEPS), events=watch, start=0, stop=_STEPS,
            dtype=dtype, budget=settings.micro_batch_tokens, workers=settings.workers,
        )  # fmt: skip
        with peak.watched(), contextlib.suppress(_Enough):
            train(run)
    if len(watch.at) < _STEPS:
        say(f"a train step takes long here: measured {len(watch.at)} of {_STEPS}", warning=True)
    return watch.per_step(), peak.bytes - before


def _drawn(count: int, batch: int) -> Sequence[int]:
    """Row numbers of all steps: drawn with repetition, so that few rows make many unlike batches."""
    return list(np.random.default_rng(0).integers(0, count, batch * _STEPS))
