"""Start draft layers from layers of the target instead of at random.

    names = needed_tensors(available_names, layer_ids)
    notes = init_from_target_layers(drafter, tensors, layer_ids, target=config_json)

What is copied: attention and MLP matrices, the norms before them, per-head norms where the target has them, and the
final norm. `fc` starts as a copy of the last tap, scaled by the copied layer's own input norm, so that the first
context keys and values are close to those the target's layer would compute there.

A target without per-head norms (Llama, Qwen2, Gemma 2) has queries and keys of some size; the drafter's norm would
bring them to size one and flatten attention. Its weights start at the size the copied projections give instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.architecture import activation_of, text_part
from pipeline.draft.block import BlockDrafter
from pipeline.draft.eagle3 import Eagle3
from pipeline.draft.interface import Drafter
from pipeline.draft.mtp import MTP
from pipeline.errors import ConfigError

_NOT_TEXT = ("vision", "visual", "audio")
_LAYER = re.compile(r"^(.*?layers\.)(\d+)\.(.+)$")
# Norms stored as an offset from one: the weight is 1 + what is in the file.
_OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text")


def last_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """The target's last `count` layers: where a drafter's layers start by default."""
    return tuple(range(max(num_layers - count, 0), num_layers))


def needed_tensors(names: Iterable[str], layer_ids: Sequence[int]) -> list[str]:
    """Of a checkpoint's tensor names, those `init_from_target_layers` reads: the chosen layers and the final norm."""
    return [
        name
        for name in names
        if not any(part in name for part in _NOT_TEXT)
        and ((found := _LAYER.match(name)) is None or int(found[2]) in layer_ids)
        and (found is not None or name.endswith("norm.weight"))
    ]


def init_from_target_layers(
    drafter: Drafter, tensors: Mapping[str, Tensor], layer_ids: Sequence[int], *, target: Mapping[str, Any]
) -> list[str]:
    """Copy target layers into a drafter in place; returns what could not be copied, one sentence each.

    Args:
        tensors: at least those `needed_tensors` names.
        layer_ids: target layers, one per draft layer, first to last.
        target: the target's config.json.

    Raises ConfigError, before anything is changed, when a layer id or a tensor is missing, a shape or the activation
    differs, or the target has biases the drafter has no place for.
    """
    source = _Source(drafter, tensors, layer_ids, text_part(target))
    if source.problems:
        raise ConfigError([f"draft.init target_layers: {problem}" for problem in source.problems])
    with torch.no_grad():
        for name, value in source.values.items():
            drafter.get_parameter(name).copy_(value)
    return source.notes


class _Source:
    """Works out every value first, so that nothing is half copied when something is wrong."""

    def __init__(
        self, drafter: Drafter, tensors: Mapping[str, Tensor], layer_ids: Sequence[int], target: Mapping[str, Any]
    ) -> None:
        self.drafter, self.tensors, self.target = drafter, tensors, target
        self.values: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.offset = 1.0 if target.get("model_type") in _OFFSET_NORMS else 0.0
        layers = getattr(drafter, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            self.problems.append(f"a drafter of kind {drafter.config.kind} has no layers to copy into")
            return
        if len(layers) != len(layer_ids):
            self.problems.append(f"{len(layers)} draft layers need as many target layers, found {list(layer_ids)}")
            return
        self._check_activation()
        for index, layer_id in enumerate(layer_ids):
            self._layer(f"layers.{index}.", layer_id)
        if not self.problems:
            self._final_norm()
            self._features(self.values["layers.0.input_layernorm.weight"])

    # -------------------------------------------------------------------------------------- one layer

    def _layer(self, to: str, layer_id: int) -> None:
        found = {
            match[3]: self.tensors[name]
            for name in self.tensors
            if (match := _LAYER.match(name)) and int(match[2]) == layer_id and not any(p in name for p in _NOT_TEXT)
        }
        if not found:
            self.problems.append(f"the target has no layer {layer_id}")
            return
        before_mlp = "pre_feedforward_layernorm" if "pre_feedforward_layernorm.weight" in found else None
        if before_mlp:
            self._note("norms after attention and MLP are left out: the draft layer has none")
        self._norm(found, "input_layernorm", f"{to}input_layernorm.weight")
        self._norm(found, before_mlp or "post_attention_layernorm", f"{to}post_attention_layernorm.weight")
        self._mlp(found, to)
        self._attention(found, to)

    def _mlp(self, found: Mapping[str, Tensor], to: str) -> None:
        if any("experts" in name for name in found):
            self._note("the layer is a mixture of experts: its MLP starts at random")
            return
        for name in ("gate_proj", "up_proj", "down_proj"):
            self._matrix(found, f"mlp.{name}.weight", f"{to}mlp.{name}.weight")

    def _attention(self, found: Mapping[str, Tensor], to: str) -> None:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self._matrix(found, f"self_attn.{name}.weight", f"{to}self_attn.{name}.weight")
            self._bias(found, f"self_attn.{name}.bias", f"{to}self_attn.{name}.bias")
        if self.problems:
            return
        for name, factor in (("q", self._query_factor()), ("k", 1.0)):
            norm = f"{to}self_attn.{name}_norm.weight"
            if norm not in self._parameters():
                if f"self_attn.{name}_norm.weight" in found:
                    self._note(f"the target's {name}_norm is left out: this drafter's layer has none")
            elif f"self_attn.{name}_norm.weight" in found:
                self._norm(found, f"self_attn.{name}_norm", norm)
                self.values[norm] = self.values[norm] * factor
            else:
                size = self._size(found[f"self_attn.{name}_proj.weight"], self.values[f"{to}input_layernorm.weight"])
                self.values[norm] = torch.full_like(self._parameters()[norm], size * factor)

    def _query_factor(self) -> float:
        """Our scores are divided by sqrt(head_dim); a target with its own divisor has it folded into q_norm."""
        scalar = self.target.get("query_pre_attn_scalar")
        return math.sqrt(self.drafter.config.head_dim / float(scalar)) if scalar else 1.0

    def _size(self, projection: Tensor, input_norm: Tensor) -> float:
        """Root mean square of a projection of normed inputs whose channels are uncorrelated and of size one."""
        return float((projection.float() * input_norm.float()).pow(2).sum(1).mean().sqrt())

    # -------------------------------------------------------------------------------------- around the layers

    def _final_norm(self) -> None:
        names = [n for n in self.tensors if n.endswith("norm.weight") and not _LAYER.match(n)]
        names = [n for n in names if not any(part in n for part in _NOT_TEXT)]
        if len(names) != 1:
            self.problems.append(f"one final norm is expected in the target, found {names}")
            return
        self.values["norm.weight"] = self.tensors[names[0]].float() + self.offset

    def _features(self, input_norm: Tensor) -> None:
        """Context features start as the last tap, normed as the copied layer norms its input."""
        width = self.drafter.config.hidden_size
        if isinstance(self.drafter, BlockDrafter) and self.drafter.config.taps:
            self.values["fc.weight"] = self._last_tap(width)
            self.values["hidden_norm.weight"] = input_norm
        if isinstance(self.drafter, Eagle3):
            self.values["fc.weight"] = self._last_tap(width)
            self.values["layers.0.hidden_norm.weight"] = self.values["layers.0.input_layernorm.weight"]
        if isinstance(self.drafter, MTP):
            self._note("fc and the norms before it start at random: the target has none")

    def _last_tap(self, width: int) -> Tensor:
        value = torch.zeros(width, width * len(self.drafter.config.target_layer_ids))
        value[:, -width:] = torch.eye(width)
        return value

    # -------------------------------------------------------------------------------------- single tensors

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.drafter.named_parameters())

    def _matrix(self, found: Mapping[str, Tensor], name: str, to: str) -> None:
        if name not in found:
            self.problems.append(f"the target's layer has no {name}")
            return
        value, room = found[name].float(), self._parameters()[to]
        if isinstance(self.drafter, Eagle3) and value.ndim == 2 and room.shape[1] == 2 * value.shape[1]:
            value = torch.cat([room.detach()[:, : value.shape[1]], value], dim=1)  # embeddings' half stays random
        if value.shape != room.shape:
            self.problems.append(f"{name} is {tuple(value.shape)} in the target, the drafter's is {tuple(room.shape)}")
            return
        self.values[to] = value

    def _norm(self, found: Mapping[str, Tensor], name: str, to: str) -> None:
        if f"{name}.weight" not in found:
            self.problems.append(f"the target's layer has no {name}.weight")
            return
        self._matrix(found, f"{name}.weight", to)
        if to in self.values:
            self.values[to] = self.values[to] + self.offset

    def _bias(self, found: Mapping[str, Tensor], name: str, to: str) -> None:
        if name not in found:
            if to in self._parameters():
                self._note(f"{name} is absent in the target and starts at zero")
            return
        if to in self._parameters():
            self._matrix(found, name, to)
        elif bool(found[name].any()):
            self.problems.append(f"{name} is not zero and this drafter has no place for it (attention_bias is off)")

    def _check_activation(self) -> None:
        found, ours = activation_of(self.target), self.drafter.config.activation
        if found != ours:
            self.problems.append(f"the target's activation is {found}, the drafter's {ours}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
