"""The literal commands that serve a published folder, per engine, and the reason where an engine cannot."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from pipeline import engines
from pipeline.engines import Facts
from pipeline.errors import ConfigError

VLLM_SINCE = {"dspark": "0.25", "dflash": "0.20", "eagle3": "0.9", "mtp": "0.19"}


def method(facts: Facts) -> str:
    """What vLLM calls the drafter."""
    return {"fill_in": "dflash", "dflash": "dspark"}.get(facts.family, facts.family)


def speculative_config(facts: Facts, *, folder: str, tokens: int) -> dict[str, object]:
    """vLLM's `speculative_config`."""
    config: dict[str, object] = {"method": method(facts), "model": folder, "num_speculative_tokens": tokens}
    if facts.family == "mtp":
        del config["model"]  # it lies in the target's own checkpoint
    return config


def command(
    engine: str,
    *,
    layout: str,
    facts: Facts,
    target: str,
    folder: str,
    tokens: int,
    side_files: Mapping[str, str] | None = None,
) -> str:
    """The shell command that serves `target` with the drafter in `folder`.

    Args:
        tokens: tokens drafted per round (K, in every layout).
        side_files: `sts` and `sps` -> file names in the folder, for engines that read them.
    Raises:
        ConfigError: the engine cannot serve it from this layout; names those that can.
    """
    reason = engines.engine_problem(engine, layout, facts)
    if reason is not None:
        able = ", ".join(engines.servers(layout, facts)) or "none"
        raise ConfigError(f"{engine} {reason}. Engines that serve it from the {layout} layout: {able}")
    writer = {
        "vllm": _vllm,
        "sglang": _sglang,
        "llama.cpp": _llama,
        "deepspec": _none,
        "speculators": _none,
        "specforge": _none,
    }[engine]
    return writer(facts, shlex.quote(target), shlex.quote(folder), tokens, dict(side_files or {}))


def _vllm(facts: Facts, target: str, folder: str, tokens: int, side_files: dict[str, str]) -> str:
    config = json.dumps(speculative_config(facts, folder=shlex.split(folder)[0], tokens=tokens))
    if facts.family == "mtp":
        merge = f"python -m pipeline.layouts.mtp {folder} {target} target-with-head\n"
        return f"{merge}vllm serve target-with-head --speculative-config {shlex.quote(config)}"
    return f"vllm serve {target} --speculative-config {shlex.quote(config)}"


def _sglang(facts: Facts, target: str, folder: str, tokens: int, side_files: dict[str, str]) -> str:
    if facts.family == "eagle3":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {tokens + 1}"
        )
    algorithm = "DFLASH" if facts.family == "fill_in" else "DSPARK"
    base = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {folder}"
    )
    if algorithm == "DFLASH" or "sts" not in side_files:
        return base
    base = f"SGLANG_RAGGED_VERIFY_MODE=compact {base}"
    for name, option in (("sts", "confidence-sts-path"), ("sps", "sps-table-path")):
        if name in side_files:
            base += f" --speculative-dspark-{option} {folder}/{side_files[name]}"
    return base


def _llama(facts: Facts, target: str, folder: str, tokens: int, side_files: dict[str, str]) -> str:
    kind = {"fill_in": "draft-dflash", "eagle3": "draft-eagle3"}.get(facts.family, "draft-dspark")
    return (
        f"python convert_hf_to_gguf.py {target} --outtype bf16 --outfile target.gguf\n"
        f"python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outtype bf16 --outfile draft.gguf\n"
        f"llama-server -m target.gguf -md draft.gguf --spec-type {kind} --spec-draft-n-max {tokens}"
    )


def _none(facts: Facts, target: str, folder: str, tokens: int, side_files: dict[str, str]) -> str:
    return ""
