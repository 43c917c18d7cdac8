"""What `accelerate launch` makes of the shipped files: each starts the engine it promises, and none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.launched import ENGINES, engine_of
from pipeline.schema import Train

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "accelerate"


@pytest.mark.parametrize("name", ENGINES)
def test_each_file_starts_its_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands import launch
    from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    started: list[dict[str, Any]] = []
    for launcher, prepare in (
        ("simple_launcher", lambda arguments: prepare_simple_launcher_cmd_env(arguments)[1]),
        ("multi_gpu_launcher", prepare_multi_gpu_env),
        ("deepspeed_launcher", lambda arguments: prepare_deepspeed_cmd_env(arguments)[1]),
    ):
        monkeypatch.setattr(
            launch,
            launcher,
            lambda arguments, prepare=prepare: started.append(
                {**prepare(arguments), "WORLD_SIZE": str(arguments.num_processes)}
            ),
        )
    words = ["--config_file", str(FOLDER / f"{name}.yaml"), "-m", "pipeline", "train"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    (environ,) = started
    assert environ["WORLD_SIZE"] == ("1" if name == "single" else "2")
    assert engine_of(Train(steps=1), environ) == name


def test_there_is_one_file_for_every_engine() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(ENGINES)
