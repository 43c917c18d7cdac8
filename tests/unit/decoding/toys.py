"""Toy targets and drafters whose laws are known exactly, and a small real transformer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeline.draft.interface import Proposal


class NoCache:
    """A table target needs no memory."""

    def place(self, positions_BT: Tensor, slots_B: Tensor | None = None) -> None:
        return None

    def reserve(self, slots: int, length: int) -> None: ...

    def move(self, source: int, target: int, length: int) -> None: ...


class TableTarget:
    """A first-order Markov chain: the next token's logits depend on the last token only (`logits_VV`)."""

    def __init__(self, logits_VV: Tensor) -> None:
        self.table_VV = logits_VV
        self.config = SimpleNamespace()
        self.frozen = SimpleNamespace(head_VD=logits_VV, logits=lambda hidden: logits_VV[hidden[:, 0].long()])

    def forward(self, ids_BT: Tensor, *, positions_BT: Tensor, mask: Any, cache: Any) -> Any:
        return SimpleNamespace(taps_BTLD=None, last_hidden_BTD=ids_BT[..., None])


class TableDrafter:
    """Drafts from its own Markov chain, over all tokens or over `rows` (S30); survival confidences per slot."""

    def __init__(self, logits_VD: Tensor, block_size: int, rows: Tensor | None = None) -> None:
        self.table_VD = logits_VD
        self.config = SimpleNamespace(block_size=block_size)
        self.rows = rows
        self.confidence_of: Any = None

    def start(self, batch: int, max_length: int, *, device: Any, dtype: Any) -> Any:
        return SimpleNamespace(lengths_B=torch.zeros(batch, dtype=torch.long), move=lambda source, target: None)

    def observe(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, state: Any, anchors_B: Tensor, positions_B: Tensor, sampler: Any, frozen: Any) -> Proposal:
        tokens, laws, previous = [], [], anchors_B
        for slot in range(self.config.block_size):
            drawn, law = sampler(self.table_VD[previous], slot)
            previous = drawn if self.rows is None else self.rows[drawn]
            tokens.append(previous)
            laws.append(law)
        tokens_BK = torch.stack(tokens, 1)
        confidence = None if self.confidence_of is None else self.confidence_of(anchors_B, tokens_BK)
        return Proposal(tokens_BK, None if laws[0] is None else torch.stack(laws, 1), confidence)


def small_model(*, layers: int = 2, vocabulary: int = 97, sliding: bool = False, seed: int = 0) -> Any:
    """A random fp32 transformer with grouped heads; `sliding` alternates full and windowed layers."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    extra: dict[str, Any] = {}
    if sliding:
        extra = {
            "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
            "layer_types": ["full_attention", "sliding_attention"] * (layers // 2),
        }  # fmt: skip
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.25, **extra,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
