"""What the launcher asked for, read from its environment variables, and what of it is refused. Imports no torch.

accelerate and torchrun configure a run through the environment. Whatever has a setting of ours (clipping, accumulation,
batch, precision, compilation) is written into the engine from that one source; a launcher that says something else is
refused rather than obeyed or ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Train
from pipeline.errors import ConfigError

ENGINES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
SHARDED = ("single", "ddp", "fsdp2")  # DeepSpeed keeps its state in a form that only gathers
_OFF = ("", "no", "none", "auto", "false", "0")


def engine_of(train: Train, environ: Mapping[str, str]) -> str:
    """The engine a run uses: `train.engine`, or what the launcher was configured with.

    Raises ConfigError with everything the launcher asks for that this trainer refuses.
    """
    launched = _launched(environ)
    problems = [*_layouts(environ), *_settings(train, environ)]
    world = int(environ.get("WORLD_SIZE", "1"))
    engine = train.engine or launched or ("ddp" if world > 1 else "single")
    if launched is not None and launched != engine:
        problems.append(f"train.engine is {engine}, but the accelerate configuration asks for {launched}")
    if engine == "single" and world > 1:
        problems.append(f"train.engine is single, but {world} processes were started; use ddp, zero1-3 or fsdp2")
    if train.sharded_checkpoints and engine not in SHARDED:
        problems.append(
            f"train.sharded_checkpoints: {engine} checkpoints are gathered; use {', '.join(SHARDED)}, or leave it false"
        )
    problems += _alone(environ)
    if world > 1 and environ.get("MASTER_PORT") == "0":
        problems.append("MASTER_PORT is 0, where ranks would never meet; torchrun --standalone finds a port")
    wanted = environ.get("DSPARK_WORLD_SIZE")
    if wanted is not None and int(wanted) != world:
        problems.append(f"{wanted} processes were to be started, this one finds WORLD_SIZE {world}")
    if problems:
        raise ConfigError(problems)
    return engine


def _launched(environ: Mapping[str, str]) -> str | None:
    if _on(environ, "ACCELERATE_USE_DEEPSPEED"):
        return f"zero{environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE') or _stage(deepspeed_file(environ)) or 2}"
    if _on(environ, "ACCELERATE_USE_FSDP"):
        return f"fsdp{environ.get('FSDP_VERSION', '1')}"
    return None


def _stage(file: Mapping[str, Any]) -> Any:
    """The ZeRO stage of a DeepSpeed file, None where it leaves that open."""
    stage = file.get("zero_optimization", {}).get("stage")
    return None if stage == "auto" else stage


def _alone(environ: Mapping[str, str]) -> list[str]:
    """Processes started side by side that know nothing of each other would each train the whole run."""
    return [
        f"{environ[name]} processes were started ({name}), but WORLD_SIZE is not set, so each would train alone: use "
        "slurm/stage.sbatch or torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        if "WORLD_SIZE" not in environ and int(environ.get(name, "1")) > 1
    ]


def _layouts(environ: Mapping[str, str]) -> list[str]:
    """Tensor, pipeline, context and sequence parallelism do not apply to a drafter."""
    allowed = f"allowed: {', '.join(ENGINES)}"
    problems = [
        f"accelerate configuration: {what} ({name}={environ[name]}) is not supported in training; {allowed}"
        for what, name in (
            ("tensor parallelism", "PARALLELISM_CONFIG_TP_SIZE"),
            ("context parallelism", "PARALLELISM_CONFIG_CP_SIZE"),
            ("sequence parallelism", "PARALLELISM_CONFIG_SP_SIZE"),
            ("a parallelism_config", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE"),
            ("a parallelism_config", "PARALLELISM_CONFIG_DP_SHARD_SIZE"),
        )
        if int(environ.get(name, "1") or 1) > 1
    ]
    if _on(environ, "ACCELERATE_USE_MEGATRON_LM"):
        problems.append(f"accelerate configuration: Megatron-LM (pipeline parallelism) is not supported; {allowed}")
    problems += [
        f"DeepSpeed configuration file: {what} parallelism ({name}) is not supported in training; {allowed}"
        for what, name in (
            ("tensor", "tensor_parallel"),
            ("sequence", "sequence_parallel_size"),
            ("pipeline", "pipeline"),
        )
        if deepspeed_file(environ).get(name) not in (None, 1, {})
    ]
    launched = _launched(environ)
    if launched is not None and launched not in ENGINES:
        problems.append(f"accelerate configuration: {launched} is not supported; {allowed}")
    return problems


def _settings(train: Train, environ: Mapping[str, str]) -> list[str]:
    problems = []
    accumulation = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "").lower()
    if accumulation not in (*_OFF, "1"):
        problems.append(
            f"accelerate configuration: gradient_accumulation_steps {accumulation}: leave it at 1; accumulation "
            "follows from train.global_batch_size and train.micro_batch_tokens"
        )
    clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "").lower()
    if clipping not in _OFF and float(clipping) != train.max_grad_norm:
        problems.append(
            f"accelerate configuration: gradient_clipping {clipping}, train.max_grad_norm is {train.max_grad_norm}"
        )
    mixed = environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    if mixed not in _OFF and not (mixed == "bf16" and train.precision == "bfloat16"):
        problems.append(
            f"accelerate configuration: mixed_precision {mixed}, train.precision is {train.precision}; set 'no' there"
        )
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in _OFF:
        problems.append("accelerate configuration: dynamo_backend is set; use train.compile")
    if _on(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        problems.append("accelerate configuration: fsdp_activation_checkpointing; use train.activation_checkpointing")
    for name in ("FSDP_OFFLOAD_PARAMS", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
                 "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"):  # fmt: skip
        if environ.get(name, "").lower() not in _OFF:
            problems.append(f"accelerate configuration: offloading ({name}={environ[name]}) is not supported")
    return problems + _deepspeed_file_problems(train, environ)


def _deepspeed_file_problems(train: Train, environ: Mapping[str, str]) -> list[str]:
    found = deepspeed_file(environ)
    wanted: dict[str, Any] = {"gradient_clipping": train.max_grad_norm, "gradient_accumulation_steps": 1}
    problems = [
        f"DeepSpeed configuration file: {name} {found[name]}, this run uses {value}"
        for name, value in wanted.items()
        if name in found and found[name] not in ("auto", value)
    ]
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage is not None and _stage(found) not in (None, int(stage)):
        problems.append(
            f"DeepSpeed configuration file: stage {_stage(found)}, the accelerate configuration says {stage}"
        )
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu")
    problems += [
        f"DeepSpeed configuration file: {name} is set in train.* here; remove it there"
        for name in (*batch, "optimizer", "scheduler")
        if found.get(name, "auto") != "auto"
    ]
    problems += [
        f"DeepSpeed configuration file: {name} is enabled; precision is train.precision"
        for name in ("fp16", "bf16", "torch_autocast")
        if found.get(name, {}).get("enabled") is True
    ]
    zero = found.get("zero_optimization", {})
    problems += [
        f"DeepSpeed configuration file: {name} is not supported"
        for name in ("offload_optimizer", "offload_param")
        if zero.get(name, {}).get("device", "none") != "none"
    ]
    return problems


def deepspeed_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """The DeepSpeed JSON named in the accelerate configuration, {} without one. Raises ConfigError when unreadable."""
    name = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if name.lower() in _OFF:
        return {}
    try:
        return dict(json.loads(Path(name).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed configuration file {name}: cannot be read ({error})") from error


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("1", "true", "yes")
