"""The networks against plain formulas written from the rulings, one block and one token at a time (S3, S5, S16–S19)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.draft.interface import Drafter
from tests.unit.draft.drafts import anchors_at, frozen, member, packed

W = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turn(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head vector, channel pairs (i, i + d/2) by position · 10000^(−2i/d)."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position / 10000.0 ** (i / half)
        c, s = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def heads(w: W, layer: str, which: str, x: Tensor, position: int | None) -> list[Tensor]:
    parts = list((w[f"{layer}self_attn.{which}_proj.weight"] @ x).view(-1, 8))
    if position is None:
        return parts
    norm = w.get(f"{layer}self_attn.{which}_norm.weight")
    return [turn(part if norm is None else rms(part, norm), position) for part in parts]


def attend(w: W, layer: str, x: Tensor, position: int, seen: list[tuple[Tensor, int]]) -> Tensor:
    """One query over `seen` (input, position) pairs; query head h reads key/value head h // 2."""
    q = heads(w, layer, "q", x, position)
    k = [heads(w, layer, "k", other, at) for other, at in seen]
    v = [heads(w, layer, "v", other, None) for other, _ in seen]
    mixed = []
    for h in range(4):
        weights = torch.stack([q[h] @ k[j][h // 2] / math.sqrt(8) for j in range(len(seen))]).softmax(0)
        mixed.append(sum(weights[j] * v[j][h // 2] for j in range(len(seen))))
    return w[f"{layer}self_attn.o_proj.weight"] @ torch.cat(mixed)


def mlp(w: W, layer: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return down @ (F.silu(gate @ x) * (up @ x))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_its_formula(activation: str) -> None:
    layer: Any = member("dspark", activation=activation).layers[0]
    x = torch.randn(32, generator=torch.Generator().manual_seed(4))
    gate = [ACTIVATIONS[activation](value) for value in (layer.mlp.gate_proj.weight @ x).tolist()]
    expected = layer.mlp.down_proj.weight @ (torch.tensor(gate) * (layer.mlp.up_proj.weight @ x))
    torch.testing.assert_close(layer.mlp(x), expected, rtol=1e-5, atol=1e-6)


def weights_of(drafter: Drafter) -> W:
    return {name: tensor.detach() for name, tensor in drafter.state_dict().items()}


@pytest.mark.parametrize("name", ["dspark", "dflash-fill-in"])
def test_S3_S5_a_block_equals_the_plain_formula(name: str) -> None:
    drafter, context, embed = member(name).double(), packed((9, 6), dtype=torch.float64), frozen().embed_VD.double()
    out = drafter(context, anchors_at(context, [12]), embed).hidden_AKD[0].detach()
    w, fill = weights_of(drafter), name.endswith("fill-in")
    features = [
        (rms(w["fc.weight"] @ context.taps_TLD[t].flatten(), w["hidden_norm.weight"]), t - 9) for t in (9, 10, 11)
    ]
    hidden = [embed[token] for token in [int(context.ids_T[12]), *[49] * (4 if fill else 3)]]
    for layer in ("layers.0.", "layers.1."):
        inputs = [(rms(h, w[f"{layer}input_layernorm.weight"]), 3 + i) for i, h in enumerate(hidden)]
        hidden = [h + attend(w, layer, x, at, features + inputs) for h, (x, at) in zip(hidden, inputs, strict=True)]
        hidden = [h + mlp(w, layer, rms(h, w[f"{layer}post_attention_layernorm.weight"])) for h in hidden]
    expected = torch.stack([rms(h, w["norm.weight"]) for h in hidden[1 if fill else 0 :]])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # rotary tables are fp32


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_an_unrolled_block_equals_a_plain_causal_pass(name: str) -> None:
    """Entry p joins the target's state at p with token p + 1 and sits at p; slot 1 of anchor a is entry a − 1."""
    drafter, context, embed = member(name).double(), packed((9, 6), dtype=torch.float64), frozen().embed_VD.double()
    anchors = anchors_at(context, [3])
    out = drafter(context, anchors, embed).hidden_AKD[0].detach()
    w, layer, expected = weights_of(drafter), "layers.0.", []

    def entry(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        if name == "eagle3":
            sides = (
                rms(embed[token], w[f"{layer}input_layernorm.weight"]),
                rms(state, w[f"{layer}hidden_norm.weight"]),
            )
            return state, torch.cat(sides)
        sides = (rms(embed[token], w["pre_fc_norm_embedding.weight"]), rms(state, w["pre_fc_norm_hidden.weight"]))
        residual = w["fc.weight"] @ torch.cat(sides)
        return residual, rms(residual, w[f"{layer}input_layernorm.weight"])

    def known(p: int) -> Tensor:
        return w["fc.weight"] @ context.taps_TLD[p].flatten() if name == "eagle3" else context.last_hidden_TD[p]

    seen = [(entry(known(p), int(context.ids_T[p + 1]))[1], p) for p in range(2)]
    state = known(2)
    for k in range(4):
        residual, x = entry(state, int(anchors.previous_AK[0, k]))
        seen.append((x, 2 + k))
        hidden = residual + attend(w, layer, x, 2 + k, seen)
        hidden = hidden + mlp(w, layer, rms(hidden, w[f"{layer}post_attention_layernorm.weight"]))
        expected.append(rms(hidden, w["norm.weight"]))
        state = hidden if name == "eagle3" else expected[-1]
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_medusa_heads_read_the_state_before_the_anchor_and_nothing_else() -> None:
    drafter, context = member("medusa"), packed((9, 6))
    out = drafter(context, anchors_at(context, [12]), frozen().embed_VD).hidden_AKD[0].detach()
    w, h = weights_of(drafter), context.last_hidden_TD[11]
    for k in range(4):
        head = f"medusa_head.{k}.0.linear."
        torch.testing.assert_close(out[k], h + F.silu(w[f"{head}weight"] @ h + w[f"{head}bias"]))


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_S16_S17_S18_the_bias_vectors_equal_the_plain_formulas(markov: str) -> None:
    drafter, context, embed = member("dspark", markov=markov), packed((9, 6)), frozen().embed_VD
    anchors = anchors_at(context, [3, 11])
    out = drafter(context, anchors, embed)
    w, rank = weights_of(drafter), 6
    for a in range(2):
        s = torch.zeros(rank)
        for k in range(4):
            x, h = w["markov_head.markov_w1.weight"][anchors.previous_AK[a, k]], out.hidden_AKD[a, k].detach()
            e = x
            if markov == "gated":
                gate, bias = w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"]
                e = torch.sigmoid(gate @ torch.cat([h, x]) + bias) * x
            if markov == "rnn":
                z = w["markov_head.joint_proj.weight"] @ torch.cat([s, x, h]) + w["markov_head.joint_proj.bias"]
                g, c, o = z.split(rank)
                s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
                e = torch.tanh(o)
            torch.testing.assert_close(out.markov_AKr[a, k].detach(), e, rtol=1e-4, atol=1e-5)
    assert drafter.markov_head.markov_w2.bias is None


@pytest.mark.parametrize("name", ["dspark", "dspark-gated", "dflash"])
def test_S19_confidence_reads_the_state_and_the_previous_tokens_row(name: str) -> None:
    drafter, context = member(name), packed((9, 6))
    anchors = anchors_at(context, [3, 11])
    out = drafter(context, anchors, frozen().embed_VD)
    features = out.hidden_AKD
    if name != "dflash":
        features = torch.cat([features, drafter.markov_head.markov_w1.weight[anchors.previous_AK]], dim=-1)
    expected = F.linear(features, drafter.confidence_head.proj.weight, drafter.confidence_head.proj.bias)[..., 0]
    torch.testing.assert_close(out.confidence_AK, expected)
    assert out.confidence_AK.dtype == torch.float32


@pytest.mark.case("NUM-07")
@pytest.mark.parametrize("name", ["dspark", "dspark-rnn", "dflash", "eagle3", "medusa"])
@pytest.mark.parametrize("detach", [False, True])
def test_S12_confidence_reaches_the_backbone_unless_detached(name: str, detach: bool) -> None:
    drafter, context = member(name), packed((9, 6))
    out = drafter(context, anchors_at(context, [3, 11]), frozen().embed_VD, detach_confidence=detach)
    out.confidence_AK.sum().backward()
    touched = {n.split(".")[0] for n, p in drafter.named_parameters() if p.grad is not None and p.grad.any()}
    backbone = {"eagle3": {"layers", "fc", "norm"}, "medusa": {"medusa_head"}}.get(
        name, {"layers", "fc", "norm", "hidden_norm", *(["markov_head"] if name != "dflash" else [])}
    )
    assert touched == ({"confidence_head"} if detach else {"confidence_head", *backbone})


@pytest.mark.case("NUM-08")
@pytest.mark.parametrize(("name", "first_input"), [("dflash", 0), ("dflash-fill-in", 1)])
def test_S1_slot_one_is_the_first_predicting_input_of_its_layout(name: str, first_input: int) -> None:
    """Next-token: the anchor's own input predicts slot 1. Fill-in: the first mask's does, the anchor's nothing."""
    drafter, context, head = member(name), packed((9, 6)), frozen()
    assert drafter.config.first_output == first_input
    anchors = anchors_at(context, [3])
    captured = []
    drafter.norm.register_forward_hook(lambda module, inputs, output: captured.append(inputs[0]))
    drafter.layers[-1].register_forward_hook(lambda module, inputs, output: captured.append(output))
    out = drafter(context, anchors, head.embed_VD)
    all_inputs = captured[0]
    assert torch.equal(captured[1], all_inputs[:, first_input:]) and out.hidden_AKD.shape[1] == 4
