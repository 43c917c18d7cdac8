"""The configuration refuses what it cannot mean, says everything at once, and means the same after a round trip."""

from __future__ import annotations

import subprocess
import sys
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import config as configuration
from pipeline.commands import COMMANDS
from pipeline.config import Config, Section, Source, dump, load, result_fields, validate
from pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ROOT / "configs" / "debug.yaml"
NEEDED = {"targets.channel_rms": ["targets.taps=int4"]}  # booleans that mean something only beside another setting


def tree() -> dict[str, Any]:
    return dict(yaml.safe_load(DEBUG.read_text(encoding="utf-8")))


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(DEBUG, overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


def sections() -> Iterator[type[Section]]:
    yield Config
    for value in vars(configuration).values():
        if isinstance(value, type) and issubclass(value, Section) and value not in (Section, Config):
            yield value


def fields(kind: Any) -> Iterator[tuple[str, Any]]:
    """(section.key, annotation) of every field of Config's direct sections whose type is exactly `kind`."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for key, inner in field.annotation.model_fields.items():
                if inner.annotation is kind:
                    yield f"{name}.{key}", inner


# ------------------------------------------------------------------------------------------------ keys


@pytest.mark.case("CFG-01")
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.num_epoch=2", ["train.num_epoch"]),
        ("train.learning_rat=1e-3", ["train.learning_rat", "train.learning_rate"]),
        ("trian.steps=2", ["trian", "train"]),
        ("target.tiny.layer=2", ["target.tiny.layer", "target.tiny.layers"]),
        ("data.sources.0.limits=2", ["data.sources.0.limits", "data.sources.0.limit"]),
        ("data.near_duplicates.treshold=0.5", ["data.near_duplicates.treshold", "data.near_duplicates.threshold"]),
        ("draft.gamma=7", ["draft.gamma"]),
        ("train..steps=2", ["train..steps"]),
        (".steps=2", [".steps"]),
        ("train.steps", ["train.steps", "section.key=value"]),
        ("seed.value=2", ["seed"]),
        ("data.sources.9.limit=2", ["data.sources.9"]),
        ("train.steps=[1", ["train.steps"]),
    ],
)
def test_a_wrong_override_is_refused_with_its_path_and_the_nearest_key(override: str, named: list[str]) -> None:
    text = "\n".join(problems(override))
    assert [name for name in named if name not in text] == []


@pytest.mark.case("CFG-01")
def test_unknown_keys_in_the_file_and_all_problems_at_once() -> None:
    wrong = {**tree(), "answer": {}, "seed": -1}
    wrong["train"] = {**wrong["train"], "step": 3, "max_grad_norm": "much"}
    with pytest.raises(ConfigError) as caught:
        validate(wrong)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for part in ("did you mean answers?", "did you mean train.steps?", "seed", "train.max_grad_norm", "'much'"):
        assert part in text


def test_a_refused_item_is_one_problem_and_an_empty_list_is_another() -> None:
    def problems(sources: list[dict[str, Any]]) -> list[str]:
        with pytest.raises(ConfigError) as error:
            validate({"target": {"tiny": {}}, "data": {"sources": sources}})
        return error.value.problems

    assert [text.partition(",")[0] for text in problems([{"path": "a.jsonl", "weight": 1.5}])] == [
        "data.sources.0: weight is a share in (0"
    ]
    assert len(problems([])) == 1


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "train: {", "just text"])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="c.yaml"):
        load(path)
    with pytest.raises(ConfigError, match="missing.yaml"):
        load(tmp_path / "missing.yaml")


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.case("CFG-02")
@pytest.mark.parametrize("key", [key for key, _ in fields(bool)])
def test_every_boolean_goes_both_ways(key: str) -> None:
    section, name = key.split(".")
    needed = NEEDED.get(key, [])
    for text, value in (("true", True), ("false", False), ("False", False), ("'false'", False), ("'0'", False)):
        assert getattr(getattr(load(DEBUG, [*needed, f"{key}={text}"]), section), name) is value
        base = load(DEBUG, needed).model_dump()
        base[section][name] = yaml.safe_load(text)
        assert getattr(getattr(validate(base), section), name) is value
    assert key in problems(f"{key}=maybe")[0]


@pytest.mark.case("CFG-03")
@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("train.steps", ["0", "-1", "2.5", "2.0", "'4'", "1:30", "many", "true"]),
        ("train.global_batch_size", ["0", "-4", "1e3"]),
        ("draft.block_size", ["0", "7.0", "null"]),
        ("answers.top_k", ["-1", "0.5", "false"]),
        ("data.calibration_fraction", ["-0.1", "1.5", ".nan", "half", "true"]),
        ("answers.top_p", ["1.01", ".inf"]),
        ("train.learning_rate", ["0", "-1e-3", ".inf", ".nan", "true"]),
        ("train.betas", ["[0.9]", "[0.9, 1.5]", "0.9"]),
        ("train.position_decay", ["0", "-4", "blocksize"]),
        ("launch.port", ["80", "70000"]),
        ("draft.kind", ["dspork"]),
        ("experiment", ["../up", "''", "a b"]),
    ],
)
def test_counts_ratios_and_choices_are_refused_with_their_name(key: str, values: list[str]) -> None:
    for value in values:
        assert any(key in problem for problem in problems(f"{key}={value}")), value


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
def test_settings_of_another_drafter_are_refused_together(kind: str) -> None:
    found = problems(f"draft.kind={kind}")
    assert f"draft: kind {kind} has no Markov head: set markov: none" in found
    assert f"draft: kind {kind} has no empty slots: set mask_token_id: null" in found
    assert len(found) == (2 if kind == "eagle3" else 3), "and what the kind wants of the targets"
    exact = ["targets.logits=last_hidden", "targets.positions=all"]
    load(DEBUG, [f"draft.kind={kind}", "draft.markov=none", "draft.mask_token_id=null", *exact])


@pytest.mark.parametrize("kind", ["mtp", "medusa"])
@pytest.mark.parametrize(
    ("logits", "positions"), [("last_hidden", "supervised"), ("topk", "all"), ("full", "all"), ("topk", "supervised")]
)
def test_drafters_of_the_last_hidden_state_need_it_exact_and_everywhere(kind: str, logits: str, positions: str) -> None:
    cache = [f"targets.logits={logits}", f"targets.positions={positions}"]
    (problem,) = problems(f"draft.kind={kind}", "draft.markov=none", "draft.mask_token_id=null", *cache)
    assert "set targets.logits: last_hidden and targets.positions: all" in problem


@pytest.mark.case("CFG-01")
def test_what_does_not_fit_between_sections_comes_together_with_the_rest() -> None:
    clashes = [
        "train.engine=single",
        "launch.nodes=2",
        "draft.kind=mtp",
        "draft.markov=none",
        "draft.mask_token_id=null",
    ]
    both = problems(*clashes)
    assert len(both) == 2 and "train.engine single" in both[0] and "draft.kind mtp" in both[1]
    beside = problems(*clashes, "evaluate.bins=3", "train.ce_weight=0", "train.tv_weight=0")
    assert len(beside) == 4 and set(both) < set(beside)
    unreadable = problems(*clashes, "launch.nodes=two")
    assert len(unreadable) == 2 and any("draft.kind mtp" in problem for problem in unreadable)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["draft.kind=eagle3", "draft.layers=5"], "draft: kind eagle3 has one layer, found 5: set layers: 1"),
        (["draft.kind=eagle3", "draft.taps=false"], "draft: kind eagle3 starts from taps"),
        (["draft.kind=medusa", "draft.taps=false"], "draft: kind medusa reads the last hidden state, never taps"),
        (["train.engine=zero2", "train.sharded_checkpoints=true"], "train: sharded_checkpoints: zero2 checkpoints"),
        (["calibrate.records=r.pt"], "calibrate: records were served at one temperature"),
        (["calibrate.num_prompts=1"], "calibrate: num_prompts: one half of the prompts"),
        (["calibrate.max_new_tokens=1"], "calibrate: max_new_tokens: the first token comes before any round"),
        (["calibrate.bins=1000000000"], "calibrate.bins: "),
        (["calibrate.temperatures=[1,1.0000001]"], "calibrate.temperatures: 1 stands there more than once"),
        (["evaluate.temperatures=[1e-40]"], "evaluate.temperatures.0: 0 (the most likely token) or at least 0.001"),
        (["evaluate.prompt_sets=[]"], "evaluate.prompt_sets: "),
        (["evaluate.prompt_sets=[heldout,heldout]"], "evaluate.prompt_sets: heldout stands there more than once"),
        (["profile.synthetic=sqrt", "profile.endpoint=http://x/v1"], "profile: synthetic and endpoint exclude"),
        (["profile.endpoint=host:8000"], "profile.endpoint: a base URL such as http://host:8000/v1"),
        (["targets.layers=[true]"], "targets.layers.0: a whole number is expected"),
        (["evaluate.policy=static_length"], "evaluate: policy static_length needs policy_length"),
        (["evaluate.policy=static_threshold"], "evaluate: policy static_threshold needs policy_threshold"),
        (["data.sources=[{demo: gsm_symbolic}]"], "data.sources.0: demo gsm_symbolic is generated without end"),
        (["target.device_map=auto", "target.tensor_parallel=true"], "target: device_map and tensor_parallel exclude"),
        (["train.validation_fraction=1.0"], "train.validation_fraction: "),
        (["train.betas=[0.9,1]"], "train.betas.1: "),
        (["train.learning_rate=1e-3", "train.min_learning_rate=2e-3"], "train: min_learning_rate: 0.002 is above"),
        (["answers.top_p=0"], "answers.top_p: "),
        (["evaluate.top_p=0"], "evaluate.top_p: "),
        (["evaluate.max_new_tokens=1"], "evaluate: max_new_tokens: the first token comes before any round"),
        (["data.near_duplicates={threshold: 0}"], "data.near_duplicates.threshold: "),
        (["tokens.max_length=12", "tokens.min_loss_tokens=12"], "tokens: min_loss_tokens: no row of 12 tokens"),
        (["tokens.max_length=4", "draft.block_size=4"], "draft.block_size: 4 slots do not fit in rows"),
        (
            ["evaluate.policy=static_length", "evaluate.policy_length=5", "draft.block_size=4"],
            "evaluate.policy_length: 5 is more than the 4 slots",
        ),
        (["target.tiny.hidden_size=7"], "target.tiny.hidden_size: "),
        (["target.tiny.hidden_size=12"], "target.tiny.hidden_size: "),
        (["target.tiny.vocabulary=266"], "target.tiny.vocabulary: "),
        (["launch.grace_seconds=65536"], "launch.grace_seconds: "),
        (["calibrate.prompt_sets=[heldout]"], "calibrate.prompt_sets: heldout stands in evaluate.prompt_sets, too"),
        (
            ["calibrate.prompt_sets=[a.jsonl,./b.jsonl]", "evaluate.prompt_sets=[b.jsonl]"],
            "calibrate.prompt_sets: ./b.jsonl stands in evaluate.prompt_sets, too",
        ),
        (["answers.backend=openai", "answers.endpoints=[http://x/v1]"], "answers.model: name the model"),
    ],
)
def test_what_a_stage_would_refuse_hours_later_is_refused_while_reading(overrides: list[str], told: str) -> None:
    assert any(problem.startswith(told) for problem in problems(*overrides))


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/v1", "http://", "'http://[::1/v1'", "http://host:x/v1", "http://host :1/v1"]
)
def test_what_is_no_address_is_refused_while_reading(url: str) -> None:
    endpoints = ["answers.backend=openai", "answers.model=m", f"answers.endpoints=[http://localhost:9/v1, {url}]"]
    (problem,) = problems(*endpoints)
    assert problem.startswith("answers.endpoints.1: a base URL such as http://host:8000/v1 is expected, found ")
    assert problems(f"profile.endpoint={url}")[0].startswith("profile.endpoint: a base URL such as ")


def test_numbers_and_times_are_read_as_people_write_them(tmp_path: Path) -> None:
    config = load(DEBUG, ["train.learning_rate=1e-3", "launch.time_limit=24:00:00", "export.max_shard_bytes=5_000"])
    assert (config.train.learning_rate, config.launch.time_limit) == (1e-3, "24:00:00")
    assert config.export.max_shard_bytes == 5000
    path = tmp_path / "again.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def numbers(section: type[Section], where: str = "") -> Iterator[tuple[str, type]]:
    """(section.key, int or float) of every field that is one number."""
    for name, field in section.model_fields.items():
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section):
                yield from numbers(part, f"{where}{name}.0." if part is Source else f"{where}{name}.")
            elif part in (int, float):
                yield f"{where}{name}", part


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "100000000000000000000"])
def test_numbers_that_nothing_can_count_with_are_refused_everywhere(value: str) -> None:
    keys = [key for key, kind in numbers(Config) if kind is int or not value.isdigit()]
    optional = ["data.near_duplicates={}", "data.decontaminate={}"]
    told = "\n".join(problems(*optional, *(f"{key}={value}" for key in keys)))
    assert len(keys) > 40 and [key for key in keys if f"{key}: " not in told] == []


# ------------------------------------------------------------------------------------------------ roles, round trip


def test_every_field_is_marked_result_or_execution_and_documented() -> None:
    unmarked = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if (field.json_schema_extra or {}).get("role") not in ("result", "execution") or not field.description  # type: ignore[union-attr]
    ]
    assert unmarked == []


def test_execution_fields_are_not_hashed_and_result_fields_are() -> None:
    plain = result_fields(load(DEBUG).train)
    assert result_fields(load(DEBUG, ["train.micro_batch_tokens=64", "train.engine=zero2"]).train) == plain
    assert result_fields(load(DEBUG, ["train.learning_rate=0.5"]).train) != plain


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load_and_survive_dump_and_load(path: Path, tmp_path: Path) -> None:
    config = load(path)
    again = tmp_path / "again.yaml"
    again.write_text(dump(config), encoding="utf-8")
    assert load(again) == config


# ------------------------------------------------------------------------------------------------ outside


@pytest.mark.case("DEP-02")
def test_a_refused_configuration_costs_no_torch_and_exit_code_2() -> None:
    code = (
        "import sys; from pipeline.__main__ import main\n"
        f"code = main(['train', '-c', {str(DEBUG)!r}, 'train.stepz=1', 'draft.mask_token_id=99'])\n"
        "heavy = [name for name in ('torch', 'deepspeed', 'transformers', 'mlflow') if name in sys.modules]\n"
        "sys.exit(code if not heavy else repr(heavy))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "train.stepz" in run.stderr and "train.steps" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.case("CFG-04")
def test_the_wheel_carries_commands_configs_and_batch_scripts(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("pyproject.toml", "README.md", "LICENSE", "pipeline", "launch", "configs", "slurm"):
        _copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=300)

    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(ROOT).as_posix() for top in ("pipeline", "launch") for path in (ROOT / top).rglob("*.py")
    }
    assert modules - names == set() and "pipeline/operations/report/page.html" in names
    assert not any(name.startswith(("tests/", "tools/", "configs/")) for name in names)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from launch.shipped import shipped; from pipeline.__main__ import main\n"
        "files = ['configs/debug.yaml', 'configs/accelerate/zero2.yaml', 'slurm/stage.sbatch', 'slurm/shards.sbatch']\n"
        f"assert all(str(shipped(name)).startswith({str(site)!r}) for name in files)\n"
        "main(['--help'])"
    )
    run = subprocess.run([sys.executable, "-I", "-c", code], cwd="/", capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [name for name in COMMANDS if name not in run.stdout] == []


def _copy(source: Path, target: Path) -> None:
    """A source tree without leftovers of earlier builds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        target.write_bytes(source.read_bytes())
        return
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            _copy(path, target / path.relative_to(source))


def test_type_table_is_not_empty() -> None:
    assert len(list(fields(bool))) > 10 and typing.get_type_hints(Config)
