"""A small world to train in, made in code: a random frozen head, random rows with taps and distributions, a drafter.

Everything is a pure function of its seeds, and built the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config import Train
from pipeline.draft.build import build_drafter
from pipeline.draft.config import DraftConfig
from pipeline.shards.record import Sample, Teacher
from pipeline.speculative.teacher import DraftVocabulary, Head
from pipeline.speculative.weights import position_weights
from pipeline.training.batches import Schedule
from pipeline.training.loader import Reader
from pipeline.training.microbatch import Recipe
from pipeline.training.objective import FrozenTensors, Objective
from pipeline.training.terms import Terms

V, D, L, K = 67, 16, 2, 4

DRAFT = DraftConfig(
    kind="dspark", block_size=K, layout="next_token", layers=1, hidden_size=D, intermediate_size=24, heads=2,
    kv_heads=1, head_dim=8, activation="silu", rms_norm_eps=1e-6, attention_bias=False,
    rope={"rope_type": "default", "rope_theta": 10_000.0}, markov="vanilla", markov_rank=5, confidence=True, taps=True,
    target_layer_ids=(0, 1), target_num_layers=4, target_vocab_size=V, draft_vocab_size=None, mask_token_id=V - 1,
)  # fmt: skip


@dataclass
class FakeRows:
    """`lengths` tokens per row; the first third of each is prompt. `source` is the kind of teacher."""

    lengths: Sequence[int]
    dtype: torch.dtype = torch.float64
    source: str = "last_hidden"
    head: Tensor | None = None
    bare: tuple[int, ...] = ()
    num_taps: int = L
    hidden_size: int = D

    @property
    def kept(self) -> int | None:
        return 8 if self.source == "topk" else None

    def _draw(self, row: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 + row)

    def tokens(self, row: int) -> tuple[str, Tensor, Tensor]:
        length = self.lengths[row]
        ids = torch.randint(V - 1, (length,), generator=self._draw(row))
        mask = torch.ones(length, dtype=torch.uint8)
        mask[: length // 3] = 0
        mask[length // 2 :: 11] = 0
        return f"row-{row}/0", ids, mask * (row not in self.bare)

    def read(self, rows: Sequence[int]) -> list[Any]:
        return [self._sample(row) for row in rows]

    def _sample(self, row: int) -> Sample:
        name, ids, mask = self.tokens(row)
        draw = self._draw(row + 500)
        taps = torch.randn(len(ids), L, D, generator=draw, dtype=torch.float64).to(self.dtype)
        positions = torch.arange(len(ids))
        hidden = torch.randn(len(ids), D, generator=draw, dtype=torch.float64)
        if self.source == "topk":
            assert self.head is not None
            logp = torch.log_softmax(hidden @ self.head.double().T, -1)
            kept = logp.topk(8, -1)
            tail = torch.log1p(-kept.values.exp().sum(-1))
            teacher = Teacher("topk", positions, kept.indices, kept.values.to(self.dtype), tail.to(self.dtype))
        else:
            teacher = Teacher("last_hidden", positions, hidden_PD=hidden.to(self.dtype))
        return Sample(name, "fake", 0, ids.long(), mask.bool(), taps, teacher)


@dataclass
class World:
    """Ready for the loop: `objective`, `frozen`, `reader`, `schedule`."""

    objective: Objective
    frozen: FrozenTensors
    reader: Reader
    schedule: Schedule
    terms: Terms
    train: Train


def world(
    *,
    rows: int = 8,
    dtype: torch.dtype = torch.float64,
    source: str = "last_hidden",
    words: int | None = None,
    batch: int = 8,
    draft: DraftConfig = DRAFT,
    ce_label: str = "data",
    bare: tuple[int, ...] = (),
    **train: Any,
) -> World:
    """`words`: size of the draft vocabulary; `bare`: rows without supervised tokens; the rest goes to `Train`."""
    precision = "bfloat16" if dtype == torch.bfloat16 else "float32"
    settings = Train(**{"num_anchors": 5, "global_batch_size": batch, "precision": precision, "steps": 12, **train})
    draw = torch.Generator().manual_seed(7)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    head = Head(torch.randn(V, D, generator=draw, dtype=torch.float64).to(dtype))
    embed = torch.randn(V, D, generator=draw, dtype=torch.float64).to(dtype)
    ids = None if words is None else torch.randperm(V, generator=draw)[:words].sort().values
    vocabulary = None if ids is None else DraftVocabulary.of(ids, V)
    drafter = build_drafter(replace(draft, draft_vocab_size=words), seed=3, token_ids=ids).to(wide)
    lengths = np.random.default_rng(5).integers(9, 40, rows).tolist()
    fake = FakeRows(lengths, wide, source, head.weight_VD, bare)
    recipe = Recipe(
        block_size=K, num_anchors=settings.num_anchors, rule="generated", seed=0,
        weights_K=position_weights(K, 4.0), vocab_size=V, words=vocabulary, ce_label=ce_label,
        last_hidden=draft.uses_last_hidden,
    )  # fmt: skip
    terms = Terms.of(settings)
    return World(
        Objective(drafter, terms, dtype),
        FrozenTensors(embed, head, head.rows(vocabulary), vocabulary),
        Reader(fake, recipe, head),
        Schedule(rows, batch, lambda epoch: np.random.default_rng(epoch).permutation(rows)),
        terms,
        settings,
    )
