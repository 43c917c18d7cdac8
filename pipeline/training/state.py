"""The state of a run by parameter name, in and out of every engine: what makes checkpoints engine-neutral.

    snapshot = gather(engine)          # a collective; full fp32 tensors on rank 0's CPU
    load_weights(objective, snapshot)  # before the engine wraps the module
    load_moments(engine, snapshot)     # after it

DeepSpeed and FSDP2 spread weights and moments over ranks, each in its own way. Nothing of that reaches a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.distributed import Engine
from pipeline.errors import ArtifactError

MOMENTS = ("exp_avg", "exp_avg_sq")
_PREFIX = "drafter."


@dataclass
class Snapshot:
    """Weights and AdamW moments by the drafter's parameter names, and everything else a run needs to go on."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps taken: the index of the next one."""
        return int(self.facts["step"])


def shapes(objective: nn.Module) -> dict[str, list[int]]:
    """Full shape of every parameter. Take it before an engine wraps the module."""
    return {name.removeprefix(_PREFIX): list(value.shape) for name, value in objective.named_parameters()}


def check(tensors: Mapping[str, Tensor], expected: Mapping[str, list[int]], where: str) -> None:
    """Raise ArtifactError unless `tensors` are exactly those expected, each with its full shape, fp32 and not empty."""
    problems = [f"{name}: missing" for name in expected.keys() - tensors.keys()]
    problems += [f"{name}: unexpected" for name in tensors.keys() - expected.keys()]
    for name in expected.keys() & tensors.keys():
        found = list(tensors[name].shape)
        if found != list(expected[name]):
            problems.append(f"{name}: shape {found}, expected {list(expected[name])}")
    if problems:
        raise ArtifactError("\n".join([f"{where}: not a state of this drafter", *sorted(problems)]))


def gather(engine: Engine, kinds: Sequence[str] = MOMENTS) -> Snapshot:
    """Collect whole weights, and moments of some kinds; every rank must call it. Only rank 0 gets tensors."""
    keep = engine.ranks.rank == 0
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    for name, parameter in _parameters(engine):
        full = _full_weight(engine, parameter)
        if keep:
            weights[name] = _store(full)
        for kind in kinds:
            full = _full_moment(engine, parameter, kind)
            if keep:
                moments[kind][name] = _store(full)
    return Snapshot(weights, moments)


def torch_state(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """Weights and moments as the engine holds them, spread or whole (not under DeepSpeed)."""
    state = _torch_optimizer(engine).state
    found: dict[str, dict[str, Tensor]] = {"weights": {}, **{kind: {} for kind in MOMENTS}}
    for name, parameter in _parameters(engine):
        found["weights"][name] = parameter.detach()
        for kind in MOMENTS:
            found[kind][name] = state[parameter][kind]
    return found


def load_weights(objective: nn.Module, snapshot: Snapshot, where: str) -> None:
    """Put a snapshot's weights into a module that no engine has wrapped yet."""
    check(snapshot.weights, shapes(objective), where)
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            parameter.copy_(snapshot.weights[name.removeprefix(_PREFIX)])


def load_moments(engine: Engine, snapshot: Snapshot, updates: int) -> None:
    """Put a snapshot's moments into a wrapped optimizer that has taken no step, as if it had taken `updates`."""
    if engine.deepspeed is not None:
        _create_flat_state(engine, updates)
    for name, parameter in _parameters(engine):
        for kind in MOMENTS:
            _set_moment(engine, parameter, kind, snapshot.moments[kind][name], updates)


def _parameters(engine: Engine) -> Iterator[tuple[str, Any]]:
    for name, parameter in engine.objective.named_parameters():
        yield name.removeprefix(_PREFIX), parameter


def _store(tensor: Tensor) -> Tensor:
    """A private fp32 copy on the CPU, safe to write while training goes on."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _full_weight(engine: Engine, parameter: Any) -> Tensor:
    if engine.ranks.engine == "zero3":
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]
    return _full(parameter)


def _full_moment(engine: Engine, parameter: Any, kind: str) -> Tensor:
    if engine.deepspeed is not None:
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, kind)  # type: ignore[no-any-return]
    return _full(_torch_optimizer(engine).state[parameter][kind])


def _set_moment(engine: Engine, parameter: Any, kind: str, value: Tensor, updates: int) -> None:
    if engine.ranks.engine == "zero3":
        _set_zero3(engine, parameter, kind, value)
    elif engine.deepspeed is not None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, value.to(engine.ranks.device), kind)
    else:
        state = _torch_optimizer(engine).state[parameter]
        state.setdefault("step", torch.tensor(float(updates), device=engine.ranks.device))
        state[kind] = _like(value, parameter)


def _like(value: Tensor, parameter: Any) -> Tensor:
    """`value` laid out as the parameter is: a plain tensor, or this rank's part of it."""
    if not hasattr(parameter, "full_tensor"):
        return value.to(parameter.device, parameter.dtype, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _torch_optimizer(engine: Engine) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)  # type: ignore[no-any-return]


def _create_flat_state(engine: Engine, updates: int) -> None:
    """DeepSpeed makes no optimizer state before its first step: make zeros for every flat partition, and `step`."""
    zero = engine.deepspeed.optimizer
    third = engine.ranks.engine == "zero3"
    for flat in zero.fp32_partitioned_groups_flat if third else zero.single_partition_of_fp32_groups:
        state = zero.optimizer.state[flat]
        state["step"] = torch.tensor(float(updates), device=flat.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(flat)
    if not third:
        zero._lazy_init_hp_params_optimizer_state()


def _set_zero3(engine: Engine, parameter: Any, kind: str, value: Tensor) -> None:
    """DeepSpeed's own setter fails where a size is not divisible by the ranks: pad, then take this rank's part."""
    zero = engine.deepspeed.optimizer
    part = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=kind)[0]
    padded = torch.zeros(part.numel() * engine.ranks.world, dtype=part.dtype)
    padded[: value.numel()] = value.flatten()
    part.copy_(padded.view(engine.ranks.world, -1)[engine.ranks.rank])
