"""Everything that can be refused before anything slow is refused here, all problems at once. Imports no torch.

    artifacts = accepted(config, ["train", "evaluate"])

Reads the target's description, not its weights:

    facts.py     what config.json and the tokenizer files say     drafter.py   what the target allows the drafter to be
    stages.py    what a stage would refuse after hours            machine.py   what this machine cannot serve
    checkpoint.py  a drafter to start from, or to take as it is
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from pipeline import chain
from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.preflight import drafter, machine, stages
from pipeline.preflight.drafter import check_layers, default_layers, refuse_mask_token_in_corpus
from pipeline.preflight.facts import TargetFacts
from pipeline.preflight.machine import has_gpu

__all__ = [
    "accepted",
    "check",
    "check_layers",
    "check_stages",
    "default_layers",
    "has_gpu",
    "refuse_mask_token_in_corpus",
]


def accepted(config: Config, names: Sequence[str] | None = None, *, elsewhere: bool = False) -> dict[str, Artifact]:
    """The resolved chain of a configuration that can run.

    Args:
        names: the stages to run; None for all active ones. Finished ones are not checked: they will not run.
        elsewhere: they will run on other machines, so what this one lacks does not count.

    Raises ConfigError with every problem of the target, the inputs, the stages and the machine.
    """
    problems: list[str] = []
    artifacts: dict[str, Artifact] = {}
    facts: TargetFacts | None = None
    with _collected(problems):
        facts = TargetFacts.of(config)
    with _collected(problems):
        artifacts = chain.resolve(config)
    active = chain.active(config)
    if off := [name for name in names or () if name not in active]:
        problems.append(f"stage {', '.join(off)} is off in this configuration (active: {', '.join(active)})")
    wanted = [name for name in names or active if name not in artifacts or not artifacts[name].complete]
    begun = [name for name in wanted if name in artifacts and artifacts[name].path.exists()]
    if facts is not None:
        problems += drafter.problems(config, facts)
        problems += stages.problems(config, wanted, facts, begun=begun)
    if not elsewhere:
        problems += machine.problems(config, wanted)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return artifacts


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Those of a ConfigError go into `problems`, and the checks go on."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def check(config: Config) -> None:
    """Raises ConfigError naming all the target cannot serve: layers (S4), mask token (S6), vocabulary (S30), shape."""
    if found := drafter.problems(config, TargetFacts.of(config)):
        raise ConfigError(found)


def check_stages(config: Config, names: Sequence[str]) -> None:
    """Raises ConfigError naming all that would end one of the stages `names` after those before it have run."""
    if found := list(stages.problems(config, names, TargetFacts.of(config))):
        raise ConfigError(found)
