"""The same function over many units of work, in this process or in several, with stop requests honoured in between.

    for result in each(writer.run, units, workers=8): ...

Workers start clean: nothing of this process (threads, CUDA, tokenizers) leaks into them. Where they need a library that
is slow to import, they are forked from a server process that has imported it once for all. Stop signals, which Slurm
and terminals send to every process, do not reach them: this process waits for the units in work.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from pipeline import stopping

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(
    function: Callable[[Item], Result], items: Sequence[Item], *, workers: int, preload: Sequence[str] = ()
) -> Iterator[Result]:
    """Results in the order of completion. An exception in a worker is raised here and ends the others' queue.

    `preload` names modules that are slow to import and needed by every worker.
    """
    if workers <= 1 or len(items) <= 1:
        for item in items:
            stopping.check()
            yield function(item)
        return
    context = multiprocessing.get_context("forkserver" if preload else "spawn")
    if preload:
        context.set_forkserver_preload(list(preload))
    with stopping.shielded():
        pool = ProcessPoolExecutor(min(workers, len(items)), mp_context=context, initializer=_quiet_threads)
        futures = [pool.submit(function, item) for item in items]
    try:
        for future in as_completed(futures):
            yield future.result()
            stopping.check()
    except (BrokenProcessPool, KeyboardInterrupt):
        for process in multiprocessing.active_children():
            process.kill()  # the pool would send SIGTERM, which they do not hear
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _quiet_threads() -> None:
    """One thread per worker: processes are the parallelism, and a tokenizer's own threads only fight over cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
