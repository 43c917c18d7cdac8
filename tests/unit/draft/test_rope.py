"""Rotary positions: the target's base in either config form, and fp32 through every cast (S5, NUM-04, DEP-01)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.architecture import read_rope
from pipeline.draft.rope import Rope, inverse_frequencies, rotate
from pipeline.errors import ConfigError
from tests.unit.draft.drafts import anchors_at, frozen, member, packed

SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
]
BASE = {"rope_theta": 1_000_000.0, "max_position_embeddings": 4096, "hidden_size": 256, "num_attention_heads": 4}


@pytest.mark.parametrize("scaling", SCALED, ids=lambda s: f"{s['rope_type']}-{len(s)}")
def test_S5_scaling_equals_the_targets_own_rule(scaling: dict[str, Any]) -> None:
    """Against transformers' formulas, reached through the old form of the config."""
    mine, factor = inverse_frequencies(read_rope({**BASE, "rope_scaling": scaling}), 64)
    parameters = {"rope_theta": BASE["rope_theta"], "original_max_position_embeddings": 4096, **scaling}
    reference = SimpleNamespace(**BASE, head_dim=64, rope_parameters=parameters, standardize_rope_params=lambda: None)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, torch.device("cpu"))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert factor == pytest.approx(their_factor)


@pytest.mark.case("DEP-01")
@pytest.mark.parametrize(
    "target",
    [
        {"rope_theta": 1_000_000.0},
        {"rope_theta": 1_000_000.0, "rope_scaling": None},
        {"rope_theta": 1_000_000.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
        {"rope_parameters": {"rope_theta": 1_000_000.0}, "rope_theta": 10_000.0},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        },
    ],
)
def test_S5_base_is_read_from_old_and_new_configs(target: dict[str, Any]) -> None:
    assert read_rope(target) == {"rope_theta": 1_000_000.0, "rope_type": "default"}


@pytest.mark.case("DEP-01")
def test_S5_a_base_is_never_guessed() -> None:
    with pytest.raises(ConfigError, match="no rope_theta"):
        read_rope({"rope_parameters": {"rope_type": "default"}})
    with pytest.raises(ConfigError, match="'dynamic' is not supported"):
        inverse_frequencies({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 64)
    with pytest.raises(ConfigError, match="low_freq_factor is missing"):
        inverse_frequencies(
            {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 8, "factor": 2.0}, 64
        )


@pytest.mark.case("NUM-04")
def test_S5_tables_stay_fp32_through_casts_moves_and_a_reload() -> None:
    drafter = member("dspark")
    exact = 1.0 / 10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8) * 2048
    for cast in (drafter, drafter.to(torch.bfloat16), drafter.half(), drafter.to("cpu", torch.bfloat16)):
        assert cast.rope.inv_freq.dtype == torch.float32
        cos, sin = cast.rope.tables(torch.tensor([2048]))
        assert cos.dtype == sin.dtype == torch.float32
        torch.testing.assert_close(cos[0].double(), exact.cos(), rtol=0, atol=2e-4)
        torch.testing.assert_close(cos[0], torch.cos(2048.0 * inverse_frequencies(drafter.config.rope, 8)[0]))
    other = member("dspark", seed=5)
    other.load_state_dict(drafter.state_dict())
    assert other.rope.inv_freq.dtype == torch.float32
    assert not any("inv_freq" in name for name in drafter.state_dict())


@pytest.mark.case("NUM-04")
def test_S5_a_bf16_block_keeps_its_place_far_into_the_context() -> None:
    """Shift document and anchor by 2,048: relative distances are the same, so are the outputs, in bf16 too."""
    drafter, context = member("dspark", spread=0.1).bfloat16(), packed((12,), dtype=torch.bfloat16)
    embed_VD = frozen(dtype=torch.bfloat16).embed_VD
    near = drafter(context, anchors_at(context, [6, 9]), embed_VD).hidden_AKD
    context.positions_T += 2048
    far = drafter(context, anchors_at(context, [6, 9]), embed_VD).hidden_AKD
    assert (near - far).abs().max() < 0.1  # two bf16 steps at these sizes; rounded phases move it by more than 1


def test_rotation_keeps_lengths_and_leaves_the_unrotated_part_alone() -> None:
    rope = Rope({"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}, 8)
    x = torch.randn(5, 2, 8)
    turned = rotate(x, *rope.tables(torch.arange(5)))
    torch.testing.assert_close(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[0], x[0])
    torch.testing.assert_close(turned[..., :4].norm(dim=-1), x[..., :4].norm(dim=-1))
    assert not torch.allclose(turned[3], x[3])
