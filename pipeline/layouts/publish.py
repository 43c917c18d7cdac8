"""Write one layout's folder and prove it, all or nothing.

    facts = publish(folder, drafter, layout="deepspec", frozen=frozen, origin=origin, options=Options())

The folder is made under a temporary name and only gets its own when the self-check has passed, so a folder that exists
is one that was proved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pipeline import engines
from pipeline.artifact import atomic_path
from pipeline.draft.interface import Drafter
from pipeline.errors import ConfigError
from pipeline.layouts import files, mtp
from pipeline.layouts.check import Expectation, self_check
from pipeline.layouts.config_json import Origin, write_config
from pipeline.layouts.tensors import left_out, to_layout

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Options:
    """`side_files`: name -> JSON content, shipped beside the checkpoint (STS, SPS).

    `tokenizer(folder)` puts the tokenizer files there; `card(facts)` is the README.md, told what the check found.
    """

    dtype: str = "bfloat16"
    target_tensors: bool = False
    max_shard_bytes: int = 5_000_000_000
    side_files: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Callable[[Path], list[str]] | None = None
    card: Callable[[Mapping[str, Any]], str] | None = None


def publish(
    folder: Path, drafter: Drafter, *, layout: str, frozen: Any, origin: Origin, options: Options
) -> dict[str, Any]:
    """Write `folder` in `layout`; returns the facts the self-check proved.

    Args:
        frozen: the target's embedding and head (`pipeline.frozen.Frozen`), in float32 for an exact comparison.
    Raises:
        ConfigError: the layout cannot carry the drafter; nothing is written.
        ArtifactError: what was written does not read back as the drafter; nothing is kept.
    """
    facts = facts_of(drafter, frozen, target_type=str(origin.meta.get("target_type", "qwen3")))
    engines.refuse([layout], [], facts)
    if layout == "mtp" and (problems := mtp.size_problems(drafter.config, frozen.config.to_dict())):
        raise ConfigError(problems)
    dtype = DTYPES[options.dtype]
    target_tensors = options.target_tensors or facts.scaled
    config = write_config(drafter.config, layout, replace(origin, dtype=options.dtype))
    state = to_layout(
        drafter.config, drafter.state_dict(), layout, frozen=frozen, dtype=dtype, target_tensors=target_tensors
    )
    with atomic_path(folder) as temporary:
        temporary.mkdir(parents=True)
        files.write_tensors(temporary, state, max_shard_bytes=options.max_shard_bytes)
        _write_json(temporary / "config.json", config)
        for name, content in options.side_files.items():
            _write_json(temporary / name, content)
        if options.tokenizer is not None:
            options.tokenizer(temporary)
        proved = self_check(temporary, drafter, frozen, Expectation(layout, config, dtype, target_tensors))
        proved["left_out"] = ["confidence_head"] if left_out(drafter.config, layout) else []
        if options.card is not None:
            (temporary / "README.md").write_text(options.card(proved), encoding="utf-8")
        files.write_hashes(temporary, layout=layout, **proved)
    return proved


def facts_of(drafter: Drafter, frozen: Any, *, target_type: str) -> engines.Facts:
    """What decides where this drafter can go."""
    config = drafter.config
    return engines.Facts(
        kind=config.kind,
        layout=config.layout,
        markov=config.markov,
        vocabulary=config.draft_vocab_size is not None,
        taps=config.taps,
        scaled=frozen.embed_scale != 1.0 or frozen.logit_scale != 1.0,
        activation=config.activation,
        target_type=target_type,
        tapped=len(config.target_layer_ids),
        biased=config.attention_bias,
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
