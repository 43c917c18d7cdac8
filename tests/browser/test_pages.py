"""The two pages people look at, in a real browser: MLflow's, on a finished experiment, and report.html.

Every picture must decode, nothing may be wrong in the console, and no request may leave this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.stages import whole_chain

pytestmark = pytest.mark.browser
LOCAL = ("http://127.0.0.1:", "file://", "data:", "blob:http://127.0.0.1:")
CHROMIUM = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
PATIENCE_MS = 120_000  # a wait ends as soon as what it waits for is there
IMAGES = "[...document.querySelectorAll('figure img')].map(image => [image.alt, image.naturalWidth])"
COLOURS = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"


@dataclass
class Window:
    """A page, and what went wrong or out while it was open."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        # MLflow asks who is logged in, and a server without log-in has no such page.
        if message.type == "error" and not message.location["url"].endswith("/users/current"):
            self.errors.append(f"{message.text} {message.location['url']}")

    def is_clean(self) -> None:
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(LOCAL)] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium; Playwright brings none of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (extra `dev`)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(CHROMIUM))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def mlflow(finished: Path) -> Iterator[str]:
    """Address of a server on the finished experiment's store, as `make ui` starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = ["server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words, "--backend-store-uri", f"sqlite:///{finished / 'mlflow.db'}"],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, cwd=finished, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(f"{address}/health", server)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(address, timeout=30).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.3)
    raise AssertionError(f"mlflow server does not answer: exit code {server.poll()}")


def test_mlflow_shows_the_run_tree_and_the_plots(browser: Any, mlflow: str, finished: Path) -> None:
    window = Window(browser.new_page(viewport={"width": 1400, "height": 1200}))
    page = window.page
    page.goto(f"{mlflow}/#/experiments/1/runs")
    runs = page.locator("[role=gridcell] a[href*='/runs/']")
    runs.first.wait_for()
    assert runs.all_inner_texts() == ["debug"], "one parent, its stages folded away"
    parent = runs.first.get_attribute("href")
    page.locator("[role=gridcell] button[data-component-id*=runnamecellrenderer]").first.click()
    page.wait_for_function("document.querySelectorAll(\"[role=gridcell] a[href*='/runs/']\").length > 9")
    shown = dict(zip(runs.all_inner_texts(), [link.get_attribute("href") for link in runs.all()], strict=True))
    assert sorted(name.partition(" ")[0] for name in shown if name != "debug") == sorted(whole_chain.stages_of())

    address = {name.partition(" ")[0]: f"{mlflow}/{link}/artifacts" for name, link in shown.items()}
    for stage, path in (
        ("train", "plots/acceptance_by_slot.png"),
        ("calibrate", "calibrate/reliability-T1.png"),
        ("evaluate", "evaluate/lab-T0.png"),
    ):
        page.goto(f"{address[stage]}/{path}")
        page.wait_for_function(f"[...document.images].some(i => i.alt.endsWith('{path}') && i.naturalWidth > 300)")
    page.goto(f"{mlflow}/{parent}/artifacts/report.html")
    page.frame_locator("iframe").get_by_role("heading", name="Experiment debug").wait_for()
    window.is_clean()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_opens_from_the_disk_and_asks_for_nothing(browser: Any, finished: Path, scheme: str) -> None:
    window = Window(browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 900}))
    page = window.page
    page.goto((finished / "runs" / "debug" / "report.html").as_uri())
    images = dict(page.evaluate(IMAGES))
    assert len(images) >= 14 and all(width > 300 for width in images.values()), images
    for caption in ("Loss and its terms", "Threshold sweep", "Scheduler lab at T1", "Acceptance by slot over steps"):
        assert caption in images
    ink, paper = page.evaluate(COLOURS)
    assert (_brightness(ink) > _brightness(paper)) == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wide tables scroll by themselves"
    sections = page.locator("section h2").all_inner_texts()
    assert page.locator("nav a").all_inner_texts() == sections and "Lineage" in sections
    for stage in whole_chain.stages_of():
        folder = page.locator(f"#lineage td a[href*='/{stage}/']").get_attribute("href")
        assert (finished / "runs" / "debug" / folder / "manifest.json").exists()
    window.is_clean()
    assert [url for url in window.requests if not url.startswith("data:")] == [page.url]
    page.close()


def _brightness(colour: str) -> int:
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
