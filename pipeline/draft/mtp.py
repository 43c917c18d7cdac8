"""MTP: one layer over the target's last hidden state and the next token's embedding, unrolled over the block.

    x = fc [norm(embedding); norm(h)],  h = the target's post-norm state for the context, the head's own inside a block

Parameters are named as Qwen's heads name them: `fc`, `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `layers.0.*`,
`norm`. The chain goes on from the state after the norm, which is what it started from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.draft.autoregressive import AutoregressiveDrafter, StepLayer
from pipeline.draft.config import DraftConfig
from pipeline.draft.layers import Attention, RMSNorm


class MTP(AutoregressiveDrafter):
    """A multi-token-prediction head over the target's last hidden state."""

    def __init__(self, config: DraftConfig, token_ids: Tensor | None = None) -> None:
        super().__init__(config, token_ids)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(width, eps)
        self.pre_fc_norm_hidden = RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([StepLayer(config, Attention(config))])
        self.norm = RMSNorm(width, eps)

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        if last_hidden is None:
            raise ValueError("an MTP head reads the target's last hidden states, but none were given")
        return last_hidden

    def read(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)], dim=-1)
        residual = self.fc(joined)
        return residual, layer.input_layernorm(residual)

    def close(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        hidden = residual + attended
        hidden = self.norm(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
        return hidden, hidden
