"""What the target cannot serve is refused from its description alone, all problems at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import preflight
from pipeline.config import Config, Draft, load, validate
from pipeline.decoding import cache
from pipeline.draft.config import DraftConfig
from pipeline.draft.derive import derive_config
from pipeline.draft.description import FORMAT, LAYER_CONVENTION
from pipeline.errors import ConfigError
from pipeline.layouts.config_json import write_config
from pipeline.preflight import machine, stages
from pipeline.preflight.facts import TargetFacts
from pipeline.preflight.stages import ATTENTION_KINDS
from tests.unit.layouts.published import PLAIN, TARGET, origin
from tests.unit.test_target import CONFIGS


def target(folder: Path, *, layers: int = 36, rows: int = 32, tokens: int = 30, **model: Any) -> Path:
    """A target's description: no weights at all."""
    folder.mkdir(exist_ok=True)
    described = {"num_hidden_layers": layers, "vocab_size": rows, "eos_token_id": 3, "pad_token_id": 1, **model}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    vocab = {f"t{index}": index for index in range(tokens)}
    added = [{"id": index, "content": f"t{index}", "special": True} for index in range(8)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t5"}))
    return folder


def config(folder: Path, **draft: Any) -> Config:
    targets = {"topk": 16, **draft.pop("targets", {})}
    return validate(
        {
            "target": {"model": str(folder)},
            "data": {"sources": [{"path": "x.jsonl"}]},
            "draft": {"mask_token_id": 30, **draft},
            "targets": targets,
        }
    )


def refused(made: Config) -> str:
    with pytest.raises(ConfigError) as error:
        preflight.check(made)
    return str(error.value)


@pytest.mark.case("TOK-02")
@pytest.mark.parametrize(
    ("token", "why"),
    [
        (None, "required"),
        (-1, "not a row"),
        (32, "not a row"),
        (1, "pad_token"),
        (3, "eos_token"),
        (4, "eos_token"),
        (5, "eos_token"),
        (20, "normal token"),
    ],
)
def test_s6_mask_tokens_that_mean_something_are_refused(tmp_path: Path, token: int | None, why: str) -> None:
    made = config(target(tmp_path / "t"), mask_token_id=token)
    assert why in refused(made)


@pytest.mark.parametrize("token", [30, 31, 6])
def test_s6_an_unused_row_or_a_spare_special_token_is_taken(tmp_path: Path, token: int) -> None:
    preflight.check(config(target(tmp_path / "t"), mask_token_id=token))


def test_s6_override_needs_its_flag(tmp_path: Path) -> None:
    preflight.check(config(target(tmp_path / "t"), mask_token_id=3, allow_used_mask_token=True))


@pytest.mark.parametrize(
    ("layers", "why"),
    [([35], "last layer"), ([-1, 3], "outside"), ([40], "outside"), ([5, 5], "increasing"), ([7, 3], "increasing")],
)
def test_s4_layers_out_of_range_or_order_are_refused(tmp_path: Path, layers: list[int], why: str) -> None:
    assert why in refused(config(target(tmp_path / "t"), targets={"layers": layers}))


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    wrong = {"mask_token_id": 3, "vocabulary": 99, "targets": {"layers": [35], "topk": 33}}
    message = refused(config(target(tmp_path / "t"), **wrong))
    assert message.startswith("4 problem(s)") and "topk: 33 is larger than the target's vocabulary of 32" in message


def test_more_log_probabilities_than_tokens_are_refused_where_they_are_kept(tmp_path: Path) -> None:
    preflight.check(config(target(tmp_path / "t"), targets={"topk": 32}))
    preflight.check(config(target(tmp_path / "t"), targets={"topk": 33, "logits": "last_hidden"}))


def test_the_shape_of_a_tiny_target_is_known_before_there_is_one() -> None:
    with pytest.raises(ConfigError, match="draft.heads: 3 is not a multiple of the 2 key/value heads"):
        preflight.check(load("configs/debug.yaml", ["draft.heads=3", "draft.init=random"]))


@pytest.mark.case("CAB-10")
@pytest.mark.parametrize("layers", [2, 3, 4, 5, 7])
def test_shallow_targets_need_explicit_layers(tmp_path: Path, layers: int) -> None:
    made = config(target(tmp_path / "t", layers=layers))
    assert f"num_layers = {layers}" in refused(made)
    preflight.check(config(target(tmp_path / "t", layers=layers), targets={"layers": [0]}))


@pytest.mark.parametrize(
    ("depth", "layers"), [(36, (1, 9, 17, 25, 33)), (30, (1, 7, 14, 20, 27)), (8, (1, 2, 3, 4, 5))]
)
def test_default_layers(depth: int, layers: tuple[int, ...]) -> None:
    assert preflight.default_layers(depth) == layers


def test_a_folder_that_is_no_target_is_named(tmp_path: Path) -> None:
    assert "no config.json" in refused(config(tmp_path))
    assert "fetch_smollm2" in refused(config(tmp_path / "absent"))


def test_s6_a_mask_token_the_corpus_contains_is_refused(tmp_path: Path) -> None:
    made = config(target(tmp_path / "t"), mask_token_id=6)
    preflight.refuse_mask_token_in_corpus(made, {"2": 40})
    with pytest.raises(ConfigError, match="occurs 3 times"):
        preflight.refuse_mask_token_in_corpus(made, {"6": 3})


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "gelu_new",
}  # fmt: skip


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({"intermediate_size": 40}, "draft.intermediate_size: 40 with draft.init: target_layers, whose layers have 96"),
        ({"heads": 8}, "draft.heads: 8 with draft.init: target_layers, whose layers have 4"),
        ({"kv_heads": 1}, "draft.kv_heads: 1 with draft.init: target_layers, whose layers have 2"),
        ({"activation": "relu"}, "draft.activation: relu with draft.init: target_layers, whose layers have gelu_p"),
        ({"kind": "medusa", "markov": "none", "mask_token_id": None}, "kind medusa has no layers to copy into"),
    ],
)
def test_sizes_that_do_not_go_with_copied_layers_are_refused(tmp_path: Path, draft: dict[str, Any], why: str) -> None:
    """Before the targets are computed: the train stage, which copies the layers, comes after them."""
    folder, targets = target(tmp_path / "t", **SIZES), {"logits": "last_hidden", "positions": "all"}
    assert why in refused(config(folder, init="target_layers", targets=targets, **draft))
    preflight.check(config(folder, init="random", targets=targets, **draft))


def test_what_copied_layers_have_anyway_and_the_mlp_beside_experts_may_be_set(tmp_path: Path) -> None:
    same = {"intermediate_size": 96, "heads": 4, "kv_heads": 2, "activation": "gelu_pytorch_tanh"}
    preflight.check(config(target(tmp_path / "t", **SIZES), init="target_layers", **same))
    preflight.check(config(target(tmp_path / "t", **SIZES, num_experts=8), init="target_layers", intermediate_size=40))


@pytest.mark.parametrize(
    ("model", "draft", "why"),
    [
        ({"hidden_act": "xielu"}, {}, "the target's xielu is not known here"),
        ({"rope_scaling": {"type": "longrope"}}, {}, "rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, {}, "rope_type 'dynamic' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, {}, "rope_type 'dynamic'"),
        ({}, {"heads": 3}, "draft.heads: 3 is not a multiple of the 2 key/value heads"),
    ],
)
def test_a_drafter_that_cannot_be_built_is_refused(
    tmp_path: Path, model: dict[str, Any], draft: dict[str, Any], why: str
) -> None:
    assert why in refused(config(target(tmp_path / "t", **{**SIZES, **model}), **draft))


# ------------------------------------------------------------------------------------------------ stages, machine


def told(folder: Path, stages: list[str], **sections: Any) -> str:
    """What is refused of stages to run on a target, all in one text."""
    tree = {
        "target": {"model": str(folder)},
        "data": {"sources": [{"path": "x.jsonl"}]},
        "draft": {"mask_token_id": 30},
        "targets": {"topk": 16},
        "template": {"chat_template": "chat.jinja"},
        "export": {"layouts": []},
    }
    made = validate({**tree, **{name: {**tree.get(name, {}), **values} for name, values in sections.items()}})
    try:
        preflight.check_stages(made, stages)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "sections", "why"),
    [
        ("answers", {"target": {"attention": "flash_attention_2"}}, "flash_attention_2 cannot decode rows"),
        ("profile", {"target": {"attention": "flash_attention_2"}}, "flash_attention_2 cannot decode rows"),
        (
            "targets",
            {"target": {"attention": "flash_attention_2"}, "targets": {"dtype": "float32"}},
            "targets.dtype: flash_attention_2 computes in bfloat16 only",
        ),
        ("tokens", {"template": {"chat_template": None}}, "has no chat template (a base model?)"),
        ("train", {"train": {"continue_from": "nowhere"}}, "is not a finished train artifact"),
        ("calibrate", {"calibrate": {"records": "absent-*.pt", "temperatures": [1.0]}}, "absent-*.pt: no such file"),
        ("calibrate", {"calibrate": {"records": "", "temperatures": [1.0]}}, "calibrate.records: : no such file"),
        ("calibrate", {"calibrate": {"records": "/", "temperatures": [1.0]}}, "calibrate.records: /: no such file"),
        ("calibrate", {"data": {"calibration_fraction": 0.0}}, "leaves the calibrate stage without prompts"),
        ("evaluate", {"data": {"evaluation_fraction": 0.0}}, "leaves prompt set heldout empty"),
        (
            "evaluate",
            {"evaluate": {"policy": "early_stop"}, "draft": {"confidence": False}},
            "early_stop reads confidences, and this drafter has none",
        ),
        ("export", {"export": {"layouts": ["deepspec"], "temperature": 0.7}}, "0.7 is not among the calibrated ones"),
    ],
)
def test_a_stage_that_would_fail_after_those_before_it_is_refused(
    tmp_path: Path, stage: str, sections: dict[str, Any], why: str
) -> None:
    """Only where that stage is to run: the others are none the worse for it."""
    folder = target(tmp_path / "t")
    assert why in told(folder, [stage], **sections)
    assert told(folder, ["data"], **sections) == "" == told(folder, [stage])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no prompt"),
        ("\n\n", "holds no prompt"),
        ('{"turns": ["one"]}\n{"turns": [', "served.jsonl:2: bad_json"),
        ('{"text": "one"}\n', "served.jsonl:1: no `turns` and no chat"),
    ],
)
@pytest.mark.parametrize(
    ("stage", "setting"),
    [
        ("data", "data.decontaminate.prompt_sets"),
        ("calibrate", "calibrate.prompt_sets"),
        ("evaluate", "evaluate.prompt_sets"),
    ],
)
def test_a_prompt_file_without_prompts_is_refused_before_its_stage(
    tmp_path: Path, stage: str, setting: str, content: str, why: str
) -> None:
    folder, file = target(tmp_path / "t"), tmp_path / "served.jsonl"
    sets = {"prompt_sets": [str(file)]}
    sections = {stage: {"decontaminate": sets} if stage == "data" else sets}
    file.write_text(content)
    message = told(folder, [stage], **sections)
    assert f"{setting}: " in message and why in message
    assert told(folder, ["tokens"], **sections) == ""
    file.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    assert told(folder, [stage], **sections) == ""


@pytest.mark.parametrize(
    ("model", "engine", "why"),
    [
        ({"model_type": "cohere", "logit_scale": 0.0625}, "sglang", "the scaling this target applies"),
        ({"model_type": "granite", "embedding_multiplier": 12.0}, "llama.cpp", "the scaling this target applies"),
        ({"model_type": "gemma2", "hidden_size": 64}, "sglang", "the scaling this target applies"),
        ({"model_type": "qwen2"}, "llama.cpp", "the biases this drafter's attention took"),
        ({"model_type": "llama", "attention_bias": True}, "llama.cpp", "the biases this drafter's attention took"),
    ],
)
def test_an_engine_that_cannot_serve_a_drafter_of_this_target_is_refused(
    tmp_path: Path, model: dict[str, Any], engine: str, why: str
) -> None:
    """Its scales and biases stand in config.json: nobody must train to learn that the export is refused."""
    sections: dict[str, Any] = {"export": {"layouts": ["deepspec"], "engines": [engine]}}
    sections["draft"] = {"init": "target_layers"}
    described = {"hidden_act": "silu", "logits_scaling": 1.0, "attention_bias": False}
    assert why in told(target(tmp_path / "t", **{**described, **model}), ["export"], **sections)
    assert told(target(tmp_path / "t", **described), ["export"], **sections) == ""
    if "biases" in why:
        sections["draft"] = {"init": "random"}
        assert told(target(tmp_path / "t", **{**described, **model}), ["export"], **sections) == ""


def test_one_prompt_cannot_be_calibrated_on(tmp_path: Path) -> None:
    (tmp_path / "served.jsonl").write_text('{"turns": ["one"]}\n' * 3)
    named = {"prompt_sets": [str(tmp_path / "served.jsonl")]}
    assert "one prompt cannot be fitted on" in told(target(tmp_path / "t"), ["calibrate"], calibrate=named)
    assert told(target(tmp_path / "t"), ["evaluate"], evaluate=named) == ""


def test_a_target_with_states_that_cannot_be_cut_back_is_refused_where_it_decodes(tmp_path: Path) -> None:
    folder = target(tmp_path / "t", layer_types=["full_attention", "linear_attention"])
    assert "layers of kind linear_attention keep a running state" in told(folder, ["targets", "evaluate"])
    assert told(folder, ["targets", "train"]) == ""
    assert set(ATTENTION_KINDS) == cache._KINDS


def test_a_target_that_cannot_be_split_over_the_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = target(tmp_path / "t", num_attention_heads=4, num_key_value_heads=2)
    split = {"target": {"tensor_parallel": True}, "launch": {"processes_per_node": 4}}
    assert "num_key_value_heads = 2 cannot be split over 4 ranks" in told(folder, ["targets"], **split)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert told(folder, ["targets"], **split) == ""


def test_a_run_is_extended_only_beyond_its_end(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({"steps": 40}))
    folder, longer = target(tmp_path / "t"), {"continue_from": str(tmp_path / "run")}
    assert "the run already ended at step 40" in told(folder, ["train"], train={**longer, "steps": 40})
    assert told(folder, ["train"], train={**longer, "steps": 41}) == told(folder, ["train"], train=longer) == ""


# ------------------------------------------------------------------------------------------------ checkpoints

OF_PLAIN = {key: value for key, value in TARGET.items() if key not in ("num_hidden_layers", "vocab_size")}


def checkpoint(folder: Path, form: str, **changes: Any) -> str:
    """A checkpoint's description without its tensors: our own, or of a published layout."""
    described = DraftConfig(**{**PLAIN, "mask_token_id": 30, **changes})
    whole = {"format": FORMAT, "layer_convention": LAYER_CONVENTION, "config": described.to_dict(), "meta": {}}
    name = "draft.json" if form == "own" else "config.json"
    whole = whole if form == "own" else write_config(described, form, origin())
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(whole))
    return str(folder)


def named(tmp_path: Path, setting: str, path: str, **model: Any) -> str:
    folder = target(tmp_path / "t", layers=6, rows=48, **{**OF_PLAIN, **model})
    draft = {"layers": 2, "mask_token_id": 30}
    train, targets = {setting: path}, {"layers": [0, 2, 3], "topk": 16}
    assert told(folder, ["data", "tokens", "targets"], train=train, draft=draft, targets=targets) == ""
    return told(folder, ["train"], train=train, draft=draft, targets=targets)


@pytest.mark.parametrize("form", ["own", "deepspec", "speculators"])
@pytest.mark.parametrize("setting", ["init_from", "published"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target_vocab_size": 64}, "target_vocab_size is 64, the target has 48"),
        ({"hidden_size": 64}, "hidden_size is 64, the target has 32"),
        ({"target_num_layers": 9}, "is 9, the target has 6"),
        ({"rope": {"rope_theta": 1e6, "rope_type": "default"}}, "rope_theta is 1000000.0, the target has 5000.0"),
    ],
)
def test_a_checkpoint_of_another_target_is_refused_before_the_targets_are_built(
    tmp_path: Path, form: str, setting: str, changes: dict[str, Any], why: str
) -> None:
    assert named(tmp_path, setting, checkpoint(tmp_path / "good", form)) == ""
    message = named(tmp_path, setting, checkpoint(tmp_path / "bad", form, **changes))
    assert f"train.{setting}: {tmp_path}/bad" in message and why in message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layers": 1}, "layers: 1 in the checkpoint, 2 here"),
        ({"target_layer_ids": (1, 2, 3)}, "target_layer_ids: (1, 2, 3) in the checkpoint, (0, 2, 3) here"),
        ({"intermediate_size": 56}, "intermediate_size: 56 in the checkpoint, 40 here"),
        ({"heads": 2, "kv_heads": 1}, "kv_heads: 1 in the checkpoint, 2 here"),
        ({"activation": "gelu"}, "activation: 'gelu' in the checkpoint, 'silu' here"),
        (
            {"kind": "dflash", "layout": "fill_in", "markov": "none", "markov_rank": 0},
            "layout: 'fill_in' in the checkpoint, 'next_token' here",
        ),
    ],
)
def test_a_start_whose_weights_would_mean_something_else_is_refused_before_the_targets_are_built(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    """Of a checkpoint taken as it is, its own description says all this."""
    path = checkpoint(tmp_path / "other", "own", **changes)
    assert why in named(tmp_path, "init_from", path)
    assert named(tmp_path, "published", path) == ""


@pytest.mark.parametrize("name", CONFIGS)
def test_the_drafter_of_the_same_configuration_is_a_start_whatever_the_target(tmp_path: Path, name: str) -> None:
    """Training derives it from the model's own configuration class, which knows more than config.json says."""
    CONFIGS[name].save_pretrained(tmp_path / "t")
    described = derive_config(CONFIGS[name].to_dict(), Draft(layers=2, mask_token_id=319), target_layer_ids=(0, 2))
    path = checkpoint(tmp_path / "start", "own", **described.to_dict())
    sections = {"draft": {"layers": 2, "mask_token_id": 319}, "targets": {"layers": [0, 2]}}
    for setting in ("init_from", "published"):
        assert told(tmp_path / "t", ["train"], train={setting: path}, **sections) == ""


@pytest.mark.parametrize("name", ["draft.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_checkpoint_that_does_not_describe_itself_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / name).write_text(content)
    message = named(tmp_path, "init_from", str(tmp_path / "odd"))
    assert f"{tmp_path}/odd/{name}" in message and "dspark repair" not in message


def test_what_a_begun_training_started_from_is_not_looked_at_again(tmp_path: Path) -> None:
    folder = target(tmp_path / "t", layers=6, rows=48, **OF_PLAIN)
    path = checkpoint(tmp_path / "bad", "own", target_vocab_size=64)
    made = config(folder, targets={"layers": [0, 2, 3]})
    made = made.model_copy(update={"train": made.train.model_copy(update={"init_from": path})})
    facts = TargetFacts.of(made)
    assert any("target_vocab_size" in problem for problem in stages.problems(made, ["train"], facts))
    assert list(stages.problems(made, ["train"], facts, begun=["train"])) == []


@pytest.mark.parametrize(
    ("gpu", "packages", "overrides", "why"),
    [
        (False, ["flash_attn"], ["target.attention=flash_attention_2"], ["needs a GPU"]),
        (False, [], ["target.attention=flash_attention_2"], ["needs a GPU", "flash-attn (or kernels), not installed"]),
        (True, [], ["target.attention=flash_attention_2"], ["flash-attn (or kernels), not installed"]),
        (True, ["kernels"], ["target.attention=flash_attention_2"], []),
        (False, [], ["target.device_map=cuda:0"], ["target.device_map: cuda:0 needs a GPU"]),
        (True, [], ["train.engine=zero2"], ["train.engine: zero2 needs DeepSpeed"]),
        (True, [], ["train.compile=true"], ["needs Triton"]),
        (True, ["triton"], ["train.compile=true"], []),
        (False, [], ["train.compile=true"], ["needs a C++ compiler, and no-such-compiler (CXX)"]),
    ],
)
def test_what_this_machine_lacks_is_told(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, packages: list[str], overrides: list[str], why: list[str]
) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: gpu)
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    made = load("configs/debug.yaml", overrides)
    found = list(machine.problems(made, ["targets", "train"]))
    assert len(found) == len(why) and all(part in problem for part, problem in zip(why, found, strict=True))
    assert list(machine.problems(made, ["data", "tokens", "export"])) == []


def test_a_stage_that_runs_no_model_here_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    elsewhere = {
        "answers": ["answers.backend=openai", "answers.endpoints=[http://x/v1]", "answers.model=m"],
        "calibrate": ["calibrate.records=r.pt", "calibrate.temperatures=[1]"],
        "profile": ["profile.synthetic=sqrt"],
    }
    for stage, overrides in elsewhere.items():
        placed = ["target.device_map=cuda:0"]
        assert list(machine.problems(load("configs/debug.yaml", [*placed, *overrides]), [stage])) == []
        assert list(machine.problems(load("configs/debug.yaml", placed), [stage])) != [], stage


def test_target_inputs_stages_and_machine_are_refused_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a finished stage is not held against the machine; nor is this machine, where jobs run elsewhere."""
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    overrides = [
        f"work_dir={tmp_path}", "target.device_map=cuda:0", "draft.mask_token_id=999", "export.temperature=0.7",
        f"data.sources=[{{path: {tmp_path}/absent.jsonl}}]",
    ]  # fmt: skip
    parts = ["absent.jsonl: no such file", "999 is not a row", "0.7 is not among", "device_map: cuda:0"]
    with pytest.raises(ConfigError) as caught:
        preflight.accepted(load("configs/debug.yaml", overrides))
    assert all(part in problem for part, problem in zip(parts, caught.value.problems, strict=True))
    with pytest.raises(ConfigError) as caught:
        preflight.accepted(load("configs/debug.yaml", overrides), ["data"], elsewhere=True)
    assert len(caught.value.problems) == 2
