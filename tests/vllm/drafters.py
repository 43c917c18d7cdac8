"""A random target whose greedy text never settles, and drafters fitted to it in seconds.

They are fitted to the very prompts they are measured on. That is the point: the counts of two engines can only be
compared where many tokens are accepted, and on text without repetition they are accepted for the hidden states' sake,
so that a slip in a convention (layer ids, positions, slots, norms) shows as a lower count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import Draft
from pipeline.decoding.engine import Generation, decode
from pipeline.draft.build import build_drafter
from pipeline.draft.derive import derive_config
from pipeline.draft.interface import Anchors, Context, Drafter
from pipeline.target import Target

LAYERS = (0, 1, 2, 4)  # four, because readers of Eagle3 take an unstated number to be three
VOCABULARY, MASK = 512, 511
PROMPTS, NEW_TOKENS, BLOCK = 8, 48, 4


@dataclass(frozen=True)
class Case:
    """The target, the prompts' ids, and the target's own greedy answers."""

    folder: Path
    target: Target
    prompts: list[list[int]]
    answers: list[Generation]

    def counts(self, drafter: Drafter) -> tuple[int, int]:
        """(rounds, accepted draft tokens) of our engine; its outputs must be the target's own."""
        found = greedy(self.target, self.prompts, drafter)
        assert [each.ids for each in found] == [each.ids for each in self.answers]
        rounds = [step for each in found for step in each.rounds]
        return len(rounds), sum(step.accepted for step in rounds)


def greedy(target: Target, prompts: list[list[int]], drafter: Drafter | None = None) -> list[Generation]:
    return decode(
        target,
        prompts,
        drafter=drafter,
        temperature=0.0,
        max_new_tokens=NEW_TOKENS,
        stop_ids=set(),
        batch_size=PROMPTS,
        seeds=[0] * len(prompts),
    )


def make_case(folder: Path) -> Case:
    """Six layers, heads of 32 (the smallest vLLM's CPU attention runs), weights large enough for restless text."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], dtype="float32", vocab_size=VOCABULARY, hidden_size=64,
            intermediate_size=128, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.15, eos_token_id=1,
            pad_token_id=0,
        )
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, MASK, (12,), generator=generator).tolist() for _ in range(PROMPTS)]
    target = Target(model, layers=LAYERS)
    return Case(folder, target, prompts, greedy(target, prompts))


def fit(case: Case, *, steps: int = 60, **changes: Any) -> Drafter:
    """A drafter fitted to the case's answers by cross-entropy on every anchor."""
    draft = Draft(**{"block_size": BLOCK, "layers": 2, "markov_rank": 16, "mask_token_id": MASK, **changes})
    shape = derive_config(case.target.config.to_dict(), draft, target_layer_ids=LAYERS)
    size = shape.draft_vocab_size
    rows = None if size is None else _vocabulary(case, size)
    drafter = build_drafter(shape, seed=0, token_ids=rows)
    context, anchors, labels_AK = _batch(case)
    frozen = case.target.frozen
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    place = (
        None
        if rows is None
        else torch.full((shape.target_vocab_size,), -100).scatter_(0, rows, torch.arange(len(rows)))
    )
    for _ in range(steps):
        out = drafter(context, anchors, frozen.embed_VD)
        logits = frozen.logits(out.hidden_AKD.flatten(0, 1), drafter.rows).unflatten(0, labels_AK.shape)
        if out.markov_AKr is not None and drafter.markov_w2 is not None:
            logits = logits + out.markov_AKr @ drafter.markov_w2.T
        wanted = labels_AK if place is None else place[labels_AK]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def _vocabulary(case: Case, size: int) -> Tensor:
    """The `size` tokens most used in the answers, rising; filled up with the lowest ids."""
    used = torch.tensor([token for each in case.answers for token in each.ids])
    counts = torch.bincount(used, minlength=VOCABULARY)
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def _batch(case: Case) -> tuple[Context, Anchors, Tensor]:
    """All rows packed, and an anchor at every place with K generated tokens after it."""
    parts, index, offset = [], [], 0
    for number, (prompt, answer) in enumerate(zip(case.prompts, case.answers, strict=True)):
        ids = torch.tensor([*prompt, *answer.ids])
        out = case.target.forward(ids[None])
        parts.append(
            (ids, torch.arange(len(ids)), torch.full((len(ids),), number), out.taps_BTLD[0], out.last_hidden_BTD[0])
        )
        index += range(offset + len(prompt), offset + len(ids) - BLOCK)
        offset += len(ids)
    ids, positions, document, taps, last = (torch.cat(column) for column in zip(*parts, strict=True))
    index_A = torch.tensor(index)
    slots = torch.arange(BLOCK)
    previous = ids[index_A[:, None] + slots]
    anchors = Anchors(index_A, previous, torch.ones_like(previous, dtype=torch.bool))
    return Context(ids, positions, document, taps, last), anchors, ids[index_A[:, None] + slots + 1]
