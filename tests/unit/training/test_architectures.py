"""Every kind of target through training and decoding: embedding scale, soft-cap, tied heads, biases, experts."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from pipeline.config import Draft, Train
from pipeline.decoding.engine import decode
from pipeline.draft.build import build_drafter
from pipeline.draft.derive import derive_config
from pipeline.draft.from_target import init_from_target_layers
from pipeline.draft.interface import Drafter
from pipeline.kernels.products import Workspace
from pipeline.shards.record import Sample, Teacher
from pipeline.speculative.weights import position_weights
from pipeline.target import Target
from pipeline.training.microbatch import MicroBatch, Recipe, pack, plan_row
from pipeline.training.objective import FrozenTensors, Objective
from pipeline.training.optimizer import adamw
from pipeline.training.setup import frozen_tensors
from pipeline.training.terms import Terms
from tests.unit.test_target import CONFIGS

LAYERS, K, PROMPT, NEW = (0, 2), 4, 5, 28


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "gemma2", "gemma3", "qwen3-moe"])
def test_a_drafter_started_from_the_target_drafts_as_it_was_trained(name: str) -> None:
    """The law it is taught is the model's own, and every round of decoding accepts what the training forward says."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    target = Target(model, layers=LAYERS)
    target.check()
    prompt = [7, 300, 41, 12, 99]
    options = {"temperature": 0.0, "max_new_tokens": NEW, "stop_ids": (), "batch_size": 1, "seeds": [0]}
    own = decode(target, [prompt], **options)[0].ids

    ids_T = torch.tensor([*prompt, *own])
    seen = target.forward(ids_T[None])
    teacher = Teacher("last_hidden", torch.arange(len(ids_T)), hidden_PD=seen.last_hidden_BTD[0])
    mask_T = torch.arange(len(ids_T)) >= PROMPT
    sample = Sample("a", "own", 0, ids_T, mask_T, seen.taps_BTLD[0], teacher)

    settings = Draft(block_size=K, layers=1, mask_token_id=319, markov_rank=4, init="target_layers")
    described = target.config.to_dict()
    drafter = build_drafter(derive_config(described, settings, target_layer_ids=LAYERS), seed=0)
    notes = init_from_target_layers(drafter, model.state_dict(), (3,), target=described)
    assert ("mixture of experts" in " ".join(notes)) == (name == "qwen3-moe")

    recipe = Recipe(K, 99, "generated", 0, position_weights(K, 4.0), target.vocab_size)
    batch = pack([plan_row("a", ids_T, mask_T, recipe, 0)], [sample], recipe)
    frozen = frozen_tensors(target.frozen, None)
    torch.testing.assert_close(frozen.embed_VD, target.frozen.embed(torch.arange(target.vocab_size)))
    law = batch.teacher.law(torch.arange(len(ids_T)), None, torch.float32, frozen.head, Workspace(ids_T.device))
    with torch.no_grad():
        torch.testing.assert_close(law.dense_PC, model(ids_T[None]).logits[0].softmax(-1), rtol=1e-3, atol=1e-6)

    train = Train(learning_rate=1e-2)
    objective = Objective(drafter, Terms.of(train), torch.float32)
    optimizer, losses = adamw(objective, train), []
    for _ in range(40):
        loss, _ = objective(batch, frozen, 1 / float(batch.weights_S.sum()), 1 / float(batch.weights_S.sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]

    drafted = decode(target, [prompt], drafter=drafter.eval(), **options)[0]
    assert drafted.ids == own
    expected, anchor = [], PROMPT
    agrees_AK = _agreement(drafter, batch, frozen)
    while anchor + K < len(ids_T):
        expected.append(int(agrees_AK[anchor - PROMPT].long().cumprod(0).sum()))
        anchor += expected[-1] + 1
    assert [step.accepted for step in drafted.rounds[: len(expected)]] == expected
    assert sum(expected) > len(expected), "a drafter that accepts nothing would hide differences"


@torch.no_grad()
def _agreement(drafter: Drafter, batch: MicroBatch, frozen: FrozenTensors) -> Tensor:
    """Whether the training forward's most likely token of every slot is the data's, [A, K]."""
    out = drafter(batch.context, batch.anchors, frozen.embed_VD)
    logits = torch.nn.functional.linear(out.hidden_AKD, frozen.head.weight_VD) * frozen.head.scale
    if frozen.head.softcap is not None:
        logits = torch.tanh(logits / frozen.head.softcap) * frozen.head.softcap
    logits = logits + out.markov_AKr @ drafter.markov_w2.T
    at_AK = batch.anchors.index_A[:, None] + torch.arange(1, K + 1)
    return logits.argmax(-1) == batch.context.ids_T[at_AK.clamp(max=batch.tokens - 1)]
