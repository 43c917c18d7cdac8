"""An MTP head in the form dense Qwen3.5 targets carry theirs: tensors `mtp.*` inside the target's own checkpoint.

    python -m pipeline.layouts.mtp EXPORT_FOLDER TARGET_FOLDER OUT_FOLDER     # the target with this head in it

Three differences to our layer are bridged exactly. Their attention output is multiplied by sigmoid(gate), the gate's
rows interleaved with the query's: ours has no gate, so its rows are zero (factor one half) and the output projection is
doubled. Their norms store weight − 1. Their sizes and rotary parameters are the target's, so ours must be too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.architecture import read_rope
from pipeline.artifact import atomic_path, read_json
from pipeline.draft.config import DraftConfig
from pipeline.errors import ArtifactError, DsparkError
from pipeline.layouts import files

PREFIX = "mtp."
FILE = "mtp.safetensors"
_Q, _O = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"


def shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every `mtp.*` tensor of a dense Qwen3.5 head."""
    width, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    layer = {
        "self_attn.q_proj": (2 * config.heads * d, width),
        "self_attn.k_proj": (config.kv_heads * d, width),
        "self_attn.v_proj": (config.kv_heads * d, width),
        "self_attn.o_proj": (width, config.heads * d),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    top = {
        "fc": (width, 2 * width),
        "pre_fc_norm_embedding": (width,),
        "pre_fc_norm_hidden": (width,),
        "norm": (width,),
    }
    names = {**{f"layers.0.{name}": shape for name, shape in layer.items()}, **top}
    return {f"{PREFIX}{name}.weight": shape for name, shape in names.items()}


def size_problems(config: DraftConfig, target: Mapping[str, Any]) -> list[str]:
    """What differs from the target's own layers: an engine builds the head from the target's configuration."""
    wanted = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
    }
    problems = [
        f"mtp: {key} is {value!r} in the head and {target.get(key)!r} in the target; engines take the target's"
        for key, value in wanted.items()
        if target.get(key) != value
    ]
    if config.attention_bias:
        problems.append("mtp: the head's projections have biases; the served layer has none")
    if config.rope != read_rope(target):
        problems.append(f"mtp: rotary parameters {config.rope} are not the target's {read_rope(target)}")
    return problems


def to_published(config: DraftConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state under their names, in float32; the confidence head has no place there."""
    out = {}
    for name, tensor in state.items():
        if name.startswith("confidence_head."):
            continue
        value = tensor.float()
        if _is_norm(name):
            value = value - 1.0
        elif name == _Q:
            rows = value.view(config.heads, config.head_dim, -1)
            value = torch.cat([rows, torch.zeros_like(rows)], dim=1).flatten(0, 1)
        elif name == _O:
            value = value * 2.0
        out[f"{PREFIX}{name}"] = value
    return out


def from_published(config: DraftConfig, found: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """The inverse. Raises ArtifactError for a head whose gate does something: our layer has none."""
    state = {}
    for full, tensor in found.items():
        name, value = full.removeprefix(PREFIX), tensor.float()
        if _is_norm(name):
            value = value + 1.0
        elif name == _Q:
            rows = value.view(config.heads, 2, config.head_dim, -1)
            if bool(rows[:, 1].any()):
                raise ArtifactError(f"{where}: {full} has a gate on the attention output, which our MTP layer does not")
            value = rows[:, 0].flatten(0, 1)
        elif name == _O:
            value = value / 2.0
        state[name] = value
    return state


def rounded(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as it comes back after being stored in `dtype`: norms are rounded around zero, the rest as it is."""
    return (value - 1.0).to(dtype).float() + 1.0 if _is_norm(name) else value.to(dtype).float()


def _is_norm(name: str) -> bool:
    return name.removesuffix(".weight").endswith("norm") or name.startswith("pre_fc_norm")


# ------------------------------------------------------------------------------------------------ the target's folder


def install(export: Path, target: Path, out: Path) -> None:
    """Make `out`: the target's checkpoint with the exported head in place of its own.

    Files that hold no `mtp.*` tensor are hard-linked where the file system allows it; the others are written without
    them. `config.json` gets `mtp_num_hidden_layers: 1`. `out` appears when it is whole.

    Raises ArtifactError when the export was changed, `target` is no checkpoint folder, or `out` exists.
    """
    files.check_hashes(export)
    if out.exists():
        raise ArtifactError(f"{out}: exists; name a new folder")
    head = files.read_tensors(export)
    weights = files.weight_files(target)
    config = read_json(target / "config.json", ours=False)
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    with atomic_path(out) as made:
        made.mkdir(parents=True)
        places: dict[str, str] = {}
        for path in target.iterdir():
            if path.is_file() and path not in weights and path.name not in (files.INDEX, "config.json"):
                shutil.copyfile(path, made / path.name)
        for path in weights:
            places |= dict.fromkeys(_without_head(path, made / path.name), path.name)
        save_file(head, made / FILE, metadata={"format": "pt"})
        places |= dict.fromkeys(head, FILE)
        total = sum((made / name).stat().st_size for name in set(places.values()))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (made / files.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _without_head(source: Path, out: Path) -> list[str]:
    """Put a weight file into place without its `mtp.*` tensors; returns the names kept."""
    with safe_open(source, framework="pt") as file:
        names = list(file.keys())
        kept = [name for name in names if not name.startswith(PREFIX)]
        if len(kept) < len(names):
            save_file({name: file.get_tensor(name) for name in kept}, out, metadata={"format": "pt"})
            return kept
    try:
        os.link(source.resolve(), out)
    except OSError:
        shutil.copyfile(source, out)
    return kept


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m pipeline.layouts.mtp EXPORT_FOLDER TARGET_FOLDER OUT_FOLDER")
    try:
        install(*(Path(argument) for argument in sys.argv[1:]))
    except DsparkError as error:
        sys.exit(f"error: {error}")
