"""The target's parts a drafter shares: embedding, final norm, head. Read without the decoder layers.

    frozen = load_frozen("Qwen/Qwen3-4B", dtype=torch.bfloat16, device="cuda")
    logits_NV = frozen.logits(last_hidden_ND)

Training from a cache needs no more of the target than this, and of a sharded hub checkpoint only the files that hold
these tensors are fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from pipeline.architecture import scales
from pipeline.errors import ConfigError
from pipeline.kernels.products import Workspace, wide_product

_EMBED = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_NORM = ("norm.weight", "norm_f.weight", "ln_f.weight", "final_layernorm.weight", "final_layer_norm.weight")
_HEAD = ("lm_head.weight", "embed_out.weight")
_INDEX = "model.safetensors.index.json"
_NOT_TEXT = ("vision", "visual", "audio", "vae.")


@dataclass(frozen=True)
class Frozen:
    """The target's parts a drafter shares: never trained, never saved with it.

    `embed_VD`, `head_VD` (the same tensor when tied) and `norm_D` are the stored weights; `embed_scale`, `logit_scale`
    and `logit_softcap` are what the architecture applies around them.
    """

    embed_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor
    config: Any
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        return self.head_VD.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.head_VD.shape[1]

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids [...], scaled as the target scales them (Gemma, Granite)."""
        out = F.embedding(ids, self.embed_VD)
        # The factor is rounded to the weights' dtype first, as transformers does.
        return out if self.embed_scale == 1.0 else out * torch.tensor(self.embed_scale, dtype=out.dtype).item()

    def logits(self, last_hidden_ND: Tensor, rows: Tensor | None = None) -> Tensor:
        """fp32 logits [N, V] (or [N, len(rows)]) of post-final-norm states, with scale and soft-cap (S11).

        Products of bf16 tensors are not rounded to bf16: a logit of 20 would move by up to 0.06.
        """
        head = self.head_VD if rows is None else self.head_VD[rows]
        hidden = last_hidden_ND.to(head.dtype)
        if head.dtype.itemsize >= 4:
            return self.finish(F.linear(hidden, head).float())
        out_NV = torch.empty(len(hidden), len(head), dtype=torch.float32, device=hidden.device)
        return self.finish(wide_product([(hidden, head)], out_NV, Workspace(hidden.device)))

    def rough_logits(self, last_hidden_ND: Tensor) -> Tensor:
        """Like `logits`, at half the cost on a CPU in bf16: good to about 2⁻⁹ relative. Refine with `logits_at`."""
        if self.head_VD.dtype == torch.float32 or last_hidden_ND.is_cuda:
            return self.logits(last_hidden_ND)
        return self.finish(F.linear(last_hidden_ND.to(self.head_VD.dtype), self.head_VD).float())

    def logits_at(self, last_hidden_ND: Tensor, ids_Nn: Tensor) -> Tensor:
        """fp32 logits [N, n] of n tokens per row, from fp32 products."""
        chosen_NnD = F.embedding(ids_Nn, self.head_VD).float()
        hidden_ND1 = last_hidden_ND.to(self.head_VD.dtype).float()[..., None]
        return self.finish(torch.bmm(chosen_NnD, hidden_ND1)[..., 0])

    def finish(self, raw: Tensor) -> Tensor:
        """What follows the head's matrix product: scale, then soft-cap."""
        if self.logit_scale != 1.0:
            raw = raw * self.logit_scale
        if self.logit_softcap is not None:
            raw = torch.tanh(raw / self.logit_softcap) * self.logit_softcap
        return raw

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Frozen:
        """A copy elsewhere; a tied head stays one tensor."""
        embed = self.embed_VD.to(device=device, dtype=dtype)
        tied = self.head_VD is self.embed_VD
        head = embed if tied else self.head_VD.to(device=device, dtype=dtype)
        norm = self.norm_D.to(device=device, dtype=dtype)
        return Frozen(embed, head, norm, self.config, self.embed_scale, self.logit_scale, self.logit_softcap)


def text_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's transformers configuration (its text part when it reads more than text)."""
    return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code).get_text_config()


def load_frozen(
    path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Frozen:
    """Read embedding, final norm and head of a local folder or hub id, without the decoder layers.

    Raises ConfigError when the weights are not in safetensors files or a tensor is not found.
    """
    config = text_config(path, revision=revision, trust_remote_code=trust_remote_code)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    wanted = {"embedding": _EMBED, "final norm": _NORM, **({} if tied else {"head": _HEAD})}
    found = {
        what: tensor.to(device=device, dtype=dtype)
        for what, tensor in read_tensors(path, wanted, revision=revision).items()
    }
    embed = found["embedding"]
    return frozen_parts(embed, found.get("head", embed), found["final norm"], config)


def frozen_parts(embed_VD: Tensor, head_VD: Tensor, norm_D: Tensor, config: Any) -> Frozen:
    """Scales as config.json states them; `Target.check` proves them against the model itself."""
    embed_scale, logit_scale = scales(config.to_dict())
    embed_scale = float(torch.tensor(embed_scale).to(embed_VD.dtype))
    softcap = getattr(config, "final_logit_softcapping", None)
    return Frozen(embed_VD, head_VD, norm_D, config, embed_scale, logit_scale, softcap)


# ------------------------------------------------------------------------------------------------ single tensors


def read_tensors(path: str, wanted: Mapping[str, Sequence[str]], *, revision: str | None = None) -> dict[str, Tensor]:
    """One tensor per entry of `wanted` (what → name endings, first match wins), outside the decoder layers.

    Of a sharded hub checkpoint only the files that hold a wanted tensor are fetched. Raises ConfigError naming every
    entry that was not found.
    """
    files = tensor_files(path, revision=revision)
    chosen = {what: _choose(files, endings) for what, endings in wanted.items()}
    if absent := [what for what, name in chosen.items() if name is None]:
        raise ConfigError(
            [f"target.model: {path}: no {what} tensor (looked for *{', *'.join(wanted[what])})" for what in absent]
        )
    return {
        what: read_named(path, [str(name)], files=files, revision=revision)[str(name)] for what, name in chosen.items()
    }


def read_named(
    path: str, names: Sequence[str], *, files: Mapping[str, str] | None = None, revision: str | None = None
) -> dict[str, Tensor]:
    """Tensors by their exact names; the files that hold them are opened once each."""
    where = files or tensor_files(path, revision=revision)
    if absent := [name for name in names if name not in where]:
        raise ConfigError([f"target.model: {path}: no tensor {name}" for name in absent])
    out: dict[str, Tensor] = {}
    for file in sorted({where[name] for name in names}):
        with safe_open(_local(path, file, revision), framework="pt") as opened:
            out |= {name: opened.get_tensor(name) for name in names if where[name] == file}
    return {name: out[name] for name in names}


def tensor_files(path: str, *, revision: str | None = None) -> dict[str, str]:
    """Tensor name → file name of a checkpoint. Raises ConfigError when it has no safetensors files."""
    index = cached_file(path, _INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        return dict(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
    single = cached_file(path, "model.safetensors", revision=revision, _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise ConfigError(f"target.model: {path}: no model.safetensors; convert the checkpoint to safetensors first")
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), "model.safetensors")


def _local(path: str, file: str, revision: str | None) -> str:
    found = cached_file(path, file, revision=revision)
    if found is None:
        raise ConfigError(f"target.model: {path}: {file} is named in its index but missing")
    return str(found)


def _choose(files: Mapping[str, str], endings: Sequence[str]) -> str | None:
    names = [
        name
        for name in files
        if "layers." not in name and ".h." not in name and not any(part in name for part in _NOT_TEXT)
    ]
    for ending in endings:
        matches = [name for name in names if name == ending or name.endswith("." + ending)]
        if matches:
            return min(matches, key=len)
    return None
