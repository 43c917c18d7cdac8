"""Weights counted from a configuration are those of the modules that are built from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.config import Draft
from pipeline.draft.build import empty_drafter
from pipeline.draft.config import DraftConfig
from pipeline.draft.derive import derive_config
from pipeline.operations.costs.sizes import DraftSize, cache_row_bytes, target_parameters
from pipeline.shards.plan import Shape

TARGET: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 9, "vocab_size": 300, "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": True,
}  # fmt: skip


def draft_of(kind: str, **changes: Any) -> DraftConfig:
    markov = {"markov": "none"} if kind != "dspark" else {"markov_rank": 8}
    layers = 1 if kind in ("eagle3", "mtp") else 3
    mask_token_id = 299 if kind in ("dspark", "dflash") else None
    section = Draft(**{"kind": kind, "mask_token_id": mask_token_id, "layers": layers, **markov, **changes})
    return derive_config(TARGET, section, target_layer_ids=(1, 3, 5))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dspark", {}),
        ("dspark", {"markov": "gated"}),
        ("dspark", {"markov": "rnn", "confidence": False}),
        ("dspark", {"vocabulary": 120, "init": "target_layers"}),
        ("dspark", {"taps": False, "intermediate_size": 96, "heads": 4}),
        ("dflash", {"layout": "fill_in"}),
        ("eagle3", {"vocabulary": 64}),
        ("mtp", {}),
        ("medusa", {"layers": 2}),
    ],
)
def test_every_weight_is_counted(kind: str, changes: dict[str, Any]) -> None:
    draft = draft_of(kind, **changes)
    token_ids = None if draft.draft_vocab_size is None else torch.arange(draft.draft_vocab_size)
    built = empty_drafter(draft, token_ids)
    assert DraftSize.of(draft).total == sum(parameter.numel() for parameter in built.parameters())


def test_a_wider_block_costs_block_weights_only() -> None:
    base = DraftSize.of(draft_of("dspark"))
    wide = DraftSize.of(replace(draft_of("dspark"), intermediate_size=81))
    assert (wide.context, wide.markov_out) == (base.context, base.markov_out)
    assert wide.block - base.block == 3 * 3 * 48


def test_targets() -> None:
    """Against the published sizes: SmolLM2-135M 134.5 M (tied), Qwen3-8B 8.19 B, Qwen3-30B-A3B 30.5 B."""
    smollm = Shape(30, 576, 49_152, 9, 3, 64, 1536, tied=True)
    assert target_parameters(smollm) == 134_515_008
    assert cache_row_bytes(smollm, 2) == 23_040
    assert target_parameters(Shape(36, 4096, 151_936, 32, 8, 128, 12_288)) == pytest.approx(8.19e9, rel=0.002)
    sparse = Shape(48, 2048, 151_936, 32, 4, 128, 6144, experts_per_token=8, experts=128, expert_size=768)
    assert target_parameters(sparse) == pytest.approx(30.5e9, rel=0.005)
