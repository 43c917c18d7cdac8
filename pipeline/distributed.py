"""Processes and engines: one trainer under plain torch, DDP, DeepSpeed ZeRO and FSDP2, on CPU (gloo) and CUDA.

    with started(config.train) as ranks:
        engine = ranks.prepare(objective, optimizer)
        loss, sums = engine.forward(batch, last=True)
        engine.backward(loss, last=True)
        norm = engine.update(learning_rate)
        total = ranks.sum(flat)

A step's micro-batches are counted by us, not by the engine: its own accumulation is 1, and the last micro-batch is the
boundary. Weights, gradients and reductions are fp32 in every engine; bf16 compute is autocast inside the wrapped
module. Nothing is reduced as a mean: numerators and denominators are summed separately (S14).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import Train
from pipeline.errors import ConfigError, DsparkError
from pipeline.launched import deepspeed_file, engine_of

T = TypeVar("T")


@dataclass
class Ranks:
    """This process among the others."""

    engine: str
    accelerator: Any
    max_grad_norm: float

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise, in the dtype given (fp64 for anything reported)."""
        if self.world == 1:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def gather(self, value: Any) -> list[Any]:
        """Plain data of every rank, in rank order."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def first(self, value: Any) -> Any:
        """Rank 0's plain data, on every rank."""
        return self.gather(value)[0]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns here, once it has succeeded everywhere.

        Where it failed on one rank, the others raise a DsparkError with its message and exit code.
        """
        error: DsparkError | None = None
        try:
            found = work()
        except DsparkError as raised:
            error = raised
        met = self.gather(None if error is None else (str(error), error.exit_code))
        if any(met):
            with contextlib.suppress(RuntimeError):  # a rank that leaves at once aborts one that is still reading
                self.barrier()
        if error is not None:
            raise error
        for number, failure in enumerate(met):
            if failure is not None:
                elsewhere = DsparkError(f"rank {number}: {failure[0]}")
                elsewhere.exit_code = failure[1]
                raise elsewhere
        return found

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def prepare(self, objective: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
        """Wrap module and optimizer. Load weights before; moments go in afterwards (`training.checkpoint`)."""
        if self.engine == "zero3":
            _whole_in_forward(objective)
        if self.engine == "fsdp2":
            units: tuple[str, ...] = getattr(objective.drafter, "shard_units", ())
            self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(units)
        module, wrapped = self.accelerator.prepare(objective, optimizer)
        return Engine(self, module, wrapped, objective)


@dataclass
class Engine:
    """One wrapped module with its optimizer."""

    ranks: Ranks
    module: nn.Module
    optimizer: Any
    objective: nn.Module

    @property
    def deepspeed(self) -> Any:
        """The DeepSpeed engine, None under the others."""
        return self.module if self.ranks.engine.startswith("zero") else None

    def forward(self, *inputs: Any, last: bool) -> Any:
        """One micro-batch. `last`: the step's last one, where gradients are reduced over ranks."""
        if self.deepspeed is not None:
            self.deepspeed.set_gradient_accumulation_boundary(last)
        with self._no_reduction(last):
            return self.module(*inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if self.deepspeed is not None:
            self.deepspeed.backward(loss)
            return
        with self._no_reduction(last):
            loss.backward()  # type: ignore[no-untyped-call]

    def _no_reduction(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if self.ranks.engine == "ddp" and not last and isinstance(self.module, nn.parallel.DistributedDataParallel):
            return self.module.no_sync()
        return contextlib.nullcontext()

    def settle(self) -> None:
        """After forwards without a backward: FSDP2 leaves the outermost weights whole there, waiting for one."""
        if self.ranks.engine == "fsdp2":
            for module in self.module.modules():
                reshard = getattr(module, "reshard", None)
                if callable(reshard):
                    reshard()

    def update(self, learning_rate: float) -> float:
        """Clip by the global norm, take the optimizer step, clear the gradients; returns the norm before clipping."""
        groups = self.deepspeed.optimizer.param_groups if self.deepspeed is not None else self.optimizer.param_groups
        for group in groups:
            group["lr"] = learning_rate
        if self.deepspeed is not None:
            self.deepspeed.step()
            return float(self.deepspeed.get_global_grad_norm() or 0.0)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.ranks.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@contextlib.contextmanager
def started(train: Train) -> Iterator[Ranks]:
    """Join the process group the launcher describes, and leave it at the end, after a barrier if all went well.

    Raises ConfigError for a refused launcher configuration, before anything is started.
    """
    engine = engine_of(train, os.environ)
    accelerator = _accelerator(engine, train)
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise ConfigError(f"{expected} processes were launched, but accelerate runs {accelerator.num_processes}")
    try:
        yield Ranks(engine, accelerator, train.max_grad_norm)
        accelerator.wait_for_everyone()  # leaving right after the last step can abort a rank that is still sending
    finally:
        _leave()


def _leave() -> None:
    """End the process group and forget accelerate's process-wide state, so that one process can start again."""
    from accelerate.state import AcceleratorState, GradientState

    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _accelerator(engine: str, train: Train) -> Any:
    """accelerate for each engine. On CPU it needs help: with `cpu=True` it would neither shard nor start DeepSpeed."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
    from accelerate.utils import DistributedType

    cpu = not torch.cuda.is_available()
    if engine.startswith("zero"):
        return _with_deepspeed(int(engine[-1]), train, cpu)
    options: dict[str, Any] = {
        "mixed_precision": "no",
        "kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    }
    if engine == "fsdp2":
        options["fsdp_plugin"] = _fsdp_plugin()
    if cpu:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        state = PartialState(cpu=True)
        if engine == "fsdp2":
            state.distributed_type = DistributedType.MULTI_GPU
        options["cpu"] = True
    return Accelerator(**options)


def _fsdp_plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def _with_deepspeed(stage: int, train: Train, cpu: bool) -> Any:
    try:
        import deepspeed.ops
    except ImportError as error:
        raise ConfigError(f"train.engine zero{stage} needs DeepSpeed, which is not installed ({error})") from error
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    options: dict[str, Any] = {"mixed_precision": "no"}
    if cpu:
        # Without this a C++ extension is compiled for a minute at the first start, and gloo is not chosen.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    # What accelerate's file says beside our configuration was checked (`launched`); accelerate would refuse it unread.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(stage, train), zero3_init_flag=False)
    return Accelerator(deepspeed_plugin=plugin, **options)


def deepspeed_config(stage: int, train: Train) -> dict[str, Any]:
    """The configuration DeepSpeed is started with: ours, over the tuning keys of a user's file (already checked)."""
    user = deepspeed_file(os.environ)
    zero = {"stage3_gather_16bit_weights_on_model_save": False, **user.get("zero_optimization", {}), "stage": stage}
    return {
        **user,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    }


def _whole_in_forward(objective: nn.Module) -> None:
    """ZeRO-3 gathers a module's own weights around its forward; W2 is read by the objective, so it is named there."""
    import deepspeed

    weight = getattr(objective.drafter, "markov_w2", None)
    if weight is not None:
        deepspeed.zero.register_external_parameter(objective, weight)
