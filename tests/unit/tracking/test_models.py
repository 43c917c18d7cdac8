"""Exports in the model registry: one version each, whatever is repeated, absent or refused on the way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.tracking import models, note_reuse
from pipeline.tracking.tracker import store_uri
from tests.unit.tracking.test_tracking import make_artifact, make_config, opened, runs


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is made on a busy machine takes its time."""
    monkeypatch.setattr("pipeline.tracking.tracker._CLOSE_SECONDS", 300.0)


def folder_of(work_dir: Path, **files: bytes) -> Path:
    folder = work_dir / "deepspec"
    folder.mkdir()
    for name, content in {"README.md": b"# Card\n", "config.json": b"{}\n", **files}.items():
        (folder / name).write_bytes(content)
    return folder


def register(config: Config, artifact: Artifact, folder: Path, text: str = "# Card") -> None:
    tracker = opened(config, artifact)
    for _ in range(2):  # as when an export is resumed after a kill
        tracker.model("demo", folder, text, {"layout": "deepspec", "artifact.train": "abc"})
    tracker.close()


def client(config: Config) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store_uri(config))


def test_export_becomes_one_version_that_holds_its_files(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "swordfish-0123")
    config, artifact, folder = make_config(work_dir), make_artifact(work_dir, stage="export"), folder_of(work_dir)
    for _ in range(2):
        register(config, artifact, folder, text="# Card of swordfish-0123")
    (version,), (run,) = client(config).search_model_versions("name = 'demo'"), runs(config)
    assert version.run_id == run.info.run_id and version.description == "# Card of <redacted>"
    assert version.tags == {"layout": "deepspec", "artifact.train": "abc", "folder": str(folder.resolve())}
    assert version.source == f"{run.info.artifact_uri}/deepspec"
    there = client(config).download_artifacts(run.info.run_id, "deepspec", str(work_dir.parent))
    assert {path.name: path.read_bytes() for path in Path(there).iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


@pytest.mark.case("TRK-03")
def test_registry_that_fails_leaves_the_run_ended_and_gets_the_version_later(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, artifact, folder = make_config(work_dir), make_artifact(work_dir, stage="export"), folder_of(work_dir)
    real = models.register
    monkeypatch.setattr(models, "register", lambda *arguments: real(Registry(_answered(503)), *arguments[1:]))
    register(config, artifact, folder)
    assert runs(config)[0].info.status == "FINISHED" and capsys.readouterr().err.count("warning") == 1
    monkeypatch.setattr(models, "register", real)
    artifact.finish()
    note_reuse(config, "export", artifact, inputs={})
    assert len(client(config).search_model_versions("name = 'demo'")) == 1 and len(runs(config)) == 1


# ------------------------------------------------------------------------------------------------ without a store


class Registry:
    """The calls `register` makes, remembered; making a version raises `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[tuple[str, str | None]] = []
        self.versions: list[SimpleNamespace] = []

    def log_artifact(self, run_id: str, path: str, place: str | None) -> None:
        self.sent.append((Path(path).name, place))

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(artifact_uri="mlflow-artifacts:/1/run"))

    def search_model_versions(self, query: str) -> list[SimpleNamespace]:
        if self.error is not None:
            raise self.error
        return self.versions

    def create_registered_model(self, name: str) -> None:
        if self.versions:
            raise _exists()

    def create_model_version(self, name: str, source: str, run_id: str, **more: Any) -> None:
        self.versions.append(SimpleNamespace(name=name, source=source, **more))


def _answered(status: int) -> Exception:
    """What mlflow's client raises for a server's answer without a body."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.rest_utils import verify_rest_response

    with pytest.raises(MlflowException) as caught:
        verify_rest_response(SimpleNamespace(status_code=status, text=""), "/api/2.0/mlflow/registered-models/create")
    return caught.value


def _exists() -> Exception:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS

    return MlflowException("there", RESOURCE_ALREADY_EXISTS)


def model(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"name": "demo", "folder": str(folder), "description": "# Card", "tags": {"layout": "deepspec"}, **changes}


def test_another_export_is_another_version_of_the_same_model(tmp_path: Path) -> None:
    registry, folder = Registry(), folder_of(tmp_path)
    other = folder.rename(tmp_path / "speculators")
    folder.mkdir()
    for each in (folder, other, folder):
        models.register(registry, "run", model(each))
    assert [version.source for version in registry.versions] == [
        "mlflow-artifacts:/1/run/deepspec", "mlflow-artifacts:/1/run/speculators",
    ]  # fmt: skip


def test_large_weights_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MAX_FILE_BYTES", 10)
    registry, folder = Registry(), folder_of(tmp_path, **{"model.safetensors": b"x" * 11})
    models.register(registry, "run", model(folder))
    assert registry.sent == [("README.md", "deepspec"), ("config.json", "deepspec")]
    (version,) = registry.versions
    assert version.tags == {"layout": "deepspec", "folder": str(folder), "left_out": "model.safetensors"}


def test_long_card_is_cut_to_what_registries_hold(tmp_path: Path) -> None:
    registry = Registry()
    models.register(registry, "run", model(folder_of(tmp_path), description="word " * 2000))
    text = registry.versions[0].description
    assert len(text) == 5000 and text.startswith("word word") and text.endswith("README.md)")


@pytest.mark.case("TRK-03")
@pytest.mark.parametrize("status", [404, 403, 501])
def test_store_without_a_registry_costs_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    registry = Registry(_answered(status))
    models.register(registry, "run", model(folder_of(tmp_path)))
    assert len(registry.sent) == 2 and "no version of model demo was registered" in capsys.readouterr().err


@pytest.mark.parametrize("status", [500, 503, 429])
def test_registry_that_may_come_back_is_asked_again(tmp_path: Path, status: int) -> None:
    with pytest.raises(Exception, match=str(status)):
        models.register(Registry(_answered(status)), "run", model(folder_of(tmp_path)))


def test_vanished_folder_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry()
    models.register(registry, "run", model(tmp_path / "nowhere"))
    assert "nowhere was gone" in capsys.readouterr().err and registry.versions == []
