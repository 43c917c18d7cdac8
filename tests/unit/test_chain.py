"""Fingerprints: equal configuration shares artifacts, a changed result field renews what lies downstream of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.chain import STAGES, active, array_share, resolve, share
from pipeline.config import Config, Section, load, validate
from pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def debug(work_dir: Path, *overrides: str) -> Config:
    return load(ROOT / "configs/debug.yaml", [f"work_dir={work_dir}", *overrides])


def fingerprints(config: Config) -> dict[str, str]:
    return {name: artifact.fingerprint for name, artifact in resolve(config).items()}


def changed(work_dir: Path, *overrides: str) -> set[str]:
    before, after = fingerprints(debug(work_dir)), fingerprints(debug(work_dir, *overrides))
    return {name for name in before if before[name] != after.get(name)}


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("data.calibration_fraction=0.1", set(STAGES) - {"profile"}),
        ("answers.temperature=1.0", {"answers", "tokens", "targets", "train", "calibrate", "evaluate", "export"}),
        ("tokens.max_length=99", {"tokens", "targets", "train", "calibrate", "evaluate", "export"}),
        ("targets.taps=bf16", {"targets", "train", "calibrate", "evaluate", "export"}),
        ("draft.layers=2", {"train", "calibrate", "evaluate", "export"}),
        ("train.learning_rate=0.1", {"train", "calibrate", "evaluate", "export"}),
        ("calibrate.bins=10", {"calibrate", "evaluate", "export"}),
        ("profile.repeats=4", {"profile", "evaluate", "export"}),
        ("evaluate.temperatures=[0]", {"evaluate", "export"}),
        ("export.dtype=float32", {"export"}),
        ("seed=1", set(STAGES) - {"profile"}),
        ("target.tiny.layers=8", set(STAGES) - {"data"}),
    ],
)
@pytest.mark.case("CAB-05")
def test_one_changed_key_renews_exactly_what_is_downstream(tmp_path: Path, override: str, stages: set[str]) -> None:
    assert changed(tmp_path, override) == stages


@pytest.mark.parametrize(
    "override",
    [
        "experiment=other",
        "data.workers=4",
        "targets.batch_tokens=77",
        "train.micro_batch_tokens=77",
        "train.engine=zero3",
        "train.save_every=3",
        "calibrate.batch_size=3",
        "launch.nodes=4",
        "tracking.enabled=false",
        "target.attention=eager",
    ],
)
def test_execution_fields_renew_nothing(tmp_path: Path, override: str) -> None:
    assert changed(tmp_path, override) == set()


def test_another_work_directory_changes_no_fingerprint(tmp_path: Path) -> None:
    assert fingerprints(debug(tmp_path / "a")) == fingerprints(debug(tmp_path / "b"))


def test_drafters_share_one_target_cache(tmp_path: Path) -> None:
    dflash = changed(tmp_path, "draft.kind=dflash", "draft.markov=none")
    assert dflash == {"train", "calibrate", "evaluate", "export"}


def test_stages_can_be_off(tmp_path: Path) -> None:
    assert "answers" not in active(debug(tmp_path, "answers.enabled=false"))
    live = resolve(debug(tmp_path, "targets.mode=live"))
    assert "targets" not in live
    assert set(live["train"].request["inputs"]) == {"tokens"}


def test_local_files_count_by_content_not_by_place(tmp_path: Path) -> None:
    def made(folder: str, text: str) -> str:
        path = tmp_path / folder / "rows.jsonl"
        path.parent.mkdir()
        path.write_text(text)
        config = validate(
            {"target": {"tiny": {}}, "data": {"sources": [{"path": str(path)}]}, "work_dir": str(tmp_path / "w")}
        )
        return fingerprints(config)["data"]

    row = json.dumps({"messages": []})
    assert made("a", row) == made("b", row) != made("c", row + row)


def test_an_edited_prompt_set_renews_the_data_it_cleans(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    overrides = (f"data.decontaminate={{prompt_sets: [{prompts}]}}", f"evaluate.prompt_sets=[{prompts}]")
    prompts.write_text('{"turns": ["one"]}')
    before = fingerprints(debug(tmp_path, *overrides))
    prompts.write_text('{"turns": ["two"]}')
    after = fingerprints(debug(tmp_path, *overrides))
    assert before["data"] != after["data"]
    assert before["profile"] == after["profile"]


def test_what_cannot_be_identified_is_reported_together(tmp_path: Path) -> None:
    config = validate(
        {
            "target": {"model": str(tmp_path / "nowhere")},
            "data": {
                "sources": [{"path": str(tmp_path / "one.jsonl")}, {"path": str(tmp_path / "two.jsonl")}],
                "decontaminate": {"prompt_sets": ["heldout", "gsm9k"]},
            },
            "template": {"chat_template": str(tmp_path / "absent.jinja")},
            "calibrate": {"prompt_sets": ["mbbp"]},
            "evaluate": {"prompt_sets": ["heldout", "humanevil", "gsm8k"]},
            "work_dir": str(tmp_path),
        }
    )
    with pytest.raises(ConfigError) as error:
        resolve(config)
    told = [problem.partition(": ")[0] for problem in error.value.problems]
    assert sorted(told) == [
        "calibrate.prompt_sets",
        *["data.decontaminate.prompt_sets"] * 2,
        "data.sources.0",
        "data.sources.1",
        *["evaluate.prompt_sets"] * 2,
        "target.model",
        "template.chat_template",
    ]
    text = str(error.value)
    assert "data.decontaminate.prompt_sets: heldout" in text
    assert "data.decontaminate.prompt_sets: 'gsm9k': no such file, and not one of heldout, gsm8k" in text
    assert "evaluate.prompt_sets: 'humanevil'" in text
    assert "evaluate.prompt_sets: gsm8k: openai/gsm8k: neither the hub nor the local hub cache knows" in text


def test_every_result_section_is_read_by_a_stage() -> None:
    """A result field nobody hashes would be a silent mix."""
    read = {section for stage in STAGES.values() for section in stage.reads} | {"target"}
    result = {
        name
        for name, field in Config.model_fields.items()
        if (field.json_schema_extra or {}).get("role") == "result"  # type: ignore[union-attr]
    }
    assert result <= read
    assert issubclass(Config, Section)


@pytest.mark.parametrize(("world", "array"), [(1, "0/1"), (3, "0/1"), (2, "0/3")])
def test_shares_are_disjoint_and_complete(monkeypatch: pytest.MonkeyPatch, world: int, array: str) -> None:
    names = [str(index) for index in range(17)]
    tasks = int(array.split("/")[1])
    got: list[str] = []
    for task in range(tasks):
        for rank in range(world):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world))
            monkeypatch.setenv("DSPARK_ARRAY", f"{task}/{tasks}")
            assert array_share()[1] == world * tasks
            got += share(names)
    assert sorted(got) == sorted(names)
