"""The frozen target: hidden states at tapped layers, and the last hidden state, which stands for its distribution.

    target = Target.load("work/models/smollm2-135m-instruct", layers=(1, 7, 14, 20, 27), dtype=torch.bfloat16)
    out = target.forward(ids_BT)                           # the decoder only: no head is run
    logits_NV = target.frozen.logits(out.last_hidden_BTD[mask_BT])

Tap l is the raw output of decoder layer l (S4), taken by a hook; `last_hidden` is what the head reads, after the final
norm (S11).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from pipeline import schema
from pipeline.errors import ConfigError
from pipeline.frozen import Frozen, frozen_parts, load_frozen, text_config
from pipeline.kernels import grouped_attention
from pipeline.preflight import check_layers, default_layers

transformers_logging.disable_progress_bar()  # its bar over tensors would tear our lines

__all__ = [
    "Frozen",
    "Target",
    "TargetOutput",
    "check_layers",
    "default_layers",
    "load_frozen",
    "pick_device",
    "text_config",
]


def pick_device() -> torch.device:
    """This process's accelerator (by LOCAL_RANK), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@dataclass(frozen=True)
class TargetOutput:
    """`taps_BTLD`: raw outputs of the tapped layers in id order; `last_hidden_BTD`: after the final norm."""

    taps_BTLD: Tensor
    last_hidden_BTD: Tensor


class Target:
    """A frozen causal language model, run without its head. Not an nn.Module: nothing of it is ever trained."""

    def __init__(self, model: nn.Module, *, layers: Sequence[int] = (), frozen: Frozen | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder: Any = model.get_decoder()  # type: ignore[operator]
        self.config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self.num_layers = len(self.decoder.layers)
        if layers and (problems := check_layers(layers, self.num_layers)):
            raise ConfigError(problems)
        self.layers = tuple(layers)
        self.frozen = frozen or _shared(model, self.decoder, self.config)
        self._taps: dict[int, Tensor] = {}
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        for layer in self.layers:
            self.decoder.layers[layer].register_forward_hook(self._tap(layer))

    @classmethod
    def load(
        cls,
        path: str,
        *,
        layers: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        device_map: str | None = None,
        tensor_parallel: bool = False,
    ) -> Target:
        """Load a local folder or hub id onto `device`, over several (`device_map`), or over ranks (tensor parallel).

        Raises ConfigError on layer ids outside S4, before weights are read.
        """
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        config = text_config(path, **options)
        if layers and (problems := check_layers(layers, config.num_hidden_layers)):
            raise ConfigError(problems)
        spread = bool(device_map) or tensor_parallel
        placement: dict[str, Any] = {"device_map": device_map} if device_map else {}
        if tensor_parallel:
            placement = _split_over_ranks(config)
        implementation = None if attention == "auto" else attention
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=implementation, **placement, **options
        )
        if attention == "auto" and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(grouped_attention.register())
        frozen = None
        if spread:  # weights may be split or off-loaded: read the shared parts on their own
            frozen = load_frozen(path, dtype=dtype, device=device, **options)
        return cls(model if spread else nn.Module.to(model, device), layers=layers, frozen=frozen)

    @classmethod
    def of(
        cls, settings: schema.Target, path: str, *, layers: Sequence[int], dtype: str, device: torch.device | str
    ) -> Target:
        """Load as the `target` section says, and check that its logits can be rebuilt."""
        target = cls.load(
            path, layers=layers, dtype=getattr(torch, dtype), device=device, attention=settings.attention,
            revision=settings.revision, trust_remote_code=settings.trust_remote_code, device_map=settings.device_map,
            tensor_parallel=settings.tensor_parallel,
        )  # fmt: skip
        target.check()
        return target

    @property
    def hidden_size(self) -> int:
        return self.frozen.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.frozen.vocab_size

    @property
    def device(self) -> torch.device:
        """Where ids go in."""
        device: torch.device = self.decoder.get_input_embeddings().weight.device
        return device

    def _tap(self, layer: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._taps[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.no_grad()
    def forward(
        self, ids_BT: Tensor, *, positions_BT: Tensor | None = None, mask: Any = None, cache: Any = None
    ) -> TargetOutput:
        """Run the decoder over token ids.

        `mask` None suits whole rows padded on the right (a causal row never sees what follows it, and attention stays
        on its fast path). A 2-D bool mask [B, T] marks real tokens (left padding: positions are counted from it); a 4-D
        bool mask [B, 1, T, N], or a dict of them by layer type, marks what each token sees. `cache` (a transformers
        Cache) is passed on. Rows that start again at position 0 in `positions_BT`, without mask or cache, are documents
        packed side by side.

        Raises ConfigError for a 4-D mask under an attention implementation that reads none.
        """
        if positions_BT is None and isinstance(mask, Tensor) and mask.dim() == 2:
            positions_BT = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -ids_BT.shape[1] :]
        arguments = {self._cache_name: cache} if cache is not None else {}
        try:
            out = self.decoder(
                input_ids=ids_BT,
                attention_mask=self._readable(mask),
                position_ids=positions_BT,
                use_cache=cache is not None,
                **arguments,
            )
            last = out.last_hidden_state
            taps = [self._taps[layer].to(last.device) for layer in self.layers]
        finally:
            self._taps.clear()
        empty = last.new_empty(*last.shape[:2], 0, last.shape[2])
        return TargetOutput(torch.stack(taps, dim=2) if taps else empty, last)

    def _readable(self, mask: Any) -> Any:
        """`mask` as the attention implementation reads it: eager adds a 4-D mask to the scores, so True would be 1."""
        if isinstance(mask, dict):
            return {kind: self._readable(one) for kind, one in mask.items()}
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.dtype != torch.bool:
            return mask
        implementation = str(self.config._attn_implementation)
        if "flash" in implementation:
            raise ConfigError(f"target.attention: {implementation} cannot decode rows of different lengths; use auto")
        if implementation != "eager":
            return mask
        dtype = self.frozen.embed_VD.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)

    @torch.no_grad()
    def check(self) -> None:
        """Raise ConfigError unless embeddings and logits rebuilt from `frozen` equal the model's own (S11).

        Costs one forward over a few tokens. Guards against architectures that do more around their head than we know.
        """
        ids = torch.arange(2, min(18, self.vocab_size), device=self.device)[None]
        entered: list[Tensor] = []
        hook = self.decoder.layers[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
        own = self.model(input_ids=ids, use_cache=False).logits[0]
        hook.remove()
        tolerance = 1e-4 if own.dtype == self.frozen.head_VD.dtype == torch.float32 else 3e-2
        rebuilt = self.frozen.logits(self.forward(ids).last_hidden_BTD[0].to(self.frozen.head_VD.device))
        for what, ours, theirs in (
            ("logits", rebuilt, own),
            ("embeddings", self.frozen.embed(ids[0].to(self.frozen.embed_VD.device)), entered[0][0]),
        ):
            error = (ours.float().cpu() - theirs.float().cpu()).abs().max() / theirs.float().abs().max().cpu()
            if not error <= tolerance:
                raise ConfigError(
                    f"target.model: {what} rebuilt from the frozen weights differ from the model's own by {error:.2g} "
                    f"(relative); the architecture {self.config.model_type} is not supported"
                )


def _split_over_ranks(config: Any) -> dict[str, Any]:
    """Arguments of from_pretrained for transformers' own plan. Raises ConfigError where heads do not divide."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    heads = {name: getattr(config, name, 0) or 0 for name in ("num_attention_heads", "num_key_value_heads")}
    if odd := [f"{name} = {count}" for name, count in heads.items() if count % world]:
        raise ConfigError(f"target.tensor_parallel: {', '.join(odd)} cannot be split over {world} ranks")
    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


def _shared(model: Any, decoder: Any, config: Any) -> Frozen:
    """Views of the loaded model's own tensors. A head with a bias is not one matrix product: refused."""
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"target.model: {config.model_type} has a bias in its head; not supported")
    embed_VD = decoder.get_input_embeddings().weight.detach()
    head_VD = head.weight.detach()
    if head_VD.data_ptr() == embed_VD.data_ptr():
        head_VD = embed_VD
    norm = next(
        (getattr(decoder, name) for name in ("norm", "final_layernorm", "ln_f") if hasattr(decoder, name)), None
    )
    if norm is None:
        raise ConfigError(f"target.model: no final norm found in {type(decoder).__name__}; not supported")
    return frozen_parts(embed_VD, head_VD, norm.weight.detach(), config)
