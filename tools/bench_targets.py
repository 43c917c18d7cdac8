"""How fast target shards are built and read, against the bare forward and against plain webdataset. Paired runs.

    python -m tools.bench_targets --model work/models/smollm2-135m-instruct --rows 96

Rows have random ids and lengths like chat data (or come from `--tokens shard.parquet`). Building: tokens per second of
each codec, divided by those of the decoder alone over the same rows in length-sorted batches, alternating. Reading:
samples per second of `ShardReader` (raw tensors, random order) against webdataset's sequential iteration of the same
members to raw tensors, both warm and in this process. Resuming: seconds from an index of 1.4 million samples to the
number of the one at position 1,000,000 of an epoch; what is left is to read that one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from safetensors.torch import load as load_safetensors

from pipeline.artifact import Artifact
from pipeline.corpus.tokens import read_tokens
from pipeline.progress import say
from pipeline.shards.batches import bucket, padding
from pipeline.shards.builder import Builder
from pipeline.shards.index import Index
from pipeline.shards.layout import CONVENTION, Spec
from pipeline.shards.reader import ShardReader
from pipeline.target import Target, default_layers, pick_device


@dataclass(frozen=True)
class Row:
    id: str
    source: str
    turn: int
    ids: Any
    mask: Any


CODECS = (
    ("bf16", "last_hidden"), ("int8", "topk"), ("fp8", "topk"), ("int4", "topk"), ("int3", "topk"), ("int2", "topk"),
)  # fmt: skip


def random_rows(count: int, vocab_size: int, *, mean: int = 220, longest: int = 1024) -> list[Row]:
    """Log-normal lengths, the last 60 % of each row supervised."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(mean), 0.6, count), 8, longest).astype(int)
    rows = []
    for number, length in enumerate(lengths):
        mask = (np.arange(length) >= 0.4 * length).astype(np.uint8)
        rows.append(Row(f"{number:016x}", "random", 0, random.integers(3, vocab_size, length).astype(np.int32), mask))
    return rows


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU over all threads). On a busy machine the CPU figure is the one to trust."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - cpu


def bare(target: Target, rows: Sequence[Any], batches: Sequence[Sequence[int]]) -> None:
    """The decoder alone: nothing is tapped, kept or written."""
    for batch in batches:
        longest = max(len(rows[number].ids) for number in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for index, number in enumerate(batch):
            ids[index, : len(rows[number].ids)] = torch.from_numpy(np.array(rows[number].ids))
        with torch.no_grad():
            target.decoder(input_ids=ids.to(target.device), use_cache=False)


def build(target: Target, spec: Spec, rows: Sequence[Any], folder: Path, batch_tokens: int) -> Artifact:
    artifact = Artifact(folder, "targets", {"stage": "targets", "format": 1, **spec.summary()})
    artifact.create()
    (artifact.path / "rows" / "train-00000.tar.json").unlink(missing_ok=True)
    with Builder(target, spec, batch_tokens=batch_tokens) as builder:
        builder.build(artifact, "train-00000.tar", shard=0, rows=rows)
    artifact.finish(["train-00000.tar"], targets={**spec.summary(), "layer_convention": CONVENTION, "post_norm": True})
    return artifact


def read_ours(reader: ShardReader, order: Sequence[int]) -> None:
    for number in order:
        reader.encoded(number)


def read_webdataset(path: Path) -> None:
    for sample in webdataset.WebDataset(str(path), shardshuffle=False):
        load_safetensors(sample["safetensors"])


def bench(arguments: argparse.Namespace) -> None:
    device = pick_device()
    dtype = torch.bfloat16
    probe = Target.load(arguments.model, dtype=dtype, device=device)
    target = Target.load(arguments.model, layers=default_layers(probe.num_layers), dtype=dtype, device=device)
    rows: Any = (
        list(read_tokens(Path(arguments.tokens)))[: arguments.rows]
        if arguments.tokens
        else random_rows(arguments.rows, target.vocab_size)
    )
    lengths = [len(row.ids) for row in rows]
    batches = bucket(lengths, arguments.batch_tokens)
    say(
        f"{len(rows)} rows, {sum(lengths)} tokens, padding {padding(lengths, batches):.3f}, "
        f"{torch.get_num_threads()} threads"
    )
    _resume(arguments.repeats)
    bare(probe, rows, batches[:2])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        for taps, logits in [pair for pair in CODECS if not arguments.codecs or pair[0] in arguments.codecs]:
            spec = Spec(
                taps=taps, logits=logits, topk=64, positions="supervised", num_taps=len(target.layers),
                hidden_size=target.hidden_size, vocab_size=target.vocab_size,
            )  # fmt: skip
            ratios: list[tuple[float, float]] = []
            for _ in range(arguments.repeats):
                plain = seconds(lambda: bare(probe, rows, batches))
                built = seconds(partial(build, target, spec, rows, Path(scratch), arguments.batch_tokens))
                ratios.append((plain[0] / built[0], plain[1] / built[1]))
                speed = sum(lengths) / built[0]
            artifact = build_artifact(spec, Path(scratch))
            size = artifact.manifest()["shards"][0]["bytes"] / sum(lengths)
            say(
                f"build {taps}+{logits}: {_medians(ratios)} x bare forward (wall, CPU), {speed:.0f} tok/s, "
                f"{size:.0f} B/token"
            )
            if taps in ("bf16", "int4"):
                _read(artifact, arguments.repeats, taps)


def build_artifact(spec: Spec, folder: Path) -> Artifact:
    return Artifact(folder, "targets", {"stage": "targets", "format": 1, **spec.summary()})


def _read(artifact: Artifact, repeats: int, taps: str) -> None:
    reader = ShardReader.open(artifact)
    order = [int(number) for number in reader.order(0, 0)]
    ratios: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        theirs = seconds(lambda: read_webdataset(artifact.path / "train-00000.tar"))
        ours = seconds(lambda: read_ours(reader, order))
        ratios.append((theirs[0] / ours[0], theirs[1] / ours[1]))
    say(f"read {taps}: {len(order) / ours[0]:.0f} samples/s, {_medians(ratios[1:])} x webdataset (wall, CPU)")


def _resume(repeats: int) -> None:
    counts = np.zeros(1_400_000, dtype=np.int64)
    files = tuple(f"train-{shard:05d}.tar" for shard in range(1400))
    index = Index(files, np.arange(0, 1_401_000, 1000), counts, counts, counts, counts, counts, ("",) * len(counts))
    took = [seconds(partial(_position, index, epoch))[0] for epoch in range(repeats)]
    say(f"resume at sample 1,000,000 of {len(index):,}: {statistics.median(took):.3f} s")


def _position(index: Index, epoch: int) -> int:
    return index.shard_of(int(index.order(0, epoch)[1_000_000]))


def _medians(ratios: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{statistics.median(column):.3f}" for column in zip(*ratios, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", help="token shard (parquet); default: random rows")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--codecs", nargs="*")
    parser.add_argument("--folder", help="where scratch shards go")
    bench(parser.parse_args())


if __name__ == "__main__":
    main()
