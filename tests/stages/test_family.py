"""Every drafter of the family through the same stages on one cache: same rows, same steps, same prompts.

Under `make prove` the target is SmolLM2 and the figures are worth reading; under `make test` it is a tiny one and a few
steps do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.artifact import read_json
from pipeline.config import load
from pipeline.runner import run_chain
from tests.stages.whole_chain import DEBUG, ROOT, SMALLER

TARGET = "work/models/smollm2-135m-instruct"
CACHE = ("targets.logits=last_hidden", "targets.positions=all")  # what the most demanding member needs
PLAIN = ("draft.markov=none", "draft.confidence=false", "draft.mask_token_id=null")
FAMILY: dict[str, tuple[str, ...]] = {
    "DSpark, vanilla head": (),
    "DSpark, gated head": ("draft.markov=gated",),
    "DSpark, RNN head": ("draft.markov=rnn",),
    "DSpark without taps": ("draft.taps=false",),
    "DFlash, next token": ("draft.kind=dflash", "draft.markov=none", "draft.confidence=false"),
    "DFlash, fill in": ("draft.kind=dflash", "draft.markov=none", "draft.confidence=false", "draft.layout=fill_in"),
    "Eagle3": ("draft.kind=eagle3", *PLAIN),
    "MTP": ("draft.kind=mtp", *PLAIN),
    "Medusa": ("draft.kind=medusa", *PLAIN, "draft.init=random"),
}
FEW = ("DSpark, vanilla head", "Eagle3", "Medusa")
SMALL = (
    *SMALLER,
    "tracking.enabled=false",
    "train.steps=4",
    "calibrate.num_prompts=4",
    "calibrate.max_new_tokens=4",
    "evaluate.num_prompts=4",
)
FULL = (
    "train.steps=800", "calibrate.num_prompts=4", "calibrate.max_new_tokens=8", "evaluate.num_prompts=32",
    "evaluate.vanilla=false",
)  # fmt: skip


def evaluated(settings: list[str], config: Path) -> tuple[str, list[dict[str, Any]]]:
    """(fingerprint of the cache, pooled records) of one drafter."""
    chain = run_chain(load(config, settings))
    report = read_json(chain["evaluate"].path / "report.json")
    return chain["targets"].fingerprint, [row for row in report["records"] if row["domain"] is None]


@pytest.mark.prove
def test_the_family_on_one_cache(proof, tmp_path):
    if proof.full and not (ROOT / TARGET / "model.safetensors").is_file():
        pytest.skip(f"{TARGET} is not there: make run fetches it")
    config = proof.size(DEBUG, ROOT / "configs" / "smollm2.yaml")
    common = proof.size((*SMALL, f"work_dir={tmp_path}"), FULL)
    caches, requests = set(), set()
    for name in proof.size(FEW, FAMILY):
        cache, records = evaluated([*common, *CACHE, "export.layouts=[]", *FAMILY[name]], config)
        caches.add(cache)
        for row in records:
            requests.add((row["temperature"], row["num_requests"]))
            low, high = row["tau_interval"]
            curve = " ".join("-" if chance is None else f"{chance:.2f}" for chance in row["conditional_acceptance"])
            what = name if row["drafter"] != "prompt-lookup" else f"prompt lookup on the outputs of {name}"
            proof.note(f"{what}, T = {row['temperature']:g}", f"tau {row['tau']:.2f} [{low:.2f}, {high:.2f}]; {curve}")
            if row["drafter"] != "prompt-lookup":
                assert 1.0 <= low <= row["tau"] <= high
                assert not row.get("lossless", {}).get("faults")  # compared with plain decoding where that ran
        lookup = [row for row in records if row["drafter"] == "prompt-lookup"]
        assert {row["temperature"] for row in lookup} == {0.0, 1.0}
    assert len(caches) == 1 and len(requests) == 2
