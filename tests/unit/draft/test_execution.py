"""Options that change how a drafter computes and nothing else: attention, compilation, recomputation (DEP-04)."""

from __future__ import annotations

import pytest
import torch

from pipeline.draft.attention import AnchorPlan, choose_backend
from pipeline.draft.flex import attend_flex, block_mask
from pipeline.draft.interface import Drafter
from tests.conftest import Proof
from tests.unit.draft.drafts import FAMILY, anchors_at, frozen, member, packed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INDEX = [4, 1, 8, 9, 13, 25, 16, 20]


def outcome(drafter: Drafter, index: list[int]) -> list[torch.Tensor]:
    """Outputs and every parameter's gradient."""
    context = packed((9, 6, 11))
    out = drafter(context, anchors_at(context, index), frozen().embed_VD)
    parts = [x for x in (out.hidden_AKD, out.markov_AKr, out.confidence_AK) if x is not None]
    sum(part.sin().sum() for part in parts).backward()
    grads = [p.grad for p in drafter.parameters() if p.grad is not None]
    return [*(part.detach() for part in parts), *grads]


@pytest.mark.case("DEP-04")
def test_every_attention_choice_works_on_a_cpu_and_says_what_it_became() -> None:
    assert choose_backend("auto", CPU) == ("sdpa", "sdpa over shared prefixes: flex_attention has no backward on cpu")
    assert choose_backend("flex", CPU)[0] == "sdpa"
    assert choose_backend("eager", CPU) == ("eager", "eager, as configured")
    results = []
    for attention in ("auto", "flex", "sdpa", "eager"):
        drafter = member("dspark")
        assert drafter.configure(attention=attention, device=CPU)
        results.append(outcome(drafter, INDEX))
    for other in results[:3]:
        torch.testing.assert_close(other, results[3], rtol=1e-4, atol=1e-5)


@pytest.mark.case("DEP-04")
def test_without_triton_a_gpu_falls_back_and_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    assert choose_backend("flex", CUDA) == ("sdpa", "sdpa over shared prefixes: Triton is not installed")


@pytest.mark.parametrize("name", [n for n in FAMILY if n != "medusa"])
def test_recomputing_activations_changes_no_gradient(name: str) -> None:
    results = []
    for recompute in (False, True):
        drafter = member(name)
        drafter.configure(attention="sdpa", device=CPU, activation_checkpointing=recompute)
        results.append(outcome(drafter, INDEX))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_recomputing_keeps_fewer_activations() -> None:
    """Count the bytes autograd saves: with recomputation they hold the layers' inputs only."""
    held = []
    for recompute in (False, True):
        drafter, context, total = member("dspark", layers=4), packed((40, 40)), 0
        drafter.configure(attention="sdpa", device=CPU, activation_checkpointing=recompute)

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            drafter(context, anchors_at(context, list(range(2, 35))), frozen().embed_VD)
        held.append(total)
    assert held[1] < 0.4 * held[0]


@pytest.mark.parametrize("name", ["dspark", "eagle3", "medusa"])
def test_compilation_traces_every_kind_and_changes_only_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and run by dynamo; code generation itself is the next test."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: real(fn, **{**options, "backend": "eager"}))
    results = []
    for compiled in (False, True):
        drafter = member(name)
        drafter.configure(attention="sdpa", device=CPU, compile=compiled)
        results.append(outcome(drafter, INDEX))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert set(drafter.state_dict()) == set(member(name).state_dict())


@pytest.mark.prove
def test_compiled_code_equals_eager_code(proof: Proof) -> None:
    if not proof.full:
        pytest.skip("a minute of code generation: make prove")
    results = []
    for compiled in (False, True):
        drafter = member("dspark-gated")
        drafter.configure(attention="sdpa", device=CPU, compile=compiled)
        results.append(outcome(drafter, INDEX))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("queries", "own"), [(7, 7), (1, 3), (5, 5)])
def test_flex_masks_say_the_same_as_the_dense_mask(queries: int, own: int) -> None:
    """Ranges over 300 positions: every 128 × 128 block that flex computes, skips or takes whole is right."""
    generator = torch.Generator().manual_seed(2)
    stop = torch.randint(0, 150, (60,), generator=generator).sort().values
    start = torch.where(torch.arange(60) < 30, 0, 150)
    stop = stop + start
    dense = AnchorPlan.build(start, stop, backend="eager").dense_mask(queries, 300, own)
    mask = block_mask(start, stop, queries=queries, context=300, own=own)
    rows, columns = dense.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=torch.bool)
    padded[:rows, :columns] = dense
    tiles = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128).transpose(1, 2)
    some, every = tiles.flatten(2).any(-1), tiles.flatten(2).all(-1)
    for row in range(tiles.shape[0]):
        cut = set(mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist())
        whole = set(mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist())
        assert not cut & whole and whole <= set(every[row].nonzero().flatten().tolist())
        assert set(some[row].nonzero().flatten().tolist()) <= cut | whole
    q_idx, kv_idx = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    assert torch.equal(mask.mask_mod(None, None, q_idx, kv_idx), dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_itself_equals_the_dense_twin() -> None:
    """Its uncompiled form on the CPU, forward only."""
    generator = torch.Generator().manual_seed(2)
    start, stop = torch.tensor([0, 0, 40, 40]), torch.tensor([3, 30, 40, 77])
    q, own_k, own_v = (torch.randn(4, 5, heads, 16, generator=generator) for heads in (4, 2, 2))
    k, v = (torch.randn(80, 2, 16, generator=generator) for _ in range(2))
    plan = AnchorPlan.build(start, stop, backend="eager")
    with torch.no_grad():
        fast = attend_flex(q, k, v, own_k, own_v, block_mask(start, stop, queries=5, context=80, own=5))
    torch.testing.assert_close(fast, plan.attend(q, k, v, own_k, own_v), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dspark", "dflash-fill-in", "eagle3"])
def test_flex_equals_sdpa_on_a_gpu(name: str) -> None:
    results = []
    for attention in ("flex", "sdpa"):
        drafter = member(name).to(CUDA)
        drafter.configure(attention=attention, device=CUDA)
        assert drafter.execution.attention == attention
        context = packed((140, 300))
        for field in context.__dataclass_fields__:
            setattr(context, field, getattr(context, field).to(CUDA))
        anchors = anchors_at(context, [*range(3, 130, 4), *range(150, 420, 9)])
        out = drafter(context, anchors, frozen().embed_VD.to(CUDA))
        out.hidden_AKD.sin().sum().backward()
        results.append([out.hidden_AKD.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILY)
def test_bf16_autocast_stays_close_to_fp32(name: str) -> None:
    """Compute in bf16 under fp32 weights, as the trainer does: outputs within bf16's rounding, gradients finite."""
    drafter, context = member(name, spread=0.1), packed((9, 6, 11))
    anchors, embed = anchors_at(context, INDEX), frozen().embed_VD
    plain = drafter(context, anchors, embed).hidden_AKD
    context.taps_TLD, context.last_hidden_TD = context.taps_TLD.bfloat16(), context.last_hidden_TD.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = drafter(context, anchors, embed.bfloat16())
    assert out.hidden_AKD.dtype == torch.bfloat16 and out.confidence_AK.dtype == torch.float32
    assert (out.hidden_AKD - plain).norm() < 0.02 * plain.norm()
    (out.hidden_AKD.float().sum() + out.confidence_AK.sum()).backward()
    assert all(
        p.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None
    )
