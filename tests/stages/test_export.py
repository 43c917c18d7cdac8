"""The export stage on a finished chain: folders, manifest, model card, side files, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import tiny
from pipeline.artifact import Artifact, sha256_file, write_json
from pipeline.chain import StageContext
from pipeline.config import TinyTarget, validate
from pipeline.draft.build import build_drafter
from pipeline.draft.derive import derive_config
from pipeline.draft.io import TENSORS, save_drafter
from pipeline.errors import ArtifactError, ConfigError
from pipeline.layouts import files, sidefiles
from pipeline.layouts.load import load_published
from pipeline.layouts.registry import model_entry
from pipeline.stages import export
from pipeline.tracking import NullTracker

BLOCK = 4
STS = {
    "temperature": 1.0,
    "temperatures": [1.1, 0.9, 1.0, 1.4],
    "dataset": "calibration",
    "num_samples": 90,
    "ece_before": [0.1, 0.1, 0.2, 0.2],
    "ece_after": [0.02, 0.03, 0.02, 0.04],
    "block_size": BLOCK,
    "layout": "next_token",
    "form": "logit",
}
SPS = {
    "sample_batch_tokens": [1, 2, 4],
    "sample_steps_per_sec": [40.0, 39.0, 35.5],
    "max_batch_tokens": 4,
    "lookup": "floor",
    "context_length": 64,
    "source": "measured",
}
RECORD = {
    "drafter": "dspark", "prompts": "heldout", "temperature": 1.0, "num_prompts": 12, "num_rounds": 100, "tau": 1.9,
    "tau_interval": [1.8, 2.06], "domain": None,
    "conditional_acceptance": [0.51, 0.42, 0.4, None],
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny._write(TinyTarget(layers=4, hidden_size=32, vocabulary=300, train_steps=0), folder)
    return folder


def _context(
    work_dir: Path, target: Path, *, draft: dict[str, Any] | None = None, export: dict[str, Any] | None = None
) -> StageContext:
    """A chain whose stages before export are finished, with a drafter of random weights."""
    tree = {
        "work_dir": str(work_dir),
        "target": {"model": str(target)},
        "data": {"sources": [{"demo": "chatterbot", "limit": 8}]},
        "targets": {"layers": [0, 2]},
        "draft": {"block_size": BLOCK, "layers": 1, "markov_rank": 8, "mask_token_id": 295, **(draft or {})},
        "export": export or {},
    }
    config = validate(tree)
    chain: dict[str, Artifact] = {}
    for name in ("data", "train", "calibrate", "profile", "evaluate", "export"):
        read = config.model_dump(mode="json")
        section = {key: read[key] for key in {"data": ["data"], "train": ["draft", "train"]}.get(name, [])}
        chain[name] = Artifact(work_dir, name, {"stage": name, "format": 1, "config": section, "inputs": {}, "n": read})
        chain[name].create()
    shape = derive_config(json.loads((target / "config.json").read_text()), config.draft, target_layer_ids=(0, 2))
    size = shape.draft_vocab_size
    drafter = build_drafter(shape, seed=0, token_ids=None if size is None else torch.arange(size) * 2)
    (chain["train"].path / "draft").mkdir()
    save_drafter(chain["train"].path / "draft", drafter, {"template": {"hash": "h1", "thinking": None}})
    weights = chain["train"].path / "draft" / TENSORS
    write_json(chain["calibrate"].path / "sts-T1.json", {**STS, "checkpoint": sha256_file(weights)})
    write_json(chain["profile"].path / "sps.json", SPS)
    write_json(chain["evaluate"].path / "report.json", {"records": [RECORD]})
    for name in chain:
        if name != "export":
            chain[name].finish(files=[f"draft/{TENSORS}"] if name == "train" else [])
    inputs = {name: chain[name] for name in ("train", "calibrate", "profile", "evaluate")}
    return StageContext(config, chain["export"], inputs, NullTracker(), chain)


def test_export_writes_whole_folders_and_a_manifest(work_dir: Path, target: Path) -> None:
    context = _context(work_dir, target, draft={"vocabulary": 64}, export={"layouts": ["speculators", "deepspec"]})
    export.run(context)
    manifest = context.artifact.manifest()
    names = {fact["file"] for fact in manifest["files"]}
    for layout in ("speculators", "deepspec"):
        folder = context.artifact.path / layout
        present = {path.name for path in folder.iterdir()}
        assert {"config.json", "model.safetensors", "README.md", "tokenizer.json", "chat_template.jinja"} <= present
        assert {f"{layout}/{name}" for name in present} <= names
        assert files.hash_problems(folder, everything=True) == []
        drafter, meta = load_published(folder, target=json.loads((target / "config.json").read_text()))
        assert drafter.config.draft_vocab_size == 64 and meta["template"]["hash"] == "h1"
        assert meta["drafter"] == context.inputs["train"].fingerprint
    assert context.artifact.verify() == []


def test_side_files_hold_what_sglang_reads(work_dir: Path, target: Path) -> None:
    """S24, S25, S28: lengths, keys and order; the file is named by the temperature it was fitted at."""
    context = _context(work_dir, target)
    export.run(context)
    folder = context.artifact.path / "deepspec"
    sts, sps = (json.loads((folder / name).read_text()) for name in ("sts-T1.json", "sps.json"))
    assert sidefiles.sts_problems(sts, block_size=BLOCK) == [] and sidefiles.sps_problems(sps) == []
    assert sts["temperatures"] == STS["temperatures"]


def test_card_tells_the_run(work_dir: Path, target: Path) -> None:
    context = _context(work_dir, target, export={"layouts": ["deepspec"], "license": "apache-2.0"})
    export.run(context)
    text = (context.artifact.path / "deepspec" / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["license"] == "apache-2.0" and head["tags"] == ["speculative-decoding", "draft-model", "dspark"]
    for told in (
        "| dspark | heldout | 1 | 12 | 100 | 1.90 | 1.80–2.06 |",
        f'"num_speculative_tokens": {BLOCK}',
        "--speculative-dspark-confidence-sts-path DIR/sts-T1.json",
        "--spec-type draft-dspark",
        "chatterbot",
        context.inputs["train"].fingerprint,
        "| slot 1 | slot 2 | slot 3 | slot 4 |",
        "0.51 | 0.42 | 0.4 | –",
        f"convert_hf_to_gguf.py {target} --outtype bf16 --outfile target.gguf",
    ):
        assert told in text, told
    assert "| template |" not in text  # nothing was set there


def test_card_names_repositories_only_and_no_secret(
    work_dir: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or file whose path looks like owner/name is no repository, and a password in a source stays here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(target)
    sources = [{"path": "data/chats.jsonl"}, {"path": "owner/chats"}, {"path": "https://me:swordfish@host/chats.jsonl"}]
    context = _context(work_dir, Path("models/mine"))
    monkeypatch.setattr(Artifact, "manifest", _manifest_with(sources))
    export.run(context)
    text = (context.artifact.path / "deepspec" / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert "base_model" not in head and head["datasets"] == ["owner/chats"]
    assert "swordfish" not in text and "https://<redacted>@host" in text


def _manifest_with(sources: list[dict[str, str]]) -> Callable[[Artifact], dict[str, Any]]:
    real = Artifact.manifest

    def manifest(self: Artifact) -> dict[str, Any]:
        return {**real(self), **({"config": {"data": {"sources": sources}}} if self.stage == "data" else {})}

    return manifest


@pytest.mark.parametrize(
    ("draft", "wanted", "told"),
    [
        ({"vocabulary": 64}, {"layouts": ["deepspec", "specforge"]}, "Layouts that can: deepspec, speculators"),
        ({"markov": "rnn"}, {"engines": ["vllm"]}, "Engines that can: sglang, deepspec, speculators, specforge"),
        ({}, {"temperature": 0.5}, "0.5 was not calibrated; there are: sts-T1.json"),
    ],
)
def test_refusals_come_before_anything_is_written(
    work_dir: Path, target: Path, draft: dict[str, Any], wanted: dict[str, Any], told: str
) -> None:
    context = _context(work_dir, target, draft=draft, export=wanted)
    before = sorted(context.artifact.path.rglob("*"))
    with pytest.raises(ConfigError, match=told):
        export.run(context)
    assert sorted(context.artifact.path.rglob("*")) == before


@pytest.mark.case("CAL-06")
def test_temperatures_of_another_drafter_are_refused(work_dir: Path, target: Path) -> None:
    """CAL-06: the calibration file names its checkpoint, and the export holds it to that."""
    context = _context(work_dir, target)
    write_json(context.inputs["calibrate"].path / "sts-T1.json", {**STS, "checkpoint": "another"})
    with pytest.raises(ArtifactError, match="checkpoint 'another'"):
        export.run(context)


def test_drafter_without_confidence_ships_no_side_files(work_dir: Path, target: Path) -> None:
    context = _context(work_dir, target, draft={"confidence": False})
    export.run(context)
    names = {path.name for path in (context.artifact.path / "deepspec").iterdir()}
    assert not names & {"sts-T1.json", "sps.json"}


@pytest.mark.case("EXP-07")
def test_another_option_is_another_folder(work_dir: Path, target: Path) -> None:
    """EXP-07: an export with another option never serves the files of the first."""
    first = _context(work_dir / "a", target)
    export.run(first)
    second = _context(work_dir / "a", target, export={"dtype": "float32"})
    export.run(second)
    assert first.artifact.path != second.artifact.path
    kinds = [
        {kind for kind, _ in files.read_header(each.artifact.path / "deepspec" / files.WEIGHTS).values()}
        for each in (first, second)
    ]
    assert kinds == [{"BF16"}, {"F32"}]


def test_interrupted_export_goes_on_with_what_is_whole(
    work_dir: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"layouts": ["deepspec", "speculators"]}
    context = _context(work_dir, target, export=wanted)
    real: Callable[..., Any] = export.publish

    def fails_second(folder: Path, *arguments: Any, **keywords: Any) -> Any:
        if folder.name == "speculators":
            raise KeyboardInterrupt
        return real(folder, *arguments, **keywords)

    monkeypatch.setattr(export, "publish", fails_second)
    with pytest.raises(KeyboardInterrupt):
        export.run(context)
    assert not context.artifact.complete
    before = (context.artifact.path / "deepspec" / files.WEIGHTS).stat().st_mtime_ns
    monkeypatch.setattr(export, "publish", real)
    export.run(context)
    assert context.artifact.complete and not (context.artifact.path / ".tmp").exists()
    assert (context.artifact.path / "deepspec" / files.WEIGHTS).stat().st_mtime_ns == before


class Registered(NullTracker):
    """Keeps what it is told to register."""

    def __init__(self) -> None:
        self.models: list[tuple[str, Path, str, Mapping[str, str]]] = []

    def model(self, name: str, folder: Path, description: str, tags: Mapping[str, str]) -> None:
        self.models.append((name, folder, description, tags))


def test_every_layout_is_registered_with_card_and_lineage(work_dir: Path, target: Path) -> None:
    tracker = Registered()
    context = _context(work_dir, target, export={"layouts": ["deepspec", "speculators"]})
    export.run(replace(context, tracker=tracker))
    for (name, folder, description, tags), layout in zip(tracker.models, ("deepspec", "speculators"), strict=True):
        assert name == context.config.experiment and folder == context.artifact.path / layout
        assert description == (folder / "README.md").read_text().split("---\n", 2)[2].lstrip()
        assert tags["layout"] == layout
        assert {key: value for key, value in tags.items() if key.startswith("artifact.")} == {
            f"artifact.{stage}": made.fingerprint for stage, made in context.chain.items()
        }


def test_registry_entry_leads_back_to_the_run(work_dir: Path, target: Path) -> None:
    context = _context(work_dir, target)
    export.run(context)
    folder = context.artifact.path / "deepspec"
    entry = model_entry(folder, name="demo", lineage={"train": context.inputs["train"].fingerprint})
    assert entry.description.startswith("# DSpark drafter for") and entry.tags["layout"] == "deepspec"
    assert entry.tags["artifact.train"] == context.inputs["train"].fingerprint
    (folder / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"config\.json"):
        model_entry(folder, name="demo", lineage={})
