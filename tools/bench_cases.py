"""Inputs of the benchmark: one random row, a drafter, and the two ways to take a step on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Train
from pipeline.draft.block import BlockDrafter
from pipeline.draft.build import build_drafter
from pipeline.draft.config import DraftConfig
from pipeline.shards.record import Sample, Teacher
from pipeline.speculative.teacher import Head
from pipeline.speculative.weights import position_weights
from pipeline.training.microbatch import MicroBatch, Recipe, pack, plan_row
from pipeline.training.objective import FrozenTensors, Objective
from pipeline.training.optimizer import adamw
from pipeline.training.terms import Terms
from tools import bench_baseline


@dataclass(frozen=True)
class Shape:
    """What is measured: one row of `tokens`, its last `supervised` share an answer, exact last hidden states."""

    hidden: int = 512
    vocabulary: int = 32_768
    anchors: int = 256
    tokens: int = 1024
    supervised: float = 0.7
    dtype: torch.dtype = torch.float32
    block_size: int = 7
    layers: int = 2
    taps: int = 5
    rank: int = 64

    def label(self) -> str:
        kind = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return (
            f"hidden {self.hidden}, vocabulary {self.vocabulary:,}, {self.anchors} anchors x {self.block_size}, "
            f"{self.supervised:.0%} of {self.tokens:,} tokens supervised, {kind}"
        )


@dataclass
class Case:
    """A shape made real. Each way of stepping has its own drafter and optimizer with the same start."""

    shape: Shape
    batch: MicroBatch
    dense: bench_baseline.DenseBatch
    frozen: FrozenTensors
    terms: Terms
    ours: Objective
    reference: BlockDrafter
    optimizers: dict[str, torch.optim.Optimizer]

    @property
    def scale(self) -> float:
        return 1.0 / float(self.batch.weights_S.sum())

    def our_step(self) -> Tensor:
        loss, _ = self.ours(self.batch, self.frozen, self.scale, self.scale)
        return self._update("ours", loss)

    def reference_step(self) -> Tensor:
        loss = bench_baseline.step_loss(self.reference, self.dense, self.frozen, self.terms, self.shape.dtype)
        return self._update("reference", loss)

    def _update(self, which: str, loss: Tensor) -> Tensor:
        loss.backward()  # type: ignore[no-untyped-call]
        module = self.ours if which == "ours" else self.reference
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        self.optimizers[which].step()
        self.optimizers[which].zero_grad(set_to_none=True)
        return loss.detach()

    def losses(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Loss and heads, forward and backward, on states already computed: (ours, the reference's)."""
        drafter, batch = self.ours.drafter, self.batch
        with torch.no_grad(), self._autocast():
            ours_AKD = drafter.backbone(batch.context, batch.anchors, self.frozen.embed_VD)
            reference_AKD = bench_baseline.backbone(self.reference, self.dense, self.frozen.embed_VD)

        def ours() -> None:
            with self._autocast():
                output = drafter.read_heads(ours_AKD.detach().requires_grad_(), batch.anchors)
            self.ours.loss(output, batch, self.frozen, self.scale, self.scale)[0].backward()  # type: ignore[no-untyped-call]

        def reference() -> None:
            leaf = reference_AKD.detach().requires_grad_()
            with self._autocast():
                loss = bench_baseline.loss(self.reference, self.dense, self.frozen, self.terms, leaf)
            loss.backward()  # type: ignore[no-untyped-call]

        return ours, reference

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.batch.slots_S.device.type, torch.bfloat16, self.shape.dtype == torch.bfloat16)

    def flops(self) -> float:
        """Multiply-adds times two that our step cannot avoid: forward and backward of every matrix product."""
        shape, slots = self.shape, int(self.batch.slots_S.numel())
        blocks = int(self.batch.anchors.index_A.numel()) * shape.block_size
        layer = sum(p.numel() for p in self.reference.layers.parameters() if p.ndim == 2)
        fc = self.reference.fc.weight.numel()
        head, rows = shape.hidden * shape.vocabulary, int(self.batch.rows_S.unique().numel())
        markov = shape.rank * shape.vocabulary
        return 2.0 * (3 * layer * blocks + 2 * fc * shape.tokens + 2 * head * slots + head * rows + 3 * markov * slots)


def make(shape: Shape, device: torch.device) -> Case:
    """Build inputs and drafters; everything is a function of the shape."""
    draw = torch.Generator().manual_seed(0)
    config = DraftConfig(
        kind="dspark", block_size=shape.block_size, layout="next_token", layers=shape.layers,
        hidden_size=shape.hidden, intermediate_size=3 * shape.hidden, heads=shape.hidden // 64,
        kv_heads=shape.hidden // 128, head_dim=64, activation="silu", rms_norm_eps=1e-6, attention_bias=False,
        rope={"rope_type": "default", "rope_theta": 1e6}, markov="vanilla", markov_rank=shape.rank, confidence=True,
        taps=True, target_layer_ids=tuple(range(shape.taps)), target_num_layers=shape.taps + 2,
        target_vocab_size=shape.vocabulary, draft_vocab_size=None, mask_token_id=shape.vocabulary - 1,
    )  # fmt: skip
    weight_VD = torch.randn(shape.vocabulary, shape.hidden, generator=draw).mul_(shape.hidden**-0.5)
    head = Head(weight_VD.to(device, shape.dtype))
    frozen = FrozenTensors(head.weight_VD, head, head, None)
    sample, recipe = _row(shape, draw), _recipe(shape)
    plan = plan_row(sample.id, sample.ids_T, sample.mask_T, recipe, 0)
    batch = pack([plan], [sample], recipe).to(device, shape.dtype)
    drafters = [build_drafter(config, seed=1).to(device) for _ in range(2)]
    for drafter in drafters:
        drafter.configure(attention="auto", device=device)
    settings = Train()
    ours = Objective(drafters[0], Terms.of(settings), shape.dtype)
    reference = drafters[1]
    assert isinstance(reference, BlockDrafter)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "ours": adamw(ours, settings),
        "reference": adamw(reference, settings),
    }
    dense = _dense(shape, batch, plan.anchors_A.numel(), recipe)
    return Case(shape, batch, dense, frozen, ours.terms, ours, reference, optimizers)


def _row(shape: Shape, draw: torch.Generator) -> Sample:
    ids = torch.randint(shape.vocabulary - 1, (shape.tokens,), generator=draw)
    mask = torch.zeros(shape.tokens, dtype=torch.bool)
    mask[shape.tokens - round(shape.supervised * shape.tokens) :] = True
    taps = torch.randn(shape.tokens, shape.taps, shape.hidden, generator=draw)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=draw).mul_(3.0)
    teacher = Teacher("last_hidden", torch.arange(shape.tokens), hidden_PD=hidden)
    return Sample("bench/0", "bench", 0, ids, mask, taps, teacher)


def _recipe(shape: Shape) -> Recipe:
    weights = position_weights(shape.block_size, 4.0)
    return Recipe(shape.block_size, shape.anchors, "generated", 0, weights, shape.vocabulary)


def _dense(shape: Shape, batch: MicroBatch, real: int, recipe: Recipe) -> bench_baseline.DenseBatch:
    """The same row for the reference: `shape.anchors` blocks, the missing ones padding of weight zero."""
    device = batch.slots_S.device
    more = shape.anchors - real

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values, values[:1].expand(more, *values.shape[1:])])

    anchors = batch.anchors
    slots_K = torch.arange(shape.block_size, device=device)
    at_AK = (anchors.index_A[:, None] + slots_K + 1).clamp(max=shape.tokens - 1)
    weights_AK = recipe.weights_K.to(device, torch.float32) * anchors.valid_AK
    weights_AK = torch.cat([weights_AK, weights_AK.new_zeros(more, shape.block_size)])
    assert hasattr(batch.teacher, "hidden_PD")
    return bench_baseline.DenseBatch(
        batch.context, padded(anchors.index_A), padded(anchors.previous_AK), padded(batch.context.ids_T[at_AK]),
        weights_AK, batch.teacher.hidden_PD,
    )  # fmt: skip
