"""The whole chain priced: a row per active stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.chain import active
from pipeline.config import Config
from pipeline.draft.config import DraftConfig
from pipeline.operations.costs import disk, memory, work
from pipeline.operations.costs.corpus import Corpus
from pipeline.operations.costs.hardware import Device, devices, engine_of
from pipeline.shards.layout import Spec
from pipeline.shards.plan import Shape


@dataclass(frozen=True)
class Cost:
    """One stage. Device-seconds are None where no device works; `memory` is bytes per rank by what holds them."""

    stage: str
    disk_bytes: float | None = None
    exact: bool = False
    flops: float = 0.0
    device_seconds: float | None = None
    devices: int = 1
    memory: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def wall_seconds(self) -> float | None:
        return None if self.device_seconds is None else self.device_seconds / self.devices

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    def plain(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "stage": self.stage, "disk_bytes": self.disk_bytes, "exact": self.exact, "flops": self.flops,
            "device_hours": _hours(self.device_seconds), "devices": self.devices,
            "wall_hours": _hours(self.wall_seconds), "memory_bytes": self.memory_bytes or None, "memory": self.memory,
            "note": self.note,
        }  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Everything prices are made from: the configuration, shapes, the corpus, and the accepted length.

    `tau_source` says where that is from: given, measured, or assumed (nothing is known before training).
    """

    config: Config
    shape: Shape
    draft: DraftConfig
    spec: Spec
    corpus: Corpus
    tau: float = work.ASSUMED_TAU
    tau_source: str = "assumed"

    @property
    def training(self) -> work.Training:
        return work.training(self.config, self.corpus, self.draft)

    @property
    def decodings(self) -> dict[str, list[work.Decoding]]:
        return work.decodings(self.config, self.corpus, self.draft.block_size, self.tau)

    @property
    def shards(self) -> int:
        """Units of work of the sharded stages: text shards of the train split."""
        return max(1, -(-self.corpus.conversations // self.config.data.shard_rows))

    @property
    def target_passes(self) -> int:
        """How often the target reads the corpus: once into a finished cache, not at all where that lies elsewhere, else
        once per epoch of training.
        """
        train = self.config.train
        if self.config.targets.mode == "streamed":
            return 0
        if self.config.targets.mode == "cached":
            return 1
        if train.steps is None:
            return train.epochs
        return max(1, -(-train.steps * train.global_batch_size // self.corpus.rows))

    def target_flops(self) -> float:
        """All of the target's passes over the corpus; its head runs where `topk` and `full` need logits."""
        corpus = self.corpus
        head = 0 if self.config.targets.logits == "last_hidden" else corpus.supervised
        if self.config.targets.positions == "all" and head:
            head = corpus.tokens
        return self.target_passes * self.shape.forward_flops(
            tokens=corpus.tokens, samples=corpus.rows, head_positions=head
        )


def price(setting: Setting, device: Device) -> list[Cost]:
    """A row per active stage, in order."""
    stored = disk.stage_bytes(
        setting.config, setting.shape, setting.draft, setting.spec, setting.corpus, setting.training
    )
    found = []
    for stage in active(setting.config):
        cost = _PRICES.get(stage, _text)(setting, device, stage)
        size = stored.get(stage)
        found.append(Cost(**{**vars(cost), "disk_bytes": size and size.count, "exact": bool(size and size.exact)}))
    return found


def _text(setting: Setting, device: Device, stage: str) -> Cost:
    note = "by a server" if stage == "answers" else "CPU only"
    return Cost(stage, devices=devices(setting.config, stage), note=note)


def _targets(setting: Setting, device: Device, stage: str) -> Cost:
    config = setting.config
    if config.targets.mode == "rolling":
        return Cost(stage, note="built beside training")
    if config.targets.mode == "streamed":
        return Cost(stage, note="fetched beside training")
    flops, count = setting.target_flops(), min(devices(config, stage), setting.shards)
    parts = memory.targets_memory(config, setting.shape, setting.spec, ranks=count)
    return Cost(stage, flops=flops, device_seconds=device.seconds(flops), devices=count, memory=parts)


def _train(setting: Setting, device: Device, stage: str) -> Cost:
    config, steps = setting.config, setting.training
    if config.train.published is not None:
        return Cost(stage, note="nothing is trained")
    engine, count = engine_of(config), devices(config, stage)
    per_step = work.training_flops(setting.shape, setting.draft, steps, config.targets.logits)
    flops = per_step * (steps.steps + steps.validated_rows / steps.rows / 3)
    if config.targets.mode != "cached":
        flops += setting.target_flops()
    parts = memory.training_memory(
        config, setting.shape, setting.draft, setting.spec, steps, engine=engine, ranks=count
    )
    note = f"{engine}, {steps.steps:,} steps"
    return Cost(stage, flops=flops, device_seconds=device.seconds(flops), devices=count, memory=parts, note=note)


def _decoding(setting: Setting, device: Device, stage: str) -> Cost:
    config, runs = setting.config, setting.decodings[stage]
    if not runs:
        return _text(setting, device, stage) if stage == "answers" else Cost(stage, note="nothing to decode")
    shared = setting.shards if stage == "answers" else sum(run.units for run in runs if run.drafted)
    count, seconds, flops = min(devices(config, stage), shared), 0.0, 0.0
    for run in runs:
        own = work.decoding_flops(setting.shape, setting.draft, run)
        seconds += device.seconds(own, work.decoding_bytes(setting.shape, setting.draft, run))
        flops += own
    parts = [memory.decoding_memory(config, setting.shape, setting.draft, run, ranks=count) for run in runs]
    largest = max(parts, key=lambda one: sum(one.values()))
    note = f"tau {setting.tau:.3g} {setting.tau_source}" if any(run.drafted for run in runs) else ""
    return Cost(stage, flops=flops, device_seconds=seconds, devices=count, memory=largest, note=note)


def _profile(setting: Setting, device: Device, stage: str) -> Cost:
    config, shape = setting.config, setting.shape
    amount = work.ProfileWork.of(config)
    if not amount.forwards:
        return Cost(stage, note="not measured here")
    flops = work.profile_flops(config, shape, amount)
    return Cost(
        stage, flops=flops, device_seconds=device.seconds(flops, work.profile_bytes(config, shape, amount)),
        memory=memory.decoding_memory(config, shape, setting.draft, work.profiled(config)),
    )  # fmt: skip


_PRICES = {
    "answers": _decoding,
    "targets": _targets,
    "train": _train,
    "calibrate": _decoding,
    "profile": _profile,
    "evaluate": _decoding,
}


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600
