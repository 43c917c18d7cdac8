"""MLflow: one parent run per experiment, one child run per stage, written by rank 0. It never stops or slows a run.

    tracker = open_tracker(config, "train", artifact, inputs=inputs)
    tracker.metrics({"loss": 2.3}, step=7)
    tracker.close("FINISHED")

Everything goes first into `<artifact>/tracking/journal.jsonl`, which costs a local write; a background thread sends it
in batches. So a slow, dead or absent server costs one warning, and what was not sent is sent by the next run that
opens or reuses the artifact, each metric once. A resumed stage goes on in the same MLflow run.
"""

from pipeline.tracking.parent import attach
from pipeline.tracking.redact import redact, redact_text
from pipeline.tracking.tracker import NullTracker, Tracker, note_reuse, open_tracker

__all__ = ["NullTracker", "Tracker", "attach", "note_reuse", "open_tracker", "redact", "redact_text"]
