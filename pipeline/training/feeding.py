"""Whoever fills a rolling or streamed cache beside training: a thread of rank 0, or `dspark feed` elsewhere.

feeding = Feeding.beside(context, device)              # rank 0; does nothing where another process feeds already
feeding.alive()                                        # raises when shards can no longer be expected
feeding.close()                                        # training has ended, in whatever way

A request to stop reaches ranks in the midst of a step, some of them waiting for a shard. The thread goes on feeding
until training has left, so that the step ends and all ranks save it together.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pipeline import stopping
from pipeline.artifact import read_json
from pipeline.chain import StageContext
from pipeline.corpus.tokens import read_tokens
from pipeline.errors import ArtifactError, Stopped
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
from pipeline.trace import FAILED, STOPPED, note_failure
from pipeline.training.batches import held_out

_IDLE_SECONDS = 0.1
_LEAVE_SECONDS = 10.0
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
        _work(feeder)
    feeder.clear()


def _work(feeder: Feeder) -> None:
    if not feeder.step():
        time.sleep(_IDLE_SECONDS)


class Feeding:
    """This rank's view of whoever feeds: `thread` is set where that is ourselves."""

    def __init__(self, context: StageContext) -> None:
        self._train = context.chain["train"]
        self._path = context.chain["targets"].path / LEASE
        self._patience = context.config.launch.grace_seconds / 2
        self.thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._left = threading.Event()
        self._seen, self._asked = time.monotonic(), float("inf")

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
                while not self._train.complete:
                    if self._left.is_set():
                        return
                    _work(feeder)
                feeder.clear()
        except BaseException as error:  # noqa: BLE001 - told by `alive`, to ranks that wait: this one may not
            self._error = error
            with contextlib.suppress(Exception):  # the disk may be the reason
                note_failure(self._train, error)

    def alive(self) -> None:
        """Called while waiting for a shard. Raises what ended the feeder, or ArtifactError when nobody feeds.

        Raises Stopped once half of `launch.grace_seconds` has gone by since a stop was asked for, here or of a rank
        that has left for it: time to go unsaved.
        """
        if self._error is not None:
            raise self._error
        failed = self._train.path / FAILED
        if failed.exists():
            raise ArtifactError(f"another rank failed: {read_json(failed)['error']}")
        stopped = self._train.path / STOPPED
        if stopped.exists():
            raise Stopped(read_json(stopped)["reason"])
        now = time.monotonic()
        if stopping.requested() is not None:
            self._asked = min(self._asked, now)
            if now - self._asked > self._patience:
                stopping.check()
        with contextlib.suppress(OSError):
            if time.time() - self._path.stat().st_mtime < STALE_SECONDS:
                self._seen = now
        if now - self._seen > 2 * STALE_SECONDS:
            raise ArtifactError(f"{self._path}: no sign of life from the process that feeds target shards")

    def close(self) -> None:
        """Let the thread end: after a finished training with the cache cleared, otherwise as it stands.

        Raises what had ended it before, for which training will have lost another rank.
        """
        self._left.set()
        if self.thread is not None:
            self.thread.join(_LEAVE_SECONDS)  # a shard that takes longer is dropped with the process
        if self._error is not None and not self._train.complete:
            raise self._error
