"""Small drafters, packed contexts and a frozen head for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.draft.build import build_drafter
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Anchors, Context, Drafter

VOCAB = 50
SMALL: dict[str, Any] = {
    "kind": "dspark",
    "block_size": 4,
    "layout": "next_token",
    "layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "activation": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope": {"rope_theta": 10000.0, "rope_type": "default"},
    "markov": "vanilla",
    "markov_rank": 6,
    "confidence": True,
    "taps": True,
    "target_layer_ids": [0, 1, 3],
    "target_num_layers": 6,
    "target_vocab_size": VOCAB,
    "draft_vocab_size": None,
    "mask_token_id": 49,
}

# One configuration per member of the family; every one must pass every test of the interface.
FAMILY: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dspark-gated": {"markov": "gated"},
    "dspark-rnn": {"markov": "rnn"},
    "dspark-reduced": {"draft_vocab_size": 12},
    "dspark-no-taps": {"taps": False, "target_layer_ids": []},
    "dflash": {"kind": "dflash", "markov": "none", "markov_rank": 0},
    "dflash-fill-in": {"kind": "dflash", "markov": "none", "markov_rank": 0, "layout": "fill_in"},
    "eagle3": {"kind": "eagle3", "markov": "none", "markov_rank": 0, "layers": 1, "mask_token_id": None},
    "eagle3-reduced": {"kind": "eagle3", "markov": "none", "markov_rank": 0, "layers": 1, "draft_vocab_size": 12},
    "mtp": {"kind": "mtp", "markov": "none", "markov_rank": 0, "layers": 1, "mask_token_id": None},
    "medusa": {"kind": "medusa", "markov": "none", "markov_rank": 0, "layers": 1, "mask_token_id": None},
}


def config(**changes: Any) -> DraftConfig:
    return DraftConfig.from_dict({**SMALL, **changes})


def member(name: str, *, seed: int = 0, spread: float = 0.3, **changes: Any) -> Drafter:
    """A family member whose weights are large enough for every path to show in its output."""
    made = config(**{**FAMILY[name], **changes})
    token_ids = None if made.draft_vocab_size is None else torch.arange(made.draft_vocab_size) * 3 + 2
    drafter = build_drafter(made, seed=seed, token_ids=token_ids)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return drafter


@dataclass
class Head:
    """A frozen embedding and head, as `pipeline.frozen.Frozen` offers them."""

    embed_VD: Tensor
    head_VD: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_VD)

    def logits(self, last_hidden_ND: Tensor, rows: Tensor | None = None) -> Tensor:
        return F.linear(last_hidden_ND, self.head_VD if rows is None else self.head_VD[rows]).float()


def frozen(*, dtype: torch.dtype = torch.float32) -> Head:
    generator = torch.Generator().manual_seed(7)
    width = SMALL["hidden_size"]
    return Head(*(torch.randn(VOCAB, width, generator=generator, dtype=dtype) for _ in range(2)))


def packed(lengths: tuple[int, ...], *, layers: int = 3, seed: int = 3, dtype: torch.dtype = torch.float32) -> Context:
    """A packed stream of documents of these lengths, with random tokens and hidden states."""
    generator = torch.Generator().manual_seed(seed)
    total, width = sum(lengths), SMALL["hidden_size"]
    return Context(
        ids_T=torch.randint(0, VOCAB, (total,), generator=generator),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        document_T=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]),
        taps_TLD=torch.randn(total, layers, width, generator=generator, dtype=dtype),
        last_hidden_TD=torch.randn(total, width, generator=generator, dtype=dtype),
    )


def anchors_at(context: Context, index: list[int], *, block: int = 4) -> Anchors:
    """Anchors at places of the packed stream, their previous tokens read from it (clamped at the stream's end)."""
    index_A = torch.tensor(index, dtype=torch.int64)
    at = index_A[:, None] + torch.arange(block)
    same = at < len(context.ids_T)
    at = at.clamp(max=len(context.ids_T) - 1)
    same &= context.document_T[at] == context.document_T[index_A][:, None]
    return Anchors(index_A, context.ids_T[at], same)


def logits(drafter: Drafter, context: Context, anchors: Anchors, head: Head) -> Tensor:
    """The draft logits [A, K, V or |D|] a training forward stands for, written out."""
    out = drafter(context, anchors, head.embed_VD)
    plain = head.logits(out.hidden_AKD, drafter.rows)
    return plain if out.markov_AKr is None else plain + out.markov_AKr @ drafter.markov_w2.T
