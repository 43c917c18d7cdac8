"""Whoever fills a rolling or streamed cache beside training: a thread of rank 0, or `dspark feed` elsewhere.

feeding = Feeding.beside(context, device)              # rank 0; does nothing where another process feeds already
feeding.alive()                                        # raises when shards can no longer be expected
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pipeline import stopping
from pipeline.chain import StageContext
from pipeline.corpus.tokens import read_tokens
from pipeline.errors import ArtifactError
from pipeline.lease import STALE_SECONDS, lease
from pipeline.progress import say
from pipeline.shards.feeder import Feeder
from pipeline.shards.layout import Spec
from pipeline.shards.plan import show_bytes
from pipeline.shards.reader import load_rms
from pipeline.shards.remote import Remote
from pipeline.shards.rolling import WINDOW
from pipeline.shards.stream import ShardStream
from pipeline.shards.supply import Computed, Copied, Supply
from pipeline.shards.tokenrows import TokenRows
from pipeline.target import Target
from pipeline.training.batches import held_out

_IDLE_SECONDS = 0.1
LEASE = "feeder.json"


def validation_of(context: StageContext) -> Callable[[Sequence[str]], list[bool]]:
    """Which rows training holds out, from their ids."""
    return partial(_held_out, fraction=context.config.train.validation_fraction)


def _held_out(ids: Sequence[str], *, fraction: float) -> list[bool]:
    return held_out(ids, fraction)


def load_target(context: StageContext, layers: Sequence[int], device: torch.device) -> Target:
    """The frozen target as `targets` loads it."""
    config = context.config
    return Target.of(config.target, str(context.target_path), layers=layers, dtype=config.targets.dtype, device=device)


def make_feeder(context: StageContext, device: torch.device) -> Feeder:
    """Loads the target where it computes the shards. Raises ConfigError when `targets.max_bytes` is too small."""
    artifact, settings = context.chain["targets"], context.config.targets
    manifest = artifact.manifest()
    spec = Spec.of(manifest["targets"])
    rows = TokenRows(context.chain["tokens"], read_tokens, window=WINDOW, left_out=manifest.get("left_out"))
    supply: Supply
    if settings.mode == "streamed":
        supply = Copied(rows, artifact, ShardStream(Remote(str(settings.url)), spec, manifest["remote"]))
    else:
        supply = Computed(
            rows,
            artifact,
            load_target(context, manifest["targets"]["layers"], device),
            spec,
            batch_tokens=settings.batch_tokens,
            channel_rms_LD=load_rms(artifact.path, spec),
        )
    assert settings.max_bytes is not None
    return Feeder(
        rows,
        artifact,
        supply,
        spec,
        max_bytes=settings.max_bytes,
        seed=context.config.seed,
        validation=validation_of(context),
    )


def feed(feeder: Feeder, done: Callable[[], bool]) -> None:
    """Keep the cache ahead of training until `done`, then delete what rolled. After a stop it stays for the next start.

    Raises Stopped.
    """
    while not done():
        stopping.check()
        if not feeder.step():
            time.sleep(_IDLE_SECONDS)
    feeder.clear()


class Feeding:
    """This rank's view of whoever feeds: `thread` is set where that is ourselves."""

    def __init__(self, context: StageContext) -> None:
        self._train = context.chain["train"]
        self._path = context.chain["targets"].path / LEASE
        self.thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._seen = time.monotonic()

    @classmethod
    def beside(cls, context: StageContext, device: torch.device) -> Feeding:
        """Start feeding in a thread, unless another process holds the lease already.

        The target is loaded here, before any thread runs: loading changes torch's default dtype for a while.
        """
        made = cls(context)
        held = contextlib.ExitStack()
        try:
            held.enter_context(lease(made._path))
        except ArtifactError:
            say("train: another process feeds the cache")
            return made
        try:
            feeder = make_feeder(context, device)
        except BaseException:
            held.close()
            raise
        limit = show_bytes(context.config.targets.max_bytes or 0)
        does = "fetching" if context.config.targets.mode == "streamed" else "building"
        say(f"train: {does} target shards beside training, at most {limit} on disk")
        made.thread = threading.Thread(target=made._run, args=(feeder, held), name="feeder", daemon=True)
        made.thread.start()
        return made

    def _run(self, feeder: Feeder, held: contextlib.ExitStack) -> None:
        try:
            with held:
                feed(feeder, lambda: self._train.complete)
        except BaseException as error:  # noqa: BLE001 - told to the ranks that wait, by `alive`
            self._error = error

    def alive(self) -> None:
        """Called while waiting for a shard. Raises what ended the feeder, or ArtifactError when nobody feeds."""
        stopping.check()
        if self._error is not None:
            raise self._error
        now = time.monotonic()
        with contextlib.suppress(OSError):
            if time.time() - self._path.stat().st_mtime < STALE_SECONDS:
                self._seen = now
        if now - self._seen > 2 * STALE_SECONDS:
            raise ArtifactError(f"{self._path}: no sign of life from the process that feeds target shards")
