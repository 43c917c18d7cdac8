"""Eagle3: fused taps beside token embeddings, into one layer of twice the input width.

    x = [norm(embedding); norm(g)],  g = W_c [taps] for the context, the previous slot's state inside a block

Parameters: `fc`, `layers.0.*` (published as `midlayer.*`), `norm`. Llama's layer: no per-head norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.draft.autoregressive import AutoregressiveDrafter, StepLayer
from pipeline.draft.config import DraftConfig
from pipeline.draft.layers import Attention, RMSNorm


class Eagle3(AutoregressiveDrafter):
    """EAGLE-3. The layer's state goes on to the next slot as it is before the final norm."""

    def __init__(self, config: DraftConfig, token_ids: Tensor | None = None) -> None:
        super().__init__(config, token_ids)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = RMSNorm(width, config.rms_norm_eps)

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        if taps is None:
            raise ValueError("Eagle3 reads tapped hidden states, but none were given")
        return self.fc(taps.flatten(-2))

    def read(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        return features, torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(features)], dim=-1)

    def close(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        hidden = residual + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden), hidden


class EagleLayer(StepLayer):
    """Eagle3's layer, published as `midlayer`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, Attention(config, input_width=2 * config.hidden_size, qk_norm=False))
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
