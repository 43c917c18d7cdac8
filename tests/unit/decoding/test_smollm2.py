"""S22 on a real model: greedy outputs with accepted and rejected drafts equal the target's own, in batches of 8.

100 prompts x 64 tokens under `make prove`; a few here. The drafter proposes what the target would say, wrong at a slot
that depends on the position, so blocks of a batch end everywhere.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.decoding.engine import decode
from pipeline.decoding.lossless import first_difference
from pipeline.draft.interface import Proposal
from pipeline.target import Target

FOLDER = Path("work/models/smollm2-135m-instruct")
K = 7


class Recorded:
    """Proposes what was recorded after (position, anchor), with one wrong token in most blocks."""

    def __init__(self, prompts, answers):
        self.config, self.rows, self.next = SimpleNamespace(block_size=K), None, {}
        for prompt, answer in zip(prompts, answers, strict=True):
            for place, token in enumerate(answer):
                self.next.setdefault((len(prompt) + place, token), answer[place + 1 :])

    def start(self, batch, max_length, **kwargs):
        return SimpleNamespace(lengths_B=torch.zeros(batch, dtype=torch.long), move=lambda source, target: None)

    def observe(self, *args, **kwargs): ...

    def propose(self, state, anchors_B, positions_B, sampler, frozen):
        blocks = []
        for anchor, position in zip(anchors_B.tolist(), positions_B.tolist(), strict=True):
            block = (self.next.get((position, anchor), []) + [0] * K)[:K]
            block[position % (K + 2) % K] ^= 1 if position % (K + 2) < K else 0
            blocks.append(block)
        return Proposal(torch.tensor(blocks), None, None)


@pytest.mark.prove
@pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason=f"{FOLDER} is not there: make run")
def test_s22_greedy_outputs_in_batches_of_eight_equal_the_targets_own(proof):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    count, limit = proof.size(8, 100), proof.size(24, 64)
    questions = [f"What is {n} times {n + 7}, and why does a {noun} need {n} legs?" for n in range(count // 4)
                 for noun in ("table", "spider", "robot", "chair")]  # fmt: skip
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in questions
    ]
    target = Target.load(str(FOLDER))
    options = {"temperature": 0.0, "max_new_tokens": limit, "stop_ids": {2}, "batch_size": 8, "seeds": range(count)}
    own = [generation.ids for generation in decode(target, prompts, **options)]
    library = target.model.generate(
        torch.tensor([prompts[0]]), do_sample=False, max_new_tokens=limit, pad_token_id=2, eos_token_id=2
    )[0, len(prompts[0]) :].tolist()
    assert own[0] == library or first_difference(target, prompts[0], own[0], library).tie
    got = decode(target, prompts, drafter=Recorded(prompts, own), **options)
    steps = [step for generation in got for step in generation.rounds]
    accepted = {step.accepted for step in steps}
    assert {0, K} <= accepted, "blocks must end everywhere"
    found = [
        (prompt, first_difference(target, prompt, generation.ids, ids))
        for prompt, generation, ids in zip(prompts, got, own, strict=True)
    ]
    parted = [difference for _, difference in found if difference is not None]
    proof.note("prompts, equal outputs, near-ties", (count, count - len(parted), sum(d.tie for d in parted)))
    assert all(difference.tie for difference in parted) and len(parted) <= max(1, count // 100)
