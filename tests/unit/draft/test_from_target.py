"""Draft layers that start as target layers: what is copied, adapted, left out and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.draft.from_target import init_from_target_layers, last_layers, needed_tensors
from pipeline.draft.interface import Drafter
from pipeline.errors import ConfigError
from tests.unit.draft.drafts import member

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu"}
SHAPES = {
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
}
QK = {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}


def target(extra: dict[str, tuple[int, ...]] | None = None, *, prefix: str = "model.") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {**SHAPES, **(extra or {})}
    made = {
        f"{prefix}layers.{i}.{name}": torch.rand(shape, generator=generator) + 0.5
        for i in range(6)
        for name, shape in shapes.items()
    }
    return {**made, f"{prefix}norm.weight": torch.rand(32, generator=generator), "lm_head.weight": torch.ones(50, 32)}


def start(name: str, tensors: dict[str, Tensor], config: dict[str, Any], **changes: Any) -> tuple[Drafter, list[str]]:
    drafter = member(name, **changes)
    ids = last_layers(6, drafter.config.layers)
    wanted = needed_tensors(tensors, ids)
    return drafter, init_from_target_layers(drafter, {n: tensors[n] for n in wanted}, ids, target=config)


def test_layers_and_final_norm_are_copied_in_order() -> None:
    tensors = target(QK)
    drafter, notes = start("dspark", tensors, {**LLAMA, "model_type": "qwen3"})
    assert notes == []
    for draft, layer in ((0, 4), (1, 5)):
        for name in {**SHAPES, **QK}:
            copied = drafter.get_parameter(f"layers.{draft}.{name}")
            assert torch.equal(copied, tensors[f"model.layers.{layer}.{name}"]), name
    assert torch.equal(drafter.norm.weight, tensors["model.norm.weight"])


def test_context_features_start_as_the_last_tap_normed_like_the_layers_input() -> None:
    tensors = target(QK)
    drafter, _ = start("dspark", tensors, LLAMA)
    taps = torch.randn(5, 3, 32)
    expected = F.rms_norm(taps[:, -1], (32,), tensors["model.layers.4.input_layernorm.weight"], 1e-6)
    torch.testing.assert_close(drafter.features(taps), expected)


def test_a_target_without_head_norms_keeps_the_size_of_its_scores() -> None:
    """Random normed inputs through the copied projections: attention scores spread as the target's own would."""
    tensors = target()
    generator = torch.Generator().manual_seed(1)
    for name in tensors:
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = torch.randn(tensors[name].shape, generator=generator) * 0.4
    drafter, _ = start("dspark", tensors, LLAMA)
    x = F.rms_norm(torch.randn(400, 32), (32,), tensors["model.layers.4.input_layernorm.weight"])
    attention, still = drafter.layers[0].self_attn, (torch.ones(400, 4), torch.zeros(400, 4))
    with torch.no_grad():
        q, (k, _) = attention.queries(x, still), attention.keys_values(x, still)
    plain_q = F.linear(x, tensors["model.layers.4.self_attn.q_proj.weight"]).unflatten(-1, (4, 8))
    plain_k = F.linear(x, tensors["model.layers.4.self_attn.k_proj.weight"]).unflatten(-1, (2, 8))
    ours, theirs = torch.einsum("ahd,bd->ab", q, k[:, 0]), torch.einsum("ahd,bd->ab", plain_q, plain_k[:, 0])
    assert (ours.std() / theirs.std()).item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "transformer."])
def test_layers_are_found_under_any_prefix_and_never_in_a_vision_tower(prefix: str) -> None:
    tensors = target(QK, prefix=prefix)
    tensors |= {f"vision_tower.layers.5.{n}": torch.zeros(s) for n, s in SHAPES.items()}
    tensors["vision_tower.norm.weight"] = torch.zeros(32)
    drafter, _ = start("dspark", tensors, LLAMA)
    assert torch.equal(drafter.layers[1].mlp.up_proj.weight, tensors[f"{prefix}layers.5.mlp.up_proj.weight"])
    assert torch.equal(drafter.norm.weight, tensors[f"{prefix}norm.weight"])


def test_gemma_norms_become_ours() -> None:
    """Stored as an offset from one, with a norm of their own before the MLP, and scores with their own divisor."""
    extra = {**QK, "pre_feedforward_layernorm.weight": (32,), "post_feedforward_layernorm.weight": (32,)}
    tensors = target(extra)
    config = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32}
    drafter, notes = start("dspark", tensors, config, activation="gelu_pytorch_tanh")
    layer, source = drafter.layers[1], "model.layers.5."
    torch.testing.assert_close(layer.input_layernorm.weight, 1 + tensors[f"{source}input_layernorm.weight"])
    torch.testing.assert_close(
        layer.post_attention_layernorm.weight, 1 + tensors[f"{source}pre_feedforward_layernorm.weight"]
    )
    torch.testing.assert_close(layer.self_attn.q_norm.weight, (1 + tensors[f"{source}self_attn.q_norm.weight"]) / 2)
    torch.testing.assert_close(layer.self_attn.k_norm.weight, 1 + tensors[f"{source}self_attn.k_norm.weight"])
    torch.testing.assert_close(drafter.norm.weight, 1 + tensors["model.norm.weight"])
    assert notes == ["norms after attention and MLP are left out: the draft layer has none"]


def test_biases_are_copied_dropped_when_zero_and_refused_otherwise() -> None:
    """Qwen2's; a drafter without places for them only takes the twin whose biases are zero."""
    biases = {"self_attn.q_proj.bias": (32,), "self_attn.k_proj.bias": (16,), "self_attn.v_proj.bias": (16,)}
    tensors, config = target(biases), {**LLAMA, "model_type": "qwen2"}
    drafter, _ = start("dspark", tensors, config, attention_bias=True)
    assert torch.equal(drafter.layers[0].self_attn.k_proj.bias, tensors["model.layers.4.self_attn.k_proj.bias"])
    with pytest.raises(ConfigError, match=r"k_proj\.bias is not zero and this drafter has no place for it"):
        start("dspark", tensors, config)
    start("dspark", {n: t * 0 if n.endswith("bias") else t for n, t in tensors.items()}, config)


def test_experts_leave_the_mlp_at_random_and_say_so() -> None:
    tensors = target({**QK, "mlp.experts.0.up_proj.weight": (4, 32), "mlp.gate.weight": (2, 32)})
    tensors = {n: t for n, t in tensors.items() if ".mlp.up_proj" not in n}
    before = member("dspark").layers[0].mlp.up_proj.weight
    drafter, notes = start("dspark", tensors, {**LLAMA, "model_type": "qwen3_moe"})
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, before)
    assert notes == ["the layer is a mixture of experts: its MLP starts at random"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 40}, r"mlp.gate_proj.weight is \(48, 32\) in the target, the drafter's is \(40, 32\)"),
        ({"kv_heads": 1}, r"self_attn.k_proj.weight is \(16, 32\) in the target, the drafter's is \(8, 32\)"),
        ({"activation": "relu"}, "the target's activation is silu, the drafter's relu"),
    ],
)
def test_sizes_that_differ_are_refused_before_anything_is_changed(change: dict[str, Any], message: str) -> None:
    drafter = member("dspark", **change)
    before = {n: p.clone() for n, p in drafter.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        init_from_target_layers(drafter, target(QK), (4, 5), target=LLAMA)
    assert all(torch.equal(p, before[n]) for n, p in drafter.named_parameters())


def test_wrong_layers_and_kinds_without_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 draft layers need as many target layers"):
        init_from_target_layers(member("dspark"), target(QK), (5,), target=LLAMA)
    with pytest.raises(ConfigError, match="the target has no layer 9"):
        init_from_target_layers(member("dspark"), target(QK), (5, 9), target=LLAMA)
    with pytest.raises(ConfigError, match="kind medusa has no layers"):
        init_from_target_layers(member("medusa"), target(QK), (5,), target=LLAMA)
    with pytest.raises(ConfigError, match=r"no mlp\.up_proj\.weight"):
        init_from_target_layers(
            member("mtp"), {n: t for n, t in target(QK).items() if "up_proj" not in n}, (5,), target=LLAMA
        )


def test_eagle3_takes_the_layer_into_the_half_that_reads_features() -> None:
    tensors = target()
    random = member("eagle3").layers[0].self_attn.q_proj.weight[:, :32]
    drafter, notes = start("eagle3", tensors, LLAMA)
    weight = drafter.layers[0].self_attn.q_proj.weight
    assert torch.equal(weight[:, 32:], tensors["model.layers.5.self_attn.q_proj.weight"])
    assert torch.equal(weight[:, :32], random) and notes == []
    drafter, notes = start("eagle3", target(QK), {**LLAMA, "model_type": "qwen3"})
    assert notes == [f"the target's {n}_norm is left out: this drafter's layer has none" for n in ("q", "k")]


@pytest.mark.parametrize("name", ["dspark-no-taps", "dflash-fill-in", "mtp", "eagle3"])
def test_every_kind_with_layers_starts_from_the_target(name: str) -> None:
    tensors = target()
    drafter, _ = start(name, tensors, LLAMA)
    assert torch.equal(
        drafter.layers[0].mlp.down_proj.weight, tensors[f"model.layers.{6 - len(drafter.layers)}.mlp.down_proj.weight"]
    )
