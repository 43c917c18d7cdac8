"""Mean acceptance after the target's own tokens: what training's `acceptance` curve means, on generated text (S23).

For every slot of some blocks, 1 - TV between the drafter's law and the target's when all tokens before the slot are the
target's own. Unlike the other two curves it needs no luck at earlier slots, so deep slots have data. Greedy: the share
of slots whose most likely tokens agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.draft.interface import Anchors, Context
from pipeline.speculative.verify import Law

ANCHORS = 16


@torch.inference_mode()
def acceptance_sums(
    target: Any, drafter: Any, prompt: Sequence[int], output: Sequence[int], law: Law
) -> list[list[float]]:
    """[sum, count] per slot over up to 16 blocks spread evenly over an output. Costs one forward of the target."""
    block_size = int(drafter.config.block_size)
    ids_T = torch.tensor([*prompt, *output], device=target.device)
    places = range(len(prompt), len(ids_T) - 1)
    if not len(places):
        return [[0.0, 0] for _ in range(block_size)]
    step = max(1, -(-len(places) // ANCHORS))
    index_A = torch.tensor(list(places[::step]), device=target.device)
    seen = target.forward(ids_T[None])
    at_AK = index_A[:, None] + torch.arange(block_size, device=target.device)
    valid_AK = at_AK < len(ids_T) - 1
    at_AK = at_AK.clamp(max=len(ids_T) - 1)
    context = Context(
        ids_T, torch.arange(len(ids_T), device=target.device), torch.zeros_like(ids_T), seen.taps_BTLD[0],
        seen.last_hidden_BTD[0],
    )  # fmt: skip
    anchors = Anchors(index_A, ids_T[at_AK], valid_AK)
    draft_NV = law.probs(_draft_logits(drafter, context, anchors, target.frozen)[valid_AK])
    target_NV = law.probs(target.frozen.logits(seen.last_hidden_BTD[0][at_AK[valid_AK]]))
    rows = drafter.rows
    shared_N = torch.minimum(draft_NV, target_NV if rows is None else target_NV[:, rows]).sum(-1)
    sums_AK = torch.zeros(valid_AK.shape, device=target.device).masked_scatter(valid_AK, shared_N)
    return [[float(total), int(count)] for total, count in zip(sums_AK.sum(0), valid_AK.sum(0), strict=True)]


def _draft_logits(drafter: Any, context: Context, anchors: Anchors, frozen: Any) -> Tensor:
    """fp32 logits [A, K, V or |D|] of a training forward."""
    embed_VD = frozen.embed_VD
    if frozen.embed_scale != 1.0:
        embed_VD = frozen.embed(torch.arange(len(embed_VD), device=embed_VD.device))
    output = drafter(context, anchors, embed_VD)
    hidden = output.hidden_AKD
    logits = frozen.logits(hidden.flatten(0, 1), drafter.rows).unflatten(0, hidden.shape[:2])
    if output.markov_AKr is not None:
        logits = logits + torch.nn.functional.linear(output.markov_AKr.float(), drafter.markov_w2.float())
    return logits
