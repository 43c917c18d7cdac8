"""Drafters of every kind, a frozen target and an origin for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.draft.build import build_drafter
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Drafter
from pipeline.layouts.config_json import Origin
from pipeline.layouts.publish import Options, publish

VOCAB, WIDTH = 48, 32
PLAIN: dict[str, Any] = {
    "kind": "dspark",
    "block_size": 4,
    "layout": "next_token",
    "layers": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "activation": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope": {"rope_theta": 5000.0, "rope_type": "default"},
    "markov": "vanilla",
    "markov_rank": 6,
    "confidence": True,
    "taps": True,
    "target_layer_ids": (0, 2, 3),
    "target_num_layers": 6,
    "target_vocab_size": VOCAB,
    "draft_vocab_size": None,
    "mask_token_id": 47,
}
NO_HEAD = {"markov": "none", "markov_rank": 0}
TARGET: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 5000.0,
}
CHANGES: dict[str, dict[str, Any]] = {
    "dspark": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "no confidence": {"confidence": False},
    "reduced": {"draft_vocab_size": 12},
    "biased": {"attention_bias": True},
    "other sizes": {
        "block_size": 6,
        "layers": 3,
        "intermediate_size": 56,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 12,
        "activation": "gelu",
        "rms_norm_eps": 1e-5,
        "markov_rank": 5,
        "target_layer_ids": (1, 4),
        "mask_token_id": 3,
    },
    "yarn": {
        "rope": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "dflash": {"kind": "dflash", **NO_HEAD},
    "dflash, no confidence": {"kind": "dflash", "confidence": False, **NO_HEAD},
    "fill_in": {"kind": "dflash", "layout": "fill_in", **NO_HEAD},
    "eagle3": {"kind": "eagle3", "layers": 1, "mask_token_id": None, **NO_HEAD},
    "eagle3 reduced": {"kind": "eagle3", "layers": 1, "mask_token_id": None, "draft_vocab_size": 12, **NO_HEAD},
    "mtp": {"kind": "mtp", "layers": 1, "mask_token_id": None, **NO_HEAD},
    "fill_in reduced": {"kind": "dflash", "layout": "fill_in", "draft_vocab_size": 12, **NO_HEAD},
}


@dataclass(frozen=True)
class Head:
    """The target's embedding and head, with the scales a target may apply."""

    embed_VD: Tensor
    head_VD: Tensor
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def config(self) -> Any:
        """The target's configuration, as far as an MTP head must agree with it."""
        return SimpleNamespace(to_dict=lambda: TARGET)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_VD) * self.embed_scale

    def logits(self, last_hidden_ND: Tensor, rows: Tensor | None = None) -> Tensor:
        head = self.head_VD if rows is None else self.head_VD[rows]
        return F.linear(last_hidden_ND, head).float() * self.logit_scale


def head(**changes: Any) -> Head:
    generator = torch.Generator().manual_seed(3)
    return Head(*(torch.randn(VOCAB, WIDTH, generator=generator) for _ in range(2)), **changes)


def drafter(name: str = "dspark", **changes: Any) -> Drafter:
    """A drafter whose every weight matters: norms and biases are random too."""
    config = DraftConfig.from_dict({**PLAIN, **CHANGES[name], **changes})
    size = config.draft_vocab_size
    made = build_drafter(config, seed=1, token_ids=None if size is None else torch.arange(size) * 3 + 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made


def origin(**meta: Any) -> Origin:
    return Origin(
        target="owner/target",
        architectures=("Qwen3ForCausalLM",),
        max_position_embeddings=256,
        ends={"eos_token_id": 2, "pad_token_id": 0},
        meta={"template": {"hash": "abc", "thinking": None}, "target_type": "qwen3_5_text", **meta},
    )


def published(
    folder: Path, name: str, layout: str, *, changes: dict[str, Any] | None = None, **options: Any
) -> Drafter:
    """Publish a drafter and return it."""
    made = drafter(name, **(changes or {}))
    publish(folder, made, layout=layout, frozen=head(), origin=origin(), options=Options(**options))
    return made


def drafts(made: Drafter) -> tuple[Tensor, Tensor | None]:
    """Greedy draft tokens and confidence logits of three rows with contexts of different lengths, as when decoding."""
    frozen, generator = head(), torch.Generator().manual_seed(5)
    lengths = torch.tensor([3, 9, 6])
    ids = torch.randint(0, VOCAB, (3, 10), generator=generator)
    taps = torch.randn(3, 10, len(made.config.target_layer_ids), WIDTH, generator=generator)
    last = torch.randn(3, 10, WIDTH, generator=generator)
    made = made.eval().requires_grad_(False)
    state = made.start(3, 16, device="cpu", dtype=torch.float32)
    made.observe(state, taps, last, ids, torch.arange(10).expand(3, 10), lengths, frozen=frozen)
    anchors = ids[torch.arange(3), lengths]
    proposal = made.propose(state, anchors, lengths, lambda logits, slot: (logits.argmax(-1), None), frozen)
    return proposal.tokens_BK, proposal.confidence_BK


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every leaf and every container of a JSON value, by path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))
