"""Memory arithmetic against tensors that exist: what autograd keeps, what an optimizer holds, what a cache takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.config import Config, load
from pipeline.decoding.cache import RaggedCache
from pipeline.draft.build import build_drafter
from pipeline.draft.interface import Anchors, Context
from pipeline.operations.costs import memory
from pipeline.operations.costs.sizes import DraftSize, cache_row_bytes
from pipeline.operations.costs.work import Decoding, Training
from pipeline.shards.plan import Shape
from tests.unit.operations.test_cost_sizes import TARGET, draft_of

SHAPE = Shape.of(TARGET)
ROWS, LENGTH, ANCHORS = 3, 64, 24


def config(*overrides: str) -> Config:
    return load("configs/debug.yaml", ["work_dir=/tmp/nowhere", *overrides])


def kept_bytes(draft: Any, precision: str) -> int:
    """Bytes of distinct storages autograd saves in one training forward, parameters and inputs left out."""
    drafter = build_drafter(draft, seed=0)
    drafter.configure(attention="sdpa", device=torch.device("cpu"))
    dtype = getattr(torch, precision)
    tokens = ROWS * LENGTH
    embed = torch.randn(draft.target_vocab_size, draft.hidden_size).to(dtype)
    context = Context(
        torch.zeros(tokens, dtype=torch.long), torch.arange(LENGTH).repeat(ROWS),
        torch.arange(ROWS).repeat_interleave(LENGTH),
        torch.randn(tokens, len(draft.target_layer_ids), draft.hidden_size).to(dtype),
    )  # fmt: skip
    # The last anchor ends each row, so that every context position is seen by some block.
    index = torch.cat([torch.arange(LENGTH - ANCHORS, LENGTH) + LENGTH * row for row in range(ROWS)])
    block = (len(index), draft.block_size)
    anchors = Anchors(index, torch.zeros(block, dtype=torch.long), torch.ones(block).bool())
    known = {tensor.untyped_storage().data_ptr() for tensor in (embed, context.taps_TLD, *drafter.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"),
    ):
        output = drafter(context, anchors, embed)
    assert output.hidden_AKD.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [1, 3])
def test_activations_are_what_autograd_keeps(precision: str, layers: int) -> None:
    draft = draft_of("dspark", layers=layers, intermediate_size=160)
    blocks = ROWS * ANCHORS
    step = Training(1, ROWS, ROWS * LENGTH, blocks, blocks * draft.block_size, ROWS * LENGTH, 0)
    found = kept_bytes(draft, precision)
    copies = 2 * (DraftSize.of(draft).total - DraftSize.of(draft).small) if precision == "bfloat16" else 0
    expected = memory.activation_bytes(draft, precision, step, 1.0, recompute=False) + copies
    assert expected == pytest.approx(found, rel=0.25)


def test_recomputation_keeps_layer_inputs_only() -> None:
    draft, step = draft_of("dspark"), Training(1, 1, 100, 50, 350, 100, 0)
    whole, less = (memory.activation_bytes(draft, "float32", step, 1.0, recompute=flag) for flag in (False, True))
    assert less < 0.5 * whole


def test_engines_share_state_out() -> None:
    size, ranks = DraftSize.of(draft_of("dspark")), 8
    single, ddp, zero1, zero2, zero3, fsdp2 = (
        memory.state_bytes(engine, size, 3, ranks) for engine in ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
    )
    assert single == ddp
    assert sum(single.values()) == 16 * size.total
    assert zero1["moments"] == zero2["moments"] == zero3["moments"] == fsdp2["moments"] == single["moments"] / ranks
    assert zero1["gradients"] > single["gradients"] > zero2["gradients"]
    assert zero3["weights"] == single["weights"] / 4  # two copies of an eighth
    assert sum(fsdp2.values()) < sum(single.values()) / 2


def test_adamw_holds_what_is_counted() -> None:
    drafter = build_drafter(draft_of("dspark"), seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters())
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")
    assert memory.state_bytes("single", DraftSize.of(draft_of("dspark")), 3, 1)["moments"] == held


def test_the_cache_of_a_decoding_stage_is_the_ragged_cache_at_its_longest() -> None:
    run = Decoding(
        "float32", temperature=0.0, drafted=False, prompts=9, prompt_tokens=50.0, prefill_tokens=450, rounds=0.0,
        row_rounds=0.0, step_tokens=1, rows=4, context=60.0, longest=200, units=1,
    )  # fmt: skip
    parts = memory.decoding_memory(config(), SHAPE, draft_of("dspark"), run)
    cache = RaggedCache(SimpleNamespace(layer_types=None, sliding_window=None))
    cache.reserve(run.rows, run.longest)
    cache.place(torch.arange(3).expand(4, 3))
    for layer in range(SHAPE.layers):
        block = torch.zeros(4, SHAPE.kv_heads, 3, SHAPE.head_dim)
        cache.update(block, block, layer)
    assert parts["cache"] == cache.bytes() == 4 * 256 * cache_row_bytes(SHAPE, 4)


def test_a_smaller_micro_batch_holds_fewer_rows() -> None:
    step = Training(10, rows=64, context=64 * 100, anchors=64 * 16, slots=64 * 100, positions=64 * 50, validated_rows=0)
    shares = [
        memory.micro_batch_share(config(f"train.micro_batch_tokens={tokens}"), step, ranks)
        for tokens, ranks in ((8192, 1), (3200, 1), (1600, 2), (8192, 8))
    ]
    assert shares == [1.0, 0.5, 0.25, 0.125]
