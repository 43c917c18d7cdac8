"""Run a function on several real ranks in about a second.

    def summed(value):                       # module-level, so that another process can find it by name
        dist.init_process_group("gloo")
        ...
        return total

    assert run_ranks(summed, 2, 3.0) == [6.0, 6.0]

A launcher process (this file, run with `python -m tests.ranks`) imports the test's module once and never computes
anything; every call forks its ranks from there, so the seconds that torch and transformers need to load are paid once
per session. Each rank has the variables torchrun would set (RANK, WORLD_SIZE, MASTER_PORT …) and its own session.
Once a rank fails, the others get a few seconds to end by themselves; at the time limit all are killed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[1]


class RankFailure(AssertionError):
    """A rank died, was killed, hung, or raised something that cannot travel between processes."""


def run_ranks(
    fn: Callable[..., Any],
    world: int = 2,
    *args: Any,
    timeout: float = 60,
    grace: float = 5,
    env: Mapping[str, str] | None = None,
    needs: Iterable[str] = (),
    catch: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on `world` forked ranks; the results in rank order.

    Args:
        fn: a module-level function. It initialises torch.distributed itself.
        timeout: seconds until every rank is killed and the test fails.
        grace: seconds the other ranks get to end by themselves once one has failed.
        env: further environment variables of the ranks.
        needs: modules the launcher imports first and keeps, e.g. `("deepspeed",)`; the test's own imports are implied.
        catch: put a rank's exception in its place in the list instead of raising.

    Raises:
        The exception of the lowest failing rank that raised one (its traceback and output added as a note), else
        RankFailure for a rank that died or hung.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        request = {
            "module": fn.__module__, "name": fn.__qualname__, "args": args, "world": world, "timeout": timeout,
            "grace": grace, "env": dict(env or {}), "needs": list(needs), "folder": str(folder),
        }  # fmt: skip
        problem = _launcher().ask(request)
        if problem:
            raise RankFailure(problem)
        outcomes = [_outcome(folder, rank) for rank in range(world)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = [value for ok, value in outcomes if not ok]
    if failed and not catch:
        raise min(failed, key=lambda error: isinstance(error, RankFailure))
    return [value for _, value in outcomes]


def _outcome(folder: Path, rank: int) -> tuple[bool, Any]:
    """(True, result) or (False, exception) of one rank, from the files it and the launcher left."""
    output = (folder / f"{rank}.log").read_text(errors="replace")[-4000:] if (folder / f"{rank}.log").exists() else ""
    try:
        ok, value, trace = pickle.loads((folder / f"{rank}.result").read_bytes())
    except (OSError, EOFError):
        end = folder / f"{rank}.end"
        how = end.read_text() if end.exists() else "no trace left"
        ok, value, trace = False, RankFailure(f"rank {rank} ended without a result: {how}"), ""
    if not ok:
        value.add_note(f"on rank {rank}:\n{trace}\noutput of rank {rank}:\n{output}")
    return ok, value


# ------------------------------------------------------------------------------------------------ talking to it


class _Launcher:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks"], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = os.getpid()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> str:
        """Send one request, wait until its ranks have ended; an error text, empty when the ranks were started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin, request)
            return str(_receive(self._process.stdout))
        except (OSError, EOFError) as error:
            return f"the launcher process ended ({error!r})"

    def alive(self) -> bool:
        return self._process.poll() is None and self.pid == os.getpid()

    def close(self) -> None:
        if self.pid == os.getpid() and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait(timeout=30)


_current: _Launcher | None = None


def _launcher() -> _Launcher:
    global _current
    if _current is None or not _current.alive():
        _current = _Launcher()
    return _current


def _send(stream: IO[bytes], value: Any) -> None:
    blob = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(blob)) + blob)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


# ------------------------------------------------------------------------------------------------ the launcher itself


def _serve() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print at import must not mix with the replies
    importlib.import_module("torch.distributed")
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        try:
            for name in [*request["needs"], request["module"]]:
                importlib.import_module(name)
            problem = ""
        except BaseException:
            problem = f"the launcher cannot import what the ranks need:\n{traceback.format_exc()}"
        if not problem:
            _run(request)
        _send(replies, problem)


def _run(request: dict[str, Any]) -> None:
    """Fork the ranks, watch them, kill what hangs."""
    folder, world = Path(request["folder"]), request["world"]
    port = _free_port()
    release, hold = os.pipe()  # ranks that are done wait here: rank 0 hosts the store the others may still need
    alive = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.close(hold)
            _rank(request, rank, port, release)
        alive[pid] = rank
    os.close(release)
    deadline = time.monotonic() + request["timeout"]
    graced = False
    while alive and not all((folder / f"{rank}.result").exists() for rank in alive.values()):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in alive:
            _note_end(folder, alive.pop(pid), status)
        failed = len(alive) < world or any((folder / f"{rank}.failed").exists() for rank in alive.values())
        if failed and not graced:
            graced, deadline = True, min(deadline, time.monotonic() + request["grace"])
        if time.monotonic() > deadline:
            for pid, rank in alive.items():
                if not (folder / f"{rank}.result").exists():
                    why = "another rank failed first" if graced else f"it hung for {request['timeout']} s"
                    (folder / f"{rank}.end").write_text(f"killed, because {why}")
                    os.killpg(pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    os.close(hold)
    for pid, rank in alive.items():
        _note_end(folder, rank, os.waitpid(pid, 0)[1])


def _note_end(folder: Path, rank: int, status: int) -> None:
    end = folder / f"{rank}.end"
    if not end.exists():
        code = os.waitstatus_to_exitcode(status)
        end.write_text(f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}")


def _rank(request: dict[str, Any], rank: int, port: int, release: int) -> None:
    """The body of one rank; never returns."""
    code = 1
    try:
        os.setsid()
        folder, world = Path(request["folder"]), request["world"]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", **request["env"],
        )  # fmt: skip
        code = _call(request, folder, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0:  # one that failed leaves at once, as a process does: its peers notice
            select.select([release], [], [], request["timeout"])
    finally:
        os._exit(code)  # no destructors: a process group may hold threads that abort at interpreter exit


def _call(request: dict[str, Any], folder: Path, rank: int) -> int:
    try:
        fn: Any = importlib.import_module(request["module"])
        for part in request["name"].split("."):
            fn = getattr(fn, part)
        outcome = (True, fn(*request["args"]), "")
    except BaseException as error:
        outcome = (False, error, traceback.format_exc())
    try:
        blob = pickle.dumps(outcome)
        pickle.loads(blob)
    except Exception as error:
        what = f"rank {rank}: {outcome[1]!r} cannot travel between processes ({error!r})"
        blob = pickle.dumps((False, RankFailure(what), outcome[2]))
    ok = pickle.loads(blob)[0]
    if not ok:
        (folder / f"{rank}.failed").touch()
    (folder / f"{rank}.part").write_bytes(blob)
    (folder / f"{rank}.part").rename(folder / f"{rank}.result")
    return 0 if ok else 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.modules["tests.ranks"] = sys.modules["__main__"]  # tests import this file by name: one RankFailure, one class
    RankFailure.__module__ = "tests.ranks"
    _serve()
