"""What a launcher may ask for, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config import Train
from pipeline.errors import ConfigError
from pipeline.launched import engine_of

ACCELERATE = {
    "ddp": {"WORLD_SIZE": "2"},
    "single": {},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "WORLD_SIZE": "2"},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"},
}


@pytest.mark.parametrize(("engine", "environ"), ACCELERATE.items())
def test_the_launcher_chooses_the_engine(engine: str, environ: dict[str, str]) -> None:
    assert engine_of(Train(), environ) == engine
    assert engine_of(Train(engine=engine), environ) == engine


REFUSED = {
    "tensor parallelism": {"PARALLELISM_CONFIG_TP_SIZE": "2", "WORLD_SIZE": "2"},
    "context parallelism": {"PARALLELISM_CONFIG_CP_SIZE": "2"},
    "a parallelism_config (PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2)": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
    "2 processes were started (SLURM_STEP_NUM_TASKS), but WORLD_SIZE is not set": {"SLURM_STEP_NUM_TASKS": "2"},
    "4 processes were started (OMPI_COMM_WORLD_SIZE)": {"OMPI_COMM_WORLD_SIZE": "4"},
    "Megatron-LM (pipeline": {"ACCELERATE_USE_MEGATRON_LM": "true"},
    "fsdp1": {"ACCELERATE_USE_FSDP": "true"},
    "gradient_accumulation_steps 4": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    "gradient_clipping 0.5": {"ACCELERATE_GRADIENT_CLIPPING": "0.5"},
    "mixed_precision fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
    "mixed_precision bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "train.compile": {"ACCELERATE_DYNAMO_BACKEND": "inductor"},
    "offloading": {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_USE_DEEPSPEED": "1"},
    "4 processes were to be started": {"DSPARK_WORLD_SIZE": "4"},
    "MASTER_PORT is 0": {"WORLD_SIZE": "2", "MASTER_PORT": "0"},
}


@pytest.mark.case("DST-09")
@pytest.mark.case("DST-11")
@pytest.mark.parametrize(("message", "environ"), REFUSED.items())
def test_what_the_launcher_asks_for_against_our_settings_is_refused(message: str, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        engine_of(Train(), environ)
    assert message in str(error.value)
    if "parallelism" in message:
        assert "allowed: single, ddp, zero1" in str(error.value)


def test_all_conflicts_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        engine_of(Train(engine="single"), {"WORLD_SIZE": "2", "ACCELERATE_GRADIENT_CLIPPING": "2.0"})
    assert len(error.value.problems) == 2


def test_sharded_checkpoints_are_refused_where_state_only_gathers() -> None:
    assert engine_of(Train(sharded_checkpoints=True), ACCELERATE["fsdp2"]) == "fsdp2"
    with pytest.raises(ConfigError, match="zero2 checkpoints are gathered; use single, ddp, fsdp2"):
        engine_of(Train(sharded_checkpoints=True), ACCELERATE["zero2"])


@pytest.mark.case("DST-09")
def test_a_deepspeed_file_may_tune_but_not_contradict(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}

    def engine(**content: object) -> str:
        file.write_text(json.dumps(content))
        return engine_of(Train(), environ)

    assert engine(gradient_clipping=1.0, zero_optimization={"reduce_bucket_size": 1000}) == "zero2"
    assert engine(zero_optimization={"stage": 3}) == "zero3"
    assert engine(zero_optimization={"stage": "auto"}, tensor_parallel={}, sequence_parallel_size=1) == "zero2"
    for content in (
        {"gradient_clipping": 0.3}, {"gradient_accumulation_steps": 2}, {"train_batch_size": 64},
        {"bf16": {"enabled": True}}, {"optimizer": {"type": "Adam"}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2}, {"pipeline": {"stages": 2}},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(content)) if "zero_" not in str(content) else "offload"):
            engine(**content)
    environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = "1"
    with pytest.raises(ConfigError, match="stage 3, the accelerate configuration says 1"):
        engine(zero_optimization={"stage": 3})
    with pytest.raises(ConfigError, match="cannot be read"):
        file.write_text("{")
        engine_of(Train(), environ)


@pytest.mark.case("DST-09")
def test_the_engine_is_configured_from_our_settings_alone() -> None:
    from pipeline.distributed import deepspeed_config

    made = deepspeed_config(2, Train(max_grad_norm=0.7))
    assert made["gradient_clipping"] == 0.7 and made["gradient_accumulation_steps"] == 1
    assert made["zero_optimization"]["stage"] == 2 and "bf16" not in made and "optimizer" not in made
