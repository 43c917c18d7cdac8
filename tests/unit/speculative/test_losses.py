"""The fused slot loss against its eager twin (S11, S12, S15, S30), and what it must not do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.speculative import losses
from pipeline.speculative.eager import slot_loss_eager, target_probs
from pipeline.speculative.losses import SlotWeights, chunk_bounds, slot_loss
from pipeline.speculative.teacher import DraftVocabulary, FullTeacher, Head, HiddenTeacher, TopTeacher

V, D, R, P, S = 211, 24, 6, 30, 61


def problem(
    *,
    dtype: torch.dtype = torch.float64,
    source: str = "topk",
    words: int | None = None,
    markov: bool = True,
    softcap: float | None = None,
    divergence: str = "tv",
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments of the slot loss; values are bf16-exact, so that every dtype sees the same numbers."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).bfloat16().double()

    head = Head(normal(V, D), scale=0.75, softcap=softcap)
    hidden_PD = normal(P, D)
    full = HiddenTeacher(hidden_PD)
    if source == "topk":
        logp = torch.log(target_probs(full, torch.arange(P), head, torch.float64))
        top, ids = logp.topk(9, dim=1)
        teacher: Any = TopTeacher(ids.int(), top, torch.log1p(-top.exp().sum(1)), V)
    elif source == "full":
        teacher = FullTeacher(normal(P, V, scale=2.0))
    else:
        teacher = full
    vocabulary = (
        None if words is None else DraftVocabulary.of(torch.randperm(V, generator=draw)[:words].sort().values, V)
    )
    rows = torch.randint(P, (S,), generator=draw).sort().values
    labels = torch.randint(V, (S,), generator=draw)
    labels = labels if vocabulary is None else vocabulary.labels(labels)
    weight = torch.rand(S, generator=draw, dtype=torch.float64)
    weight[::7] = 0
    arguments = {
        "hidden_SD": normal(S, D),
        "markov_Sr": normal(S, R) if markov else None,
        "w2_Cr": normal(V if words is None else words, R) if markov else None,
        "draft_head": head.rows(vocabulary),
        "target_head": head,
        "teacher": teacher,
        "words": vocabulary,
        "rows_S": rows,
        "labels_S": labels,
        "weights": SlotWeights(0.1 * weight * (labels >= 0), 0.9 * weight),
        "divergence": divergence,
    }
    return {name: cast(value, dtype) for name, value in arguments.items()}


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, SlotWeights):
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        return SlotWeights(value.ce_S.to(wide), value.divergence_S.to(wide))
    if isinstance(value, TopTeacher):
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        return dataclasses.replace(value, logprobs_Pn=value.logprobs_Pn.to(wide), tail_P=value.tail_P.to(wide))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: cast(getattr(value, f.name), dtype) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def run(function: Any, arguments: dict[str, Any], **changes: Any) -> dict[str, Tensor]:
    """Loss, statistics and gradients."""
    names = [name for name in ("hidden_SD", "markov_Sr", "w2_Cr") if arguments[name] is not None]
    leaves = {name: arguments[name].clone().requires_grad_() for name in names}
    loss, statistics = function(**{**arguments, **leaves, **changes})
    loss.backward()
    found = {"loss": loss.detach(), "ce": statistics.ce_S, "c*": statistics.acceptance_S}
    found |= {"greedy": statistics.greedy_S, "outside": statistics.outside_S, "divergence": statistics.divergence_S}
    return found | {f"d_{name}": leaves[name].grad for name in names}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


VARIANTS = [
    {"source": source, "words": words, "markov": markov}
    for source in ("topk", "last_hidden", "full")
    for words in (None, 50)
    for markov in (True, False)
] + [{"softcap": 5.0, "words": 50}, {"divergence": "kl"}, {"divergence": "kl", "words": 50, "source": "last_hidden"}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_the_eager_twin_in_fp64(variant: dict[str, Any]) -> None:
    """S11, S12, S30: value, statistics and every gradient to 1e-9."""
    arguments = problem(**variant)
    expected = run(slot_loss_eager, arguments)
    found = run(slot_loss, arguments, chunk=17)
    for name, value in expected.items():
        assert distance(found[name], value) < 1e-9, name


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_the_eager_twin_in_fp32(variant: dict[str, Any]) -> None:
    """S15: fp32 against the fp64 formulas, 1e-5 on the concatenated gradient."""
    expected = run(slot_loss_eager, problem(**variant))
    found = run(slot_loss, problem(dtype=torch.float32, **variant), chunk=17)
    gradients = [name for name in expected if name.startswith("d_")]
    joined = [torch.cat([values[name].double().flatten() for name in gradients]) for values in (found, expected)]
    assert distance(*joined) < 1e-5
    for name in ("loss", "ce", "c*"):
        assert distance(found[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("source", ["topk", "full"])
@pytest.mark.parametrize("left", [1e-6, 1e-9, 0.0])
def test_kl_holds_where_a_sure_target_leaves_the_draft_vocabulary_next_to_nothing(source: str, left: float) -> None:
    """S30: fp32 cannot tell 1 - 1e-9 from 1; the law inside D comes from its own mass, uniform where that is zero."""
    wide = problem(source="full", words=50, divergence="kl")
    outside = (wide["words"].t2d_V < 0).nonzero().flatten()
    if source == "topk":
        top = torch.full((P, 9), -math.inf, dtype=torch.float64)
        top[:, 0], tail = math.log1p(-left), torch.full((P,), math.log(left) if left else -math.inf).double()
        wide["teacher"] = TopTeacher(outside[:9].repeat(P, 1), top, tail, V)
    else:
        logits_PV = wide["teacher"].logits_PV
        logits_PV[:, outside[0]] = logits_PV.logsumexp(1) + (math.log(1 / left) if left else 400.0)
    narrow = {name: cast(value, torch.float32) for name, value in wide.items()}
    expected = run(slot_loss_eager, narrow if left == 0.0 else wide)
    for name, value in run(slot_loss, narrow, chunk=17).items():
        if name.startswith(("loss", "divergence", "d_")):
            assert distance(value, expected[name]) < 1e-5, name


def test_nothing_is_differentiated_where_no_gradient_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation runs under no_grad: W2 is a parameter there too, and its gradient would cost as much as the loss."""
    monkeypatch.setattr(losses._Accumulator, "spread", None)
    arguments = problem()
    arguments["w2_Cr"].requires_grad_()
    with torch.no_grad():
        found = slot_loss(**arguments)[0]
    assert torch.equal(found, slot_loss(**{**arguments, "w2_Cr": arguments["w2_Cr"].detach()})[0])
    with pytest.raises(TypeError):
        slot_loss(**arguments)


@pytest.mark.parametrize("variant", [*VARIANTS, {"softcap": 5.0}], ids=str)
def test_bf16_inputs_lose_less_than_one_percent(variant: dict[str, Any]) -> None:
    """S15: statistics stay fp32 whatever the compute dtype."""
    expected = run(slot_loss_eager, problem(**variant))
    found = run(slot_loss, problem(dtype=torch.bfloat16, **variant))
    for name, value in expected.items():
        if name != "greedy":
            assert distance(found[name], value) < 0.01, name


@pytest.mark.case("NUM-03")
def test_a_drafter_close_to_its_teacher_keeps_exact_gradients_in_bf16() -> None:
    """With p_d almost p_t the sign of the difference decides the gradient: bf16 logits would get it wrong."""
    draw = torch.Generator().manual_seed(3)
    head = Head((torch.randn(4096, 64, generator=draw) * 0.5).bfloat16())
    hidden = torch.randn(40, 64, generator=draw).bfloat16()
    near = (hidden.float() + 0.05 * torch.randn(40, 64, generator=draw)).bfloat16()
    common = {
        "markov_Sr": None, "w2_Cr": None, "words": None, "rows_S": torch.arange(40),
        "labels_S": torch.zeros(40, dtype=torch.long), "weights": SlotWeights(torch.zeros(40), torch.ones(40)),
    }  # fmt: skip
    narrow = {**common, "hidden_SD": near, "draft_head": head, "target_head": head, "teacher": HiddenTeacher(hidden)}
    wide = {name: cast(value, torch.float64) for name, value in narrow.items()}
    assert distance(run(slot_loss, narrow)["d_hidden_SD"], run(slot_loss_eager, wide)["d_hidden_SD"]) < 0.01


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize("source", ["topk", "last_hidden"])
def test_any_chunk_size_gives_the_same(chunk: int, source: str) -> None:
    arguments = problem(source=source, words=50)
    expected = run(slot_loss, arguments, chunk=S)
    for name, value in run(slot_loss, arguments, chunk=chunk).items():
        assert distance(value, expected[name]) < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("variant", [{}, {"softcap": 5.0}, {"divergence": "kl", "words": 50, "source": "last_hidden"}])
def test_any_tile_size_gives_the_same(variant: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = problem(dtype=dtype, **variant)
    expected = run(slot_loss, arguments, chunk=17)
    monkeypatch.setattr("pipeline.speculative.teacher.TILE_ELEMENTS", 64)
    for name, value in run(slot_loss, arguments, chunk=17).items():
        assert distance(value, expected[name]) < (1e-12 if dtype == torch.float64 else 1e-5), name


def test_chunks_never_split_a_teacher_row() -> None:
    rows = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3])
    for chunk in (1, 3, 4, 100):
        bounds = chunk_bounds(rows, chunk, 8)
        assert [start for start, _ in bounds] == [0, *[end for _, end in bounds[:-1]]] and bounds[-1][1] == 11
        assert all(rows[end - 1] != rows[end] for _, end in bounds[:-1])
    assert chunk_bounds(rows[:0], 4, 8) == []


def test_zero_weight_slots_have_zero_gradient() -> None:
    """S9: what does not count gives exactly nothing."""
    arguments = problem(words=50)
    gradient = run(slot_loss, arguments)["d_hidden_SD"]
    assert torch.equal(gradient[::7], torch.zeros_like(gradient[::7])) and gradient[1].abs().sum() > 0


@pytest.mark.case("NUM-12")
def test_no_slots_give_an_exact_zero_with_a_graph() -> None:
    arguments = problem()
    empty = {
        name: value[:0] for name, value in arguments.items() if name in ("hidden_SD", "markov_Sr", "rows_S", "labels_S")
    }
    weights = SlotWeights(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    found = run(slot_loss, {**arguments, **empty, "weights": weights})
    assert found["loss"] == 0 and torch.equal(found["d_w2_Cr"], torch.zeros_like(arguments["w2_Cr"]))


def test_metrics_agree_with_their_definitions() -> None:
    """S12, S30: c* = sum of min(p_d, p_t) over D, with the target's full mass."""
    arguments = problem(source="last_hidden", words=50)
    statistics = slot_loss(**arguments)[1]
    p_t = target_probs(arguments["teacher"], arguments["rows_S"], arguments["target_head"], torch.float64)
    z = arguments["hidden_SD"] @ arguments["draft_head"].weight_VD.t() * 0.75
    p_d = torch.softmax(z + arguments["markov_Sr"] @ arguments["w2_Cr"].t(), -1)
    torch.testing.assert_close(statistics.acceptance_S, torch.minimum(p_d, p_t[:, arguments["words"].ids_C]).sum(-1))


def test_the_tail_of_cached_logits_is_spread_evenly() -> None:
    """S11: n kept tokens and the mass m of the rest over V - n tokens; the error of TV/2 is at most the tail mass."""
    exact, cached = problem(source="last_hidden"), problem(source="topk")
    c_exact, c_cached = slot_loss(**exact)[1].acceptance_S, slot_loss(**cached)[1].acceptance_S
    tail = cached["teacher"].tail_mass()[cached["rows_S"]]
    assert ((c_exact - c_cached).abs() <= tail + 1e-12).all() and (c_exact - c_cached).abs().max() > 0
