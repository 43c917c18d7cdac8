"""A real vLLM loads what we export: outputs equal to no speculation, accepted counts equal to our own engine's.

    DSPARK_VLLM_PYTHON=/path/to/venv/bin/python pytest tests/vllm

That Python has vLLM 0.25 or newer (the CPU build will do) and, for DSpark without a GPU, Triton; it need not have this
project. Without the variable this Python is taken, if it has vLLM itself; else everything here is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.layouts.config_json import Origin
from pipeline.layouts.load import load_published
from pipeline.layouts.publish import Options, publish
from tests.vllm.drafters import BLOCK, NEW_TOKENS, Case, fit, make_case

PYTHON = os.environ.get("DSPARK_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # skipped with the reason in tests/conftest.py
SHIM = {
    "PYTHONPATH": str(HERE / "shim"),
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
NO_HEAD = {"markov": "none"}
FILL_IN = {"kind": "dflash", "layout": "fill_in", **NO_HEAD}
EAGLE3 = {"kind": "eagle3", "layers": 1, "mask_token_id": None, **NO_HEAD}
# name -> (how the drafter differs, layout, vLLM's method)
SERVED: dict[str, tuple[dict[str, Any], str, str]] = {
    "fill-in DFlash": (FILL_IN, "dflash", "dflash"),
    "DSpark": ({}, "deepspec", "dspark"),
    "DSpark, speculators": ({"vocabulary": 160}, "speculators", "dspark"),
    "next-token DFlash": ({"kind": "dflash", **NO_HEAD}, "deepspec", "dspark"),
    "fill-in DFlash, speculators": ({**FILL_IN, "vocabulary": 160}, "speculators", "dflash"),
    "Eagle3": (EAGLE3, "eagle3", "eagle3"),
    "Eagle3, speculators": ({**EAGLE3, "vocabulary": 160}, "speculators", "eagle3"),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("target"))


def serve(case: Case, folder: Path, speculative: dict[str, Any] | None, **request: Any) -> dict[str, Any]:
    """One run of vLLM over the case's prompts: `tokens` per prompt, and `counts`."""
    dspark = speculative is not None and speculative["method"] == "dspark"
    cpu = not Path("/dev/nvidiactl").exists()
    asked = {
        "target": str(case.folder), "prompts": case.prompts, "max_tokens": NEW_TOKENS, "speculative": speculative,
        "out": str(folder / "out.json"), **request,
    }  # fmt: skip
    (folder / "request.json").write_text(json.dumps(asked))
    run = subprocess.run(
        [str(PYTHON), str(HERE / "client.py"), str(folder / "request.json")],
        env={**os.environ, **(SHIM if dspark and cpu else {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def exported(case: Case, folder: Path, name: str) -> tuple[Path, Any, dict[str, Any]]:
    """(folder, the drafter read back from it, vLLM's speculative_config)."""
    changes, layout, method = SERVED[name]
    origin = Origin(target=str(case.folder), architectures=("Qwen3ForCausalLM",), max_position_embeddings=512)
    frozen = case.target.frozen
    out = folder / "draft"
    publish(out, fit(case, **changes), layout=layout, frozen=frozen, origin=origin, options=Options(dtype="float32"))
    speculative = {"method": method, "model": str(out), "num_speculative_tokens": BLOCK}
    return out, load_published(out, target=case.target.config.to_dict())[0], speculative


@pytest.mark.parametrize("name", SERVED)
def test_counts_equal_our_engines(case: Case, tmp_path: Path, name: str, proof: Any) -> None:
    """Output equal to the target's own, rounds and accepted tokens equal to ours, drafter by drafter."""
    _, drafter, speculative = exported(case, tmp_path, name)
    rounds, accepted = case.counts(drafter)
    assert accepted > rounds  # else there is nothing to compare
    found = serve(case, tmp_path, speculative, exact_norm=not name.startswith("Eagle3"))
    assert found["tokens"] == [each.ids for each in case.answers]
    proof.note(f"{name}: vLLM drafts/accepted", (found["counts"]["num_drafts"], found["counts"]["num_accepted_tokens"]))
    proof.note(f"{name}: our rounds/accepted", (rounds, accepted))
    assert (found["counts"]["num_drafts"], found["counts"]["num_accepted_tokens"]) == (rounds, accepted)


def test_stock_build_within_three_percent(case: Case, tmp_path: Path) -> None:
    """Without the norm patch: vLLM's CPU kernel gives every draft layer the first layer's key norm. Still lossless."""
    out, drafter, speculative = exported(case, tmp_path, "fill-in DFlash")
    _, accepted = case.counts(drafter)
    found = serve(case, tmp_path, speculative)
    assert found["tokens"] == [each.ids for each in case.answers]
    assert abs(found["counts"]["num_accepted_tokens"] - accepted) <= 0.03 * accepted
    assert found["tokens"] == serve(case, tmp_path, None)["tokens"]
    _shifted(out)
    control = serve(case, tmp_path, speculative)
    assert control["counts"]["num_accepted_tokens"] < 0.95 * accepted  # the counts can see a wrong convention


def _shifted(folder: Path) -> None:
    """The same drafter with its tapped layers misnamed by one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["target_layer_ids"] = [1, 2, 3, 4]
    path.write_text(json.dumps(config))


def test_every_layout_of_one_drafter_serves_alike(case: Case, tmp_path: Path) -> None:
    """DeepSpec's layout and speculators' hold the same drafter: same counts."""
    drafter = fit(case)
    counts = []
    for layout in ("deepspec", "speculators"):
        out = tmp_path / layout
        origin = Origin(target=str(case.folder), architectures=("Qwen3ForCausalLM",), max_position_embeddings=512)
        options = Options(dtype="float32", target_tensors=layout == "deepspec")
        publish(out, drafter, layout=layout, frozen=case.target.frozen, origin=origin, options=options)
        speculative = {"method": "dspark", "model": str(out), "num_speculative_tokens": BLOCK}
        counts.append(serve(case, tmp_path, speculative, exact_norm=True)["counts"])
    assert counts[0] == counts[1] and counts[0]["num_accepted_tokens"] > 0


def test_missing_fc_is_what_vllm_does_not_notice(case: Case, tmp_path: Path) -> None:
    """Why the self-check exists: vLLM loads a drafter without `fc`, stays lossless, and accepts less."""
    from safetensors.torch import load_file, save_file

    out, drafter, speculative = exported(case, tmp_path, "fill-in DFlash")
    _, accepted = case.counts(drafter)
    tensors = load_file(out / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    found = serve(case, tmp_path, speculative)
    assert found["tokens"] == [each.ids for each in case.answers]
    assert found["counts"]["num_accepted_tokens"] < 0.95 * accepted


def test_shim_is_complete() -> None:
    """The entry point that registers the interpreted Triton backend lies beside its package."""
    entry = (HERE / "shim" / "triton_cpu_shim-0.1.dist-info" / "entry_points.txt").read_text()
    assert "cpu = triton_cpu_shim" in entry and shutil.which(str(PYTHON)) is not None
