"""Runs vLLM on token prompts and reports tokens and speculative counts. Started by vLLM's own Python, not by ours.

    VLLM_PYTHON client.py request.json      {"target", "prompts", "max_tokens", "speculative", "exact_norm", "out"}

`exact_norm` replaces the one kernel of the CPU build that reads only the first row of a two-dimensional norm weight, so
that every draft layer's context keys are normalised by its own weight, as on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the patch below must reach the model
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def exact_norm() -> None:
    """Normalise each draft layer's context keys by that layer's own weight."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self: Any, keys: torch.Tensor) -> torch.Tensor:
        weight = self._k_norm_weights[:, None, None, :]
        scale = torch.rsqrt(keys.float().pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return (keys.float() * scale).to(keys.dtype) * weight

    DFlashQwen3Model._normalize_context_k = normalize


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    if request.get("exact_norm"):
        exact_norm()
    llm = LLM(
        model=request["target"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=request.get("max_model_len", 256),
        max_num_seqs=request.get("max_num_seqs", 8),
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=request["speculative"],
        **request.get("engine", {}),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling, use_tqdm=False)
    counts: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name != metric.name:
            counts[name] = getattr(metric, "value", None) if hasattr(metric, "value") else list(metric.values)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(request["out"]).write_text(json.dumps({"tokens": tokens, "counts": counts}))


if __name__ == "__main__":
    main()
