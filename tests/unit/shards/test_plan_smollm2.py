"""`plan` against tars on a real model: bytes of every codec within 3 %, 20 conversations each under `make prove`."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.corpus.demo import demo_rows
from pipeline.corpus.masks import training_rows
from pipeline.corpus.normalise import normalise
from pipeline.corpus.rows import Row
from pipeline.corpus.template import ChatTemplate
from pipeline.corpus.tokens import TokenRecord
from pipeline.schema import Template, Tokens
from pipeline.shards.builder import Builder
from pipeline.shards.layout import Spec
from pipeline.shards.plan import estimate, show_bytes
from pipeline.target import Target
from tests.conftest import Proof
from tests.unit.shards.cache import artifact_of

FOLDER = Path("work/models/smollm2-135m-instruct")
TAPS = ("bf16", "fp8", "int8", "int4", "int3", "int2")
LOGITS = ("last_hidden", "topk")


class Once:
    """The target, run once per batch however many codecs ask."""

    def __init__(self, target: Target) -> None:
        self.target, self.frozen, self.device, self.seen = target, target.frozen, target.device, {}

    def forward(self, ids_BT: torch.Tensor) -> Any:
        key = (ids_BT.shape, ids_BT.numpy().tobytes())
        if key not in self.seen:
            self.seen[key] = self.target.forward(ids_BT)
        return self.seen[key]


def token_rows(count: int) -> list[TokenRecord]:
    """Rows of `count` demo conversations, by SmolLM2's own template."""
    template = ChatTemplate(str(FOLDER), Template())
    sources = [demo_rows(name, start=0, stop=count, seed=0) for name in ("codeio", "chatterbot")]
    found = []
    for number, raw in enumerate(chain.from_iterable(zip(*sources, strict=True))):
        if number == count:
            break
        source, messages, _ = normalise(raw, roles={}, name=None, default_source="demo")
        row = Row.of(source=source, messages=messages)
        for made in training_rows(template, row, Tokens(max_length=1024)).rows:
            ids, mask = np.array(made.ids, np.int32), np.array(made.mask, np.uint8)
            found.append(TokenRecord(row.id, row.source, made.turn, ids, mask))
    return found


@pytest.mark.prove
@pytest.mark.case("CAB-01")
@pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason=f"{FOLDER} is not there: make run")
def test_bytes_of_every_codec(tmp_path: Path, proof: Proof) -> None:
    rows = token_rows(proof.size(3, 20))
    layers = (1, 7, 14, 20, 27)
    target = Once(Target.load(str(FOLDER), layers=layers, dtype=torch.bfloat16))
    counts = len(rows), sum(len(row.ids) for row in rows), sum(int(row.mask.sum()) for row in rows)
    for taps in TAPS:
        for logits in LOGITS:
            spec = Spec(
                taps=taps, logits=logits, topk=64, positions="supervised", num_taps=len(layers), hidden_size=576,
                vocab_size=49_152,
            )  # fmt: skip
            artifact = artifact_of(tmp_path, spec)
            with Builder(target, spec, batch_tokens=2048) as builder:
                builder.build(artifact, "train-00000.tar", shard=0, rows=rows)
            written = (artifact.path / "train-00000.tar").stat().st_size
            planned = estimate(spec, *counts)
            proof.note(
                f"{taps}, {logits}: {counts[1]} tokens", f"{show_bytes(written)}, planned {planned / written - 1:+.2%}"
            )
            assert planned == pytest.approx(written, rel=0.03), (taps, logits)
