"""What a cache costs before it exists: bytes and target FLOPs. Pure arithmetic, no weights, no torch.

size = estimate(spec, 1_400_000, 1_240_000_000, 800_000_000)     # samples, tokens, supervised tokens
Shape.of(config_json).forward_flops(tokens=…, samples=…)
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import StorageError
from pipeline.shards.layout import TAR_BLOCK, TAR_RECORD, Spec, header

_METADATA = {"id": "0" * 16, "source": "open-perfectblend", "turn": "0"}
_RESERVE = 0.02  # room left for index rows, logs and other users of the disk


def estimate(spec: Spec, samples: int, tokens: int, positions: int, *, shards: int = 1) -> int:
    """Bytes on disk of a cache: payload to the byte, headers and tar framing of average samples.

    `positions` is the number of supervised tokens (the distribution of each is kept at the position before it).
    """
    if not samples:
        return 0
    kept = tokens if spec.positions == "all" else positions
    head = len(header(spec, tokens=tokens // samples, positions=kept // samples, metadata=_METADATA))
    per_sample = TAR_BLOCK + head + TAR_BLOCK // 2  # padding to whole blocks averages half of one
    return spec.payload_bytes(tokens, kept) + samples * per_sample + shards * (2 * TAR_BLOCK + TAR_RECORD // 2)


def refuse_without_space(folder: Path, needed_bytes: int) -> None:
    """Raise StorageError when the disk under `folder` cannot take `needed_bytes` more."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes * (1 + _RESERVE):
        raise StorageError(
            f"{folder}: the missing target shards need {show_bytes(needed_bytes)}, {show_bytes(free)} are free. "
            "Nothing was written. Free space, move work_dir, or take a smaller codec: `dspark plan` prices them "
            "(targets.taps, targets.logits); targets.mode: live needs no cache at all"
        )


def show_bytes(count: float) -> str:
    """1234 -> '1.2 kB'; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes, as its config.json names them."""

    layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    experts_per_token: int = 0
    experts: int = 0
    expert_size: int = 0
    tied: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From config.json as plain data (its text part when it has one)."""
        text = config.get("text_config") or config
        heads = int(text["num_attention_heads"])
        hidden = int(text["hidden_size"])
        return cls(
            layers=int(text["num_hidden_layers"]),
            hidden_size=hidden,
            vocab_size=int(text["vocab_size"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate_size=int(text.get("intermediate_size") or 4 * hidden),
            experts_per_token=int(text.get("num_experts_per_tok") or 0),
            experts=int(text.get("num_experts") or text.get("num_local_experts") or 0),
            expert_size=int(text.get("moe_intermediate_size") or 0),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        )

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output projections of one layer."""
        return self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that a token passes through."""
        attention = self.attention_parameters
        if self.experts_per_token:
            return attention + self.hidden_size * (3 * self.expert_size * self.experts_per_token + self.experts)
        return attention + 3 * self.hidden_size * self.intermediate_size

    def forward_flops(self, *, tokens: int, samples: int, head_positions: int = 0) -> float:
        """Multiply-adds count two. Causal attention sees half of each row on average; the head runs where asked."""
        mean = tokens / max(samples, 1)
        attention = 2.0 * self.heads * self.head_dim * mean  # scores and values, half of the square each
        body = tokens * self.layers * (2.0 * self.layer_parameters + attention)
        return body + 2.0 * head_positions * self.hidden_size * self.vocab_size
