"""Draft decoder layers: Qwen3's block, with the context's keys and values injected beside the block's own (S3).

Tensor names are those engines load: `self_attn.{q,k,v,o}_proj`, `self_attn.{q,k}_norm`, `mlp.{gate,up,down}_proj`,
`input_layernorm`, `post_attention_layernorm`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.draft.config import DraftConfig
from pipeline.draft.rope import rotate

Tables = tuple[Tensor, Tensor]
# (q, context k, context v, own k, own v) → attention output shaped like q
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def wide(x: Tensor) -> Tensor:
    """x in fp32, or left in fp64: statistics are never taken in a narrower type (S15)."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis; statistics in fp32, result in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x)
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide(self.weight) * (y * scale)).to(x.dtype)


class Attention(nn.Module):
    """Queries from the block only; keys and values from the context features and from the block (S3).

    Args:
        input_width: what the projections read; the hidden size, or twice that for Eagle3.
        qk_norm: per-head normalisation of queries and keys (Qwen3); Eagle3's published layout has none.
    """

    def __init__(self, config: DraftConfig, *, input_width: int | None = None, qk_norm: bool = True) -> None:
        super().__init__()
        width, d = input_width or config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, d
        self.q_proj = nn.Linear(width, config.heads * d, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * d, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * d, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.heads * d, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if qk_norm else nn.Identity()

    def queries(self, x: Tensor, tables: Tables) -> Tensor:
        """[..., width] → rotated queries [..., H, d]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return rotate(self.q_norm(q), *tables)

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """[..., width] → rotated keys and plain values, both [..., Hkv, d]."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(self.k_norm(k), *tables), v

    def output(self, attended: Tensor) -> Tensor:
        """[..., H, d] → [..., D]."""
        return self.o_proj(attended.flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward: down(act(gate(x)) · up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP over the block, reading the context's features as extra keys and values."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, hidden: Tensor, features: Tensor, block_tables: Tables, context_tables: Tables, attend: Attend
    ) -> Tensor:
        """Training: block states [A, S, D] over packed context features [T, D] → [A, S, D]."""
        return self.over(hidden, self.self_attn.keys_values(features, context_tables), block_tables, attend)

    def over(self, hidden: Tensor, context: tuple[Tensor, Tensor], block_tables: Tables, attend: Attend) -> Tensor:
        """The layer on given context keys and values (decoding reads them from its cache)."""
        q, own_k, own_v = self.before(hidden, block_tables)
        return self.after(hidden, attend(q, *context, own_k, own_v))

    def before(self, hidden: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """What attention needs of the block: queries, own keys, own values."""
        x = self.input_layernorm(hidden)
        return self.self_attn.queries(x, tables), *self.self_attn.keys_values(x, tables)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's remainder: output projection and MLP, each added to the residual stream."""
        hidden = hidden + self.self_attn.output(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
