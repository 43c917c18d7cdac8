"""The small heads on top of the backbone: sequential (S16–S18) and confidence (S19).

Every sequential head is a bias e_k W2ᵀ on the logits of slot k, where e_k is a vector of rank r: W1[x_{k−1}] itself
(vanilla), a gated copy of it, or a recurrent state's output. So the loss and the decoder need only `e` and W2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.draft.config import DraftConfig
from pipeline.draft.layers import wide


class MarkovHead(nn.Module):
    """S16: B(x, ·) = W1[x] W2ᵀ. W1 [V, r] over target ids, W2 [V or |D|, r] over what is proposed; no biases."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.target_vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """W1[x] of target ids [...], in the dtype of `like`."""
        return self.markov_w1(tokens).to(like.dtype)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced: W1[x_{k−1}] [A, K, r] and h_k [A, K, D] → e [A, K, r]."""
        return previous

    def start(self, hidden: Tensor) -> Tensor | None:
        """The recurrent state before slot 1, for states h [B, K, D]; None where there is none."""
        return None

    def step(self, previous: Tensor, hidden: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot of decoding: W1[x_{k−1}] [B, r], h_k [B, D] → (e [B, r], the state after it)."""
        return self(previous[:, None], hidden[:, None])[:, 0], None


class GatedMarkovHead(MarkovHead):
    """S17: g = σ(W_g [h_k; W1[x]] + b), e = g ⊙ W1[x]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], dim=-1))) * previous


class RnnMarkovHead(MarkovHead):
    """S18: a gated recurrent state over the drafted tokens; s_0 = 0, e_k = tanh(output)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.joint_proj = RecurrentProjection(config.markov_rank, config.hidden_size)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        return self.joint_proj(previous, hidden, self.start(hidden))[0]

    def start(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def step(self, previous: Tensor, hidden: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, carry = self.joint_proj(previous[:, None], hidden[:, None], carry)
        return out[:, 0], carry


class RecurrentProjection(nn.Linear):
    """One projection of z_k = [s_{k−1}; W1[x_{k−1}]; h_k] to gate | candidate | output, unrolled over the slots.

    The part of z that does not depend on s is projected for all slots at once; the loop holds one [r, 3r] product.
    """

    def __init__(self, rank: int, width: int) -> None:
        super().__init__(2 * rank + width, 3 * rank)
        self.rank = rank

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[A, K, r], [A, K, D], s_0 [A, r] → (e [A, K, r], s_K [A, r])."""
        over_state, over_rest = self.weight.split([self.rank, self.in_features - self.rank], dim=1)
        fixed = F.linear(torch.cat([previous, hidden], dim=-1), over_rest, self.bias)
        outputs = []
        for fixed_k in fixed.unbind(1):
            gate, candidate, output = (fixed_k + F.linear(state, over_state)).chunk(3, dim=-1)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            outputs.append(torch.tanh(output))
        return torch.stack(outputs, dim=1), state


class ConfidenceHead(nn.Module):
    """S19: logit c_k = w · [h_k; W1[x_{k−1}]] + b, computed in fp32 (engines hold it in fp32 too)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = WideLinear(width, 1)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """h [..., D] and W1[x_{k−1}] [..., r] (None without a Markov head) → fp32 logits [...]."""
        features = hidden if previous is None else torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)
        return self.proj(features)


class WideLinear(nn.Linear):
    """A projection to one number, multiplied and summed in fp32 even under autocast."""

    def forward(self, features: Tensor) -> Tensor:
        return (wide(features) * wide(self.weight[0])).sum(-1) + wide(self.bias[0])


MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}
