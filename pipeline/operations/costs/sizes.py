"""Weights of a target and of a drafter, counted from their configurations: nothing is built or read.

H query heads and G key/value heads of width d, D hidden size, F MLP width, V vocabulary, C draft vocabulary,
L tapped layers, K slots, r Markov rank
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.draft.config import DraftConfig
from pipeline.shards.plan import Shape


def target_parameters(shape: Shape) -> int:
    """All stored weights of the target: layers with every expert, embedding, a head of its own unless tied, norms."""
    dense, expert = 3 * shape.hidden_size * shape.intermediate_size, 3 * shape.hidden_size * shape.expert_size
    mlp = shape.experts * (expert + shape.hidden_size) if shape.experts else dense
    layer = shape.attention_parameters + mlp + 2 * shape.hidden_size
    return shape.layers * layer + (1 if shape.tied else 2) * shape.vocab_size * shape.hidden_size + shape.hidden_size


def decoder_parameters(shape: Shape) -> int:
    """Weights one token passes through: of experts only those it is sent to, of embedding and head nothing."""
    return shape.layers * shape.layer_parameters


def cache_row_bytes(shape: Shape, width: int) -> int:
    """Keys and values of one position in all layers: 2 G d numbers of `width` bytes each."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * width


@dataclass(frozen=True)
class DraftSize:
    """A drafter's weights by how often a training step reads them.

    `context`: once per context position; `block`: once per slot; `markov_in` (W1) is a table, looked up; `markov_out`
    (W2) multiplies every slot's Markov vector; `small`: norms, biases, gates and the confidence head. `shared`: what
    serves context and block alike (keys and values), counted in both and stored once.
    """

    context: int
    block: int
    markov_in: int
    markov_out: int
    small: int
    shared: int

    @property
    def total(self) -> int:
        """Trained weights, to the last one."""
        return self.context + self.block + self.markov_in + self.markov_out + self.small - self.shared

    @classmethod
    def of(cls, draft: DraftConfig) -> DraftSize:
        """Count every parameter of the drafter `draft` describes (`pipeline.draft.build` makes the same)."""
        context, block, small, shared = _BACKBONES[draft.kind](draft)
        width, rank, out = draft.hidden_size, draft.markov_rank, draft.vocab_size
        gate = {"gated": (width + rank) * rank + rank, "rnn": (2 * rank + width) * 3 * rank + 3 * rank}
        small += gate.get(draft.markov, 0) + (width + rank + 1 if draft.confidence else 0)
        with_markov = draft.markov != "none"
        return cls(
            context, block, draft.target_vocab_size * rank if with_markov else 0, out * rank if with_markov else 0,
            small, shared,
        )  # fmt: skip


def _attention(draft: DraftConfig, inputs: int) -> tuple[int, int]:
    """(queries and output, keys and values): inputs·Hd + Hd·D, and 2·inputs·Gd."""
    return (inputs + draft.hidden_size) * draft.heads * draft.head_dim, 2 * inputs * draft.kv_heads * draft.head_dim


def _biases(draft: DraftConfig) -> int:
    return (draft.heads + 2 * draft.kv_heads) * draft.head_dim if draft.attention_bias else 0


def _block_drafter(draft: DraftConfig) -> tuple[int, int, int, int]:
    """S3: fc over L taps and a norm; per layer attention with per-head norms, an MLP, two norms; a final norm."""
    width, layers = draft.hidden_size, draft.layers
    fc = len(draft.target_layer_ids) * width * width if draft.taps else 0
    queries, keys = _attention(draft, width)
    block = layers * (queries + keys + 3 * width * draft.intermediate_size)
    small = layers * (2 * width + 2 * draft.head_dim + _biases(draft)) + width + (width if draft.taps else 0)
    return fc + layers * keys, block, small, layers * keys


def _eagle3(draft: DraftConfig) -> tuple[int, int, int, int]:
    """fc over L taps; one layer whose attention reads [embedding; features], without per-head norms; four norms."""
    width = draft.hidden_size
    queries, keys = _attention(draft, 2 * width)
    block = queries + keys + 3 * width * draft.intermediate_size
    return len(draft.target_layer_ids) * width * width + keys, block, 4 * width + _biases(draft), keys


def _mtp(draft: DraftConfig) -> tuple[int, int, int, int]:
    """fc over [embedding; state], read for context and slots alike; one layer; two norms before, two in, one after."""
    width = draft.hidden_size
    queries, keys = _attention(draft, width)
    fc = 2 * width * width
    block = fc + queries + keys + 3 * width * draft.intermediate_size
    return fc + keys, block, 5 * width + 2 * draft.head_dim + _biases(draft), fc + keys


def _medusa(draft: DraftConfig) -> tuple[int, int, int, int]:
    """K heads of `layers` residual blocks W h + b; a slot passes through one of them."""
    heads = draft.block_size * draft.layers
    return 0, heads * draft.hidden_size**2, heads * draft.hidden_size, 0


_BACKBONES = {
    "dspark": _block_drafter,
    "dflash": _block_drafter,
    "eagle3": _eagle3,
    "mtp": _mtp,
    "medusa": _medusa,
}


def slot_parameters(draft: DraftConfig, size: DraftSize) -> int:
    """Backbone weights one slot passes through."""
    return size.block // draft.block_size if draft.kind == "medusa" else size.block
