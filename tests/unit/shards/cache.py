"""A small cache without transformers: a causal toy network, token rows of 3 to 60 tokens, shards of 8, 8 and 5 rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.artifact import Artifact
from pipeline.frozen import Frozen
from pipeline.shards.builder import Builder
from pipeline.shards.layout import CONVENTION, Spec

VOCABULARY, WIDTH, TAPS = 320, 32, 3


def spec_of(taps: str = "bf16", logits: str = "topk", **changes: Any) -> Spec:
    options: dict[str, Any] = {
        "topk": 16, "positions": "supervised", "num_taps": TAPS, "hidden_size": WIDTH, "vocab_size": VOCABULARY,
        "dtype": "float32",
    }  # fmt: skip
    return Spec(taps=taps, logits=logits, **{**options, **changes})


@dataclass(frozen=True)
class Row:
    id: str
    source: str
    turn: int
    ids: Any
    mask: Any


def rows_of(count: int, *, seed: int = 0) -> list[Row]:
    """Ids with dots, slashes and non-ASCII letters: a source's own id may hold anything. Rows 0 and 1 are as long."""
    random = np.random.default_rng(seed)
    out = []
    for number in range(count):
        length = int(random.integers(3, 61)) if number != 1 else len(out[0].ids)
        start = int(random.integers(1, length)) if number != 1 else int(out[0].mask.argmax())
        mask = (np.arange(length) >= start).astype(np.uint8)
        ids = random.integers(3, VOCABULARY, length).astype(np.int32)
        out.append(Row(f"v1.{seed}/zeile-ü.{number}", "toy.set/a", number % 3, ids, mask))
    return out


@dataclass
class ToyTarget:
    """Taps and last hidden states are running means of embeddings: causal, so right padding cannot matter."""

    frozen: Frozen = field(init=False)
    device: torch.device = torch.device("cpu")
    poison: frozenset[int] = frozenset()
    calls: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        embed = torch.randn(VOCABULARY, WIDTH, generator=random)
        self.frozen = Frozen(embed, torch.randn(VOCABULARY, WIDTH, generator=random), torch.ones(WIDTH), None)

    def forward(self, ids_BT: Tensor) -> Any:
        self.calls += 1
        embedded = self.frozen.embed_VD[ids_BT]
        mean = embedded.cumsum(1) / torch.arange(1, ids_BT.shape[1] + 1)[None, :, None]
        taps = torch.stack([(mean * (tap + 1)).sin() * 3 for tap in range(TAPS)], dim=2)
        for token in self.poison:
            taps[ids_BT == token] = float("nan")
        return SimpleNamespace(taps_BTLD=taps, last_hidden_BTD=mean + embedded)


def shard_names(count: int) -> list[str]:
    return [f"train-{number:05d}.tar" for number in range(count)]


def artifact_of(folder: Path, spec: Spec, *, tag: str = "") -> Artifact:
    artifact = Artifact(folder, "targets", {"stage": "targets", "format": 1, "tag": tag, **spec.summary()})
    artifact.create()
    return artifact


def build(
    folder: Path,
    spec: Spec | None = None,
    *,
    sizes: Sequence[int] = (8, 8, 5),
    target: ToyTarget | None = None,
    batch_tokens: int = 256,
    tag: str = "",
) -> Artifact:
    """A finished artifact of toy shards."""
    spec = spec or spec_of()
    artifact = artifact_of(folder, spec, tag=tag)
    names = shard_names(len(sizes))
    with Builder(target or ToyTarget(), spec, batch_tokens=batch_tokens) as builder:
        for number, size in enumerate(sizes):
            builder.build(artifact, names[number], shard=number, rows=rows_of(size, seed=number))
    finish(artifact, spec, len(sizes))
    return artifact


def finish(artifact: Artifact, spec: Spec, shards: int, **changes: Any) -> None:
    summary = {**spec.summary(), "layers": [0, 1, 2], "layer_convention": CONVENTION, "post_norm": True, **changes}
    artifact.finish(shard_names(shards), targets=summary)
