"""What a real queue says, in the words `dspark status` and `dspark submit` go by."""

from __future__ import annotations

import pytest

from launch import queue
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm


def test_states_of_single_jobs_arrays_and_dependents(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    quiet = ["--parsable", "--output=/dev/null", "--wrap=sleep 60"]
    array = cluster.run("sbatch", "--array=0-1", *quiet).strip()
    after = cluster.run("sbatch", f"--dependency=afterok:{array}", *quiet).strip()
    try:
        cluster.until(lambda: cluster.states(array) == ["RUNNING", "RUNNING"], 60, "two running tasks")
        cluster.until(lambda: "Dependency" in (queue.states() or {}).get(after, ""), 30, "the reason for waiting")
        states = queue.states()
        assert states is not None and states[array] == "2 RUNNING" and states[after] == "PENDING (Dependency)"
    finally:
        cluster.run("scancel", array, after)
    cluster.until(lambda: queue.states() == {}, 60, "an empty queue")
