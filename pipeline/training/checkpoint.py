"""Checkpoints: one folder per saved step, published whole, written off the step path.

    checkpoints/step-000120/{weights,exp_avg,exp_avg_sq}.safetensors, state.json
    checkpoints/latest                    the folder's name, replaced after the folder is complete

A kill at any moment leaves the previous checkpoint in force: folders appear by rename, and `latest` follows. Edit
`latest` to go back to an older one; remove it, and the newest one there is counts. The state is by parameter name and
whole (see `state`), so any engine on any number of ranks goes on from it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.artifact import atomic_path, read_json, write_json
from pipeline.errors import ArtifactError
from pipeline.training.state import MOMENTS, Snapshot, check

FORMAT = 1
_WEIGHTS = "weights"


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def latest(root: Path) -> Path | None:
    """The checkpoint that `latest` names; without that file the newest one. None where there is none.

    Raises ArtifactError when `latest` names nothing.
    """
    pointer, known = root / "latest", _known(root)
    if not pointer.exists():
        return root / known[-1] if known else None
    name = pointer.read_text(encoding="utf-8").strip()
    if name not in known:
        raise ArtifactError(f"{pointer}: names {name!r}, which is not there; point it at one of {known}, or remove it")
    return root / name


def load(folder: Path) -> Snapshot:
    """Read a checkpoint and check every tensor's shape against what was saved. Raises ArtifactError."""
    facts = read_json(folder / "state.json")
    if facts.get("format") != FORMAT:
        raise ArtifactError(f"{folder / 'state.json'}: format {facts.get('format')}, this version reads {FORMAT}")
    from pipeline.training import sharded

    if (folder / sharded.FOLDER).is_dir():
        tensors = sharded.load(folder / sharded.FOLDER, facts["shapes"])
        return Snapshot(tensors.pop(_WEIGHTS), tensors, facts)
    tensors = {}
    for kind in (_WEIGHTS, *MOMENTS):
        path = folder / f"{kind}.safetensors"
        try:
            tensors[kind] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error
        check(tensors[kind], facts["shapes"], str(path))
    return Snapshot(tensors.pop(_WEIGHTS), tensors, facts)


def unreadable(path: Path, error: BaseException) -> ArtifactError:
    """The error for a damaged part of a checkpoint; it says how to go on without that checkpoint."""
    return ArtifactError(
        f"{path}: cannot be read ({error}); to go on from the checkpoint before, remove this one and `latest`"
    )


class Writer:
    """Does one piece of work at a time, in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Waits for the work before. Raises what that one raised, StorageError for a full disk."""
        self.wait()
        self._running = self._pool.submit(work)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()


class Saver(Writer):
    """Writes snapshots, and keeps the newest few. Only rank 0 has one."""

    def __init__(self, root: Path, keep: int, shapes: Mapping[str, list[int]]) -> None:
        super().__init__()
        self.root, self.keep, self.shapes = root, keep, dict(shapes)
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(root / ".tmp", ignore_errors=True)  # what killed runs left half-written

    def submit(self, snapshot: Snapshot) -> None:
        """Start writing. Raises what the save before raised, ArtifactError for tensors of another shape."""
        self.wait()
        for kind, tensors in ((_WEIGHTS, snapshot.weights), *snapshot.moments.items()):
            check(tensors, self.shapes, f"step {snapshot.step}, {kind}, before saving")
        self.start(partial(self._write, snapshot))

    def submit_best(self, snapshot: Snapshot, facts: Mapping[str, Any]) -> None:
        """Keep the weights of the step with the lowest validation loss beside the checkpoints, as `best/`."""
        self.start(partial(self._write_best, snapshot, dict(facts)))

    def amend(self, step: int, **facts: Any) -> None:
        """Change what the state.json of a checkpoint says, once what goes before that is whole."""
        self.wait()
        path = folder_of(self.root, step) / "state.json"
        write_json(path, {**read_json(path), **facts})

    def _write(self, snapshot: Snapshot) -> None:
        folder = folder_of(self.root, snapshot.step)
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            save_file(snapshot.weights, temporary / f"{_WEIGHTS}.safetensors")
            for kind in MOMENTS:
                save_file(snapshot.moments[kind], temporary / f"{kind}.safetensors")
            state = {"format": FORMAT, "shapes": self.shapes, **snapshot.facts}
            (temporary / "state.json").write_text(json.dumps(state, sort_keys=True), encoding="utf-8")
        self.point_at(folder)

    def point_at(self, folder: Path) -> None:
        """Name `folder` in `latest`, then remove all but the newest `keep` up to it.

        What came after it goes too: a kill has left it, or somebody has pointed `latest` at an older one.
        """
        with atomic_path(self.root / "latest") as temporary:
            temporary.write_text(folder.name + "\n", encoding="utf-8")
        known = _known(self.root)
        kept = known[: known.index(folder.name) + 1][-self.keep :]
        for name in known:
            if name not in kept:
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _write_best(self, snapshot: Snapshot, facts: dict[str, Any]) -> None:
        with atomic_path(self.root / "best") as temporary:
            temporary.mkdir()
            save_file(snapshot.weights, temporary / f"{_WEIGHTS}.safetensors")
            (temporary / "best.json").write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")


def _known(root: Path) -> list[str]:
    """Names of the whole checkpoints, oldest first."""
    folders = [path.parent for path in root.glob("step-*/state.json")]
    return [path.name for path in sorted(folders, key=lambda path: int(path.name.partition("-")[2]))]


def random_state() -> dict[str, Any]:
    """This process's random generators as plain data: python, numpy, torch, and CUDA where there is one."""
    import random

    import numpy as np
    import torch

    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state().tolist()
    return found


def restore_random(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    import random

    import numpy as np
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # another kind of device keeps another state
            torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
