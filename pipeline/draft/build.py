"""Build a drafter from its configuration, with weights that depend on nothing but the seed.

drafter = build_drafter(config, seed=0, token_ids=vocabulary.token_ids)
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from pipeline.draft.block import BlockDrafter
from pipeline.draft.config import DraftConfig
from pipeline.draft.eagle3 import Eagle3
from pipeline.draft.interface import Drafter
from pipeline.draft.medusa import Medusa
from pipeline.draft.mtp import MTP

FAMILY: dict[str, type[Drafter]] = {
    "dspark": BlockDrafter,
    "dflash": BlockDrafter,
    "eagle3": Eagle3,
    "mtp": MTP,
    "medusa": Medusa,
}
INIT_STD = 0.02  # of every matrix; norms start at one, biases at zero


def build_drafter(config: DraftConfig, *, seed: int, token_ids: Tensor | None = None) -> Drafter:
    """A drafter on the CPU in fp32, randomly initialised.

    Each parameter draws from its own generator, seeded by (seed, its name): adding a head leaves the others' start
    unchanged, so two drafters that differ in one head can be compared. `token_ids` [|D|] is the draft vocabulary.
    """
    drafter = empty_drafter(config, token_ids)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            _initialise(name, parameter, seed)
    return drafter


def empty_drafter(config: DraftConfig, token_ids: Tensor | None = None) -> Drafter:
    """The modules, with whatever weights they are born with (for loading a checkpoint)."""
    return FAMILY[config.kind](config, token_ids)


def _initialise(name: str, parameter: nn.Parameter, seed: int) -> None:
    if name.endswith(".bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        # Hashed, because torch's CPU generator looks at the low 32 bits of a seed only.
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
        parameter.normal_(0.0, INIT_STD, generator=generator)
