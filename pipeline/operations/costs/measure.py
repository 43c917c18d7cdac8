"""About half a minute of small real pieces on this machine's CPU: what every stage's time is made of.

    rates = measure(setting)           # the target is loaded, forwards and train steps of the configured shapes are run

All times are CPU-seconds, measured on one thread: the work itself. More threads than idle cores spin at every barrier
while their partner waits for a core, and on a busy machine that doubles the CPU-seconds of the same work (measured).
What is left of other people's load is cache contention, which a stage's own run pays as well.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import usage
from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.corpus.template import ChatTemplate
from pipeline.corpus.tokens import TokenRecord
from pipeline.decoding.cache import RaggedCache
from pipeline.decoding.rounds import Engine, Rows
from pipeline.distributed import started
from pipeline.draft.build import build_drafter
from pipeline.draft.interface import Drafter
from pipeline.errors import ConfigError
from pipeline.frozen import Frozen
from pipeline.identity import target_folder
from pipeline.operations.costs.chain import Setting
from pipeline.operations.costs.rates import Loading, Rates, Round, round_name
from pipeline.operations.costs.work import Decoding
from pipeline.progress import say
from pipeline.shards.builder import Builder
from pipeline.shards.layout import CONVENTION
from pipeline.shards.reader import ShardReader
from pipeline.speculative.verify import Law
from pipeline.target import Target
from pipeline.training import setup
from pipeline.training.batches import Schedule
from pipeline.training.loader import Reader
from pipeline.training.loop import Run, train
from pipeline.training.objective import Objective
from pipeline.training.optimizer import LearningRate, adamw
from pipeline.training.rows import CachedRows
from pipeline.training.terms import Terms

_FORWARD_TOKENS = 1536  # of the targets piece
_ROUNDS, _STEPS = 3, 12
_WARM_STEPS = 3
_TRAIN_SECONDS = 10.0  # no more train steps after this long
LIBRARIES = ("accelerate", "matplotlib.pyplot", "mlflow")  # what a run has loaded besides: part of every peak
_FEWER = 4  # a second batch size: a quarter of the first


def measure(setting: Setting) -> Rates:
    """Raises ConfigError when the target is not on this machine; what is measured is told while it runs."""
    began, config = time.monotonic(), setting.config
    for library in LIBRARIES:
        importlib.import_module(library)
    start_cpu, base = usage.cpu_seconds(), usage.resident_bytes()
    if not any(Path(target_folder(config)).glob("*.safetensors")):
        raise ConfigError(f"plan --calibrate: {target_folder(config)} holds no weights here; fetch the target first")
    say("measuring this machine: target forwards, decoding rounds, train steps")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return replace(_measured(setting, Rates(0.0, base, start_cpu)), seconds=round(time.monotonic() - began, 1))
    finally:
        torch.set_num_threads(threads)


def _measured(setting: Setting, rates: Rates) -> Rates:
    config = setting.config
    rates = replace(rates, render_per_row=_render(setting))
    drafter = build_drafter(setting.draft, seed=0, token_ids=_words(setting))
    for dtype in sorted(_dtypes(config), reverse=True):  # float32 first: bfloat16 stays for training
        rates.matmul[dtype] = _matmul(setting, dtype)
        target = _loaded(setting, dtype, rates)
        _decoding_pieces(setting, dtype, target, drafter, rates)
        if dtype == config.targets.dtype:
            with tempfile.TemporaryDirectory() as folder, _seeded():
                artifact, per_token = _targets_piece(setting, target, Path(folder))
                per_step = _train_piece(setting, artifact, target.frozen)
                rates = replace(rates, targets_per_token=per_token, train_per_step=per_step)
        del target
    return rates


@contextmanager
def _seeded() -> Iterator[None]:
    """Random ids and weights that are the same every time; the caller's generators stay as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def cpu_of(work: Callable[[], Any], repeats: int = 1) -> float:
    """CPU-seconds of one call, the least of several: what others' load adds to one of them is not its own."""
    taken = []
    for _ in range(repeats):
        started_at = time.process_time()
        work()
        taken.append(time.process_time() - started_at)
    return min(taken)


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
    return cpu_of(lambda: template.render_prompt([{"role": "user", "content": words}]), 20)


def _matmul(setting: Setting, dtype: str) -> float:
    shape, rows = setting.shape, 512
    kind = getattr(torch, dtype)
    a, b = (
        torch.randn(rows, shape.hidden_size).to(kind),
        torch.randn(shape.hidden_size, shape.intermediate_size).to(kind),
    )
    torch.mm(a, b)
    return 2.0 * rows * shape.hidden_size * shape.intermediate_size / cpu_of(lambda: torch.mm(a, b), 3)


def _loaded(setting: Setting, dtype: str, rates: Rates) -> Target:
    before = usage.resident_bytes()
    usage.reset_peak()
    cpu = time.process_time()
    target = Target.of(
        setting.config.target, target_folder(setting.config), layers=setting.draft.target_layer_ids, dtype=dtype,
        device="cpu",
    )  # fmt: skip
    cpu = time.process_time() - cpu
    rates.loading[dtype] = Loading(cpu, usage.resident_bytes() - before, usage.peak_bytes() - before)
    return target


# ------------------------------------------------------------------------------------------------ decoding


def _decoding_pieces(setting: Setting, dtype: str, target: Target, drafter: Drafter, rates: Rates) -> None:
    """Every kind of round this dtype decodes with, at the stage's batch and a quarter of it; and a prefill."""
    drafter = drafter.to(getattr(torch, dtype)).eval()
    for stage, runs in setting.decodings.items():
        for run in {(run.drafted, run.rows): run for run in runs if run.dtype == dtype}.values():
            name = round_name(stage, run)
            sizes = run.rows, max(1, run.rows // _FEWER)
            full, fewer = (_round_cpu(setting, target, drafter if run.drafted else None, run, rows) for rows in sizes)
            rates.rounds[name] = Round(sizes[0], full, sizes[1], fewer)
    length = max(2, round(setting.corpus.prompt_tokens))
    ids = _ids(setting, max(1, 512 // length), length)
    rates.prefill_per_token[dtype] = cpu_of(lambda: target.forward(ids), 2) / ids.numel()


@torch.inference_mode()
def _round_cpu(setting: Setting, target: Target, drafter: Drafter | None, run: Decoding, rows: int) -> float:
    """One round as `decode` plays it: draft, verify, accept, observe, for rows in the middle of an answer."""
    context = max(2, round(run.context))
    engine = Engine(target, RaggedCache(target.config), Law(1.0, 1.0, 0), drafter=drafter)
    engine.cache.reserve(rows, context + run.step_tokens + 1)
    mask = engine.cache.place(torch.arange(context)[None], torch.zeros(1, dtype=torch.long))
    target.forward(_ids(setting, 1, context), positions_BT=torch.arange(context)[None], mask=mask, cache=engine.cache)
    for slot in range(1, rows):
        engine.cache.move(0, slot, context)
    if drafter is not None:
        engine.state = drafter.start(
            rows, context + run.step_tokens + 1, device="cpu", dtype=target.frozen.head_VD.dtype
        )
    state = Rows(_ids(setting, 1, rows)[0], torch.full((rows,), context), torch.arange(rows))

    def play() -> None:
        if engine.state is not None:
            engine.state.lengths_B.fill_(context)
        engine.play(state)

    play()
    return cpu_of(play, _ROUNDS)


def _ids(setting: Setting, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, setting.shape.vocab_size, (rows, length))


# ------------------------------------------------------------------------------------------------ targets and training


def _targets_piece(setting: Setting, target: Target, folder: Path) -> tuple[Artifact, float]:
    """Encode rows of mean length into a real shard, in batches of the configured size; returns it and the rate."""
    config, spec = setting.config, setting.spec
    rows = _rows(setting, count=max(4, round(_FORWARD_TOKENS * setting.corpus.rows / setting.corpus.tokens)))
    request = {"stage": "targets", "format": 1, **spec.summary()}
    artifact = Artifact(folder, "targets", request)
    artifact.create()
    plain = replace(spec, channel_rms=False)
    with Builder(target, plain, batch_tokens=min(config.targets.batch_tokens, _FORWARD_TOKENS)) as builder:
        builder.encode(rows, [0])
        cpu = cpu_of(lambda: builder.build(artifact, "train-00000.tar", shard=0, rows=rows))
    summary = {**plain.summary(), "layers": list(setting.draft.target_layer_ids), "layer_convention": CONVENTION}
    artifact.finish(["train-00000.tar"], targets={**summary, "post_norm": True})
    return artifact, cpu / sum(len(row.ids) for row in rows)


def _rows(setting: Setting, count: int) -> list[TokenRecord]:
    """Random ids, as long and as far supervised as the mean row."""
    corpus = setting.corpus
    length, answer = round(corpus.tokens / corpus.rows), max(2, round(corpus.supervised / corpus.rows))
    mask = (np.arange(length) >= length - answer).astype(np.uint8)
    draw = np.random.default_rng(0)
    return [
        TokenRecord(f"row {n}", "calibration", 0, draw.integers(0, setting.shape.vocab_size, length, np.int32), mask)
        for n in range(count)
    ]


class _Watch:
    """Events of the loop: the CPU-seconds of every step after the first few."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.until = time.monotonic() + _TRAIN_SECONDS

    def stepped(self, done: int, numbers: dict[str, float], timing: dict[str, float]) -> None:
        self.at.append(time.process_time())
        if time.monotonic() > self.until and len(self.at) >= 2:
            raise _Enough

    def validated(self, done: int, numbers: dict[str, float]) -> None: ...

    def save(self, done: int, begun: object = None) -> None: ...

    def per_step(self) -> float:
        taken = [after - before for before, after in pairwise(self.at)]
        return statistics.median(taken[min(_WARM_STEPS, len(taken) - 1) :])


class _Enough(Exception):
    pass


def _train_piece(setting: Setting, artifact: Artifact, frozen: Frozen) -> float:
    """CPU-seconds of an optimizer step: the real loop over the piece's shard, in one process."""
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
        rows = _repeated(len(reader), config.train.global_batch_size)
        run = Run(
            engine=engine, frozen=tensors,
            schedule=Schedule(len(rows), config.train.global_batch_size, lambda epoch: rows),
            reader=Reader(CachedRows(reader, dtype, torch.device("cpu")), recipe, tensors.head),
            validation=[], terms=terms, rate=LearningRate.of(settings, _STEPS), events=watch, start=0, stop=_STEPS,
            dtype=dtype, budget=settings.micro_batch_tokens, workers=settings.workers,
        )  # fmt: skip
        try:
            train(run)
        except _Enough:
            say(f"a train step takes long here: measured {len(watch.at)}")
    return watch.per_step()


def _repeated(count: int, batch: int) -> Sequence[int]:
    """Row numbers of an epoch long enough for every step to be full."""
    return [number % count for number in range(max(batch, count // batch * batch))]
