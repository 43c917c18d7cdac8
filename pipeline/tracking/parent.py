"""Files of a whole experiment, on its parent run: the report, comparisons, studies.

The parent has a journal of its own beside its record, `<work_dir>/runs/<experiment>/.tracking/journal.jsonl`, sent like
a stage's: a store that is away costs a warning, and the next call sends what waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.artifact import digest
from pipeline.chain import array_share
from pipeline.config import Config
from pipeline.progress import say
from pipeline.tracking.delivery import Delivery, Place
from pipeline.tracking.journal import Journal, Sent
from pipeline.tracking.places import artifact_location, parent_folder, store_uri
from pipeline.tracking.redact import redact_text

_PATIENCE_SECONDS = 30.0


def attach(config: Config, paths: Sequence[Path], folder: str = "") -> None:
    """Put files on the experiment's parent run, under `folder`, with what earlier calls could not send. Never raises.

    A file of the same name is replaced. Without files, and with nothing left from before, nothing is done.
    """
    if not config.tracking.enabled or array_share()[0] != 0:
        return
    try:
        _attach(config, paths, folder)
    except Exception as error:
        say(f"tracking: files of {config.experiment} not attached ({redact_text(repr(error))[:300]})", warning=True)


def _attach(config: Config, paths: Sequence[Path], folder: str) -> None:
    home, name = parent_folder(config, config.experiment), config.experiment
    journal, parent = Journal(home), Sent(home, digest(store_uri(config)))
    for path in paths:
        journal.event(file=str(path.resolve()), folder=folder)
    if parent.offset >= journal.size():
        return
    place = Place(store_uri(config), artifact_location(config, name), name, parent, run_name=name)
    delivery = Delivery(journal, parent, place)
    delivery.start()
    if not delivery.stop(_PATIENCE_SECONDS):
        say(f"tracking: not everything was sent; the next report sends what waits in {journal.path}")
