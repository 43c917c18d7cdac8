"""A row's states on a real model, whose activations reach 25,000: alone, in a batch, packed, and as they are cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.corpus.tokens import TokenRecord
from pipeline.shards.builder import Builder, padded_ids
from pipeline.shards.reader import ShardReader
from pipeline.target import Target
from tests.conftest import Proof
from tests.unit.shards.cache import artifact_of, finish, spec_of
from tests.unit.shards.test_plan_smollm2 import FOLDER, token_rows

LAYERS = (1, 7, 14, 20, 27)
LIMIT = 5e-6

States = tuple[Tensor, Tensor]  # taps [T, L, D], last hidden [T, D]


def states(target: Target, rows: Sequence[TokenRecord], batch: int) -> Iterator[States]:
    """Of each row, `batch` of them padded into one forward."""
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        out = target.forward(padded_ids(part))
        for index, row in enumerate(part):
            yield out.taps_BTLD[index, : len(row.ids)], out.last_hidden_BTD[index, : len(row.ids)]


def packed(target: Target, rows: Sequence[TokenRecord], size: int) -> Iterator[States]:
    """Of each row, `size` of them end to end in one forward."""
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        ids = torch.from_numpy(np.concatenate([row.ids for row in part])).long()[None]
        positions = torch.cat([torch.arange(len(row.ids)) for row in part])[None]
        out, at = target.forward(ids, positions_BT=positions), 0
        for row in part:
            span = slice(at, at + len(row.ids))
            yield out.taps_BTLD[0, span], out.last_hidden_BTD[0, span]
            at += len(row.ids)


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest norm-relative difference of any token (and tap)."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def cached(target: Target, rows: Sequence[TokenRecord], folder: Path, batch_tokens: int) -> ShardReader:
    spec = spec_of(
        "bf16", "last_hidden", positions="all", num_taps=len(LAYERS), hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )  # fmt: skip
    artifact = artifact_of(folder, spec, tag=str(batch_tokens))
    with Builder(target, spec, batch_tokens=batch_tokens) as builder:
        builder.build(artifact, "train-00000.tar", shard=0, rows=rows)
    finish(artifact, spec, 1)
    return ShardReader.open(artifact)


@pytest.mark.case("CAB-02")
@pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason=f"{FOLDER} is not there: make run")
def test_a_rows_states_do_not_depend_on_its_company(tmp_path: Path, proof: Proof) -> None:
    rows = [row for row in token_rows(48) if len(row.ids) <= 400][: proof.size(4, 24)]
    target = Target.load(str(FOLDER), layers=LAYERS)
    batch = proof.size(4, 16)
    alone = list(states(target, rows, 1))
    others = {f"batch {batch}": states(target, rows, batch), "packed by 4": packed(target, rows, 4)}
    tokens = sum(len(row.ids) for row in rows)
    for name, found in others.items():
        worst = [0.0, 0.0]
        for (taps, hidden), (own_taps, own_hidden) in zip(found, alone, strict=True):
            worst = [max(worst[0], error(taps, own_taps)), max(worst[1], error(hidden, own_hidden))]
        proof.note(
            f"SmolLM2 fp32, {len(rows)} rows, {tokens} tokens, {name} against alone: taps, last hidden",
            f"{worst[0]:.1e}, {worst[1]:.1e}",
        )
        assert max(worst) <= LIMIT, name
    largest = max(float(taps.abs().max()) for taps, _ in alone)
    proof.note("largest activation of a tap", f"{largest:,.0f}")
    longest = max(len(row.ids) for row in rows)
    single, batched = (cached(target, rows, tmp_path, limit) for limit in (1, batch * longest))
    for number in range(len(rows)):
        one, other = single[number], batched[number]
        assert one.id == other.id and one.teacher.hidden_PD is not None and other.teacher.hidden_PD is not None
        assert error(other.teacher.hidden_PD, one.teacher.hidden_PD) <= LIMIT
        assert error(other.taps_TLD, one.taps_TLD) <= 2.0**-8, "bf16 may round to the neighbour"
