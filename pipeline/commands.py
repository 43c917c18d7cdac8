"""The table of commands: one row each, with its help line, an example, and the function that does it.

Functions are named, not imported: `dspark --help` and every refused configuration cost no torch.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

Argument = tuple[str, str]  # name ("text", "--flag" or "--option=METAVAR"), help


def _number(
    fits: Callable[[float], bool], expected: str, kind: Callable[[float], float] = float
) -> Callable[[str], float]:
    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if fits(value := float(text)):
                return kind(value)
        raise argparse.ArgumentTypeError(f"{expected} expected, found {text!r}")

    return read


# METAVAR -> what reads the value; others are text.
NUMBERS: dict[str, Callable[[str], float]] = {
    "N": _number(lambda value: value >= 1 and value.is_integer(), "a whole number of at least 1 is", int),
    "X": _number(lambda value: 0 < value < float("inf"), "a positive number is"),
    "SHARE": _number(lambda value: 0 < value <= 1, "a share in (0, 1] is"),
    "T": _number(lambda value: 0 <= value < float("inf"), "0 or a positive number is"),
    "SECONDS": _number(lambda value: 0 <= value < float("inf"), "a number of seconds is"),
}


@dataclass(frozen=True)
class Command:
    """`call` is "module:function"; it receives (config, arguments). `arguments` come before the overrides.

    `stops_well`: it looks for requests to stop between units of work. Ctrl-C ends the others at once.
    """

    help: str
    example: str
    call: str
    arguments: tuple[Argument, ...] = ()
    stops_well: bool = False


def _stage(name: str, text: str) -> Command:
    return Command(text, f"dspark {name} -c configs/debug.yaml", "pipeline.operations.run:stage", stops_well=True)


STAGE_COMMANDS = {
    name: _stage(name, text)
    for name, text in {
        "data": "conversations -> text shards: stable ids, no duplicates, splits",
        "answers": "the target answers the prompts",
        "tokens": "chats -> token ids and loss masks",
        "targets": "target hidden states and distributions -> webdataset shards",
        "train": "the drafter, under accelerate, DeepSpeed ZeRO or FSDP2",
        "calibrate": "STS temperatures of the confidence head",
        "profile": "SPS: steps per second by batch tokens",
        "evaluate": "accepted length, acceptance curves, speed; report and plots",
        "export": "checkpoints that serving engines load",
    }.items()
}

OTHER_COMMANDS = {
    "run": Command(
        "walk the whole chain, skipping what is finished",
        "dspark run -c configs/debug.yaml train.steps=40",
        "pipeline.operations.run:chain",
        stops_well=True,
    ),
    "submit": Command(
        "submit the chain to Slurm: what is missing, each stage after the one before",
        "dspark submit -c configs/debug.yaml --dry-run",
        "launch.submit:submit",
        (("--dry-run", "print the commands, and what each node would run"),),
        stops_well=True,
    ),
    "plan": Command(
        "what a configuration costs before anything is spent, and what exists already",
        "dspark plan -c configs/debug.yaml --rows 1400000 --tokens-per-row 885",
        "pipeline.operations.plan:plan",
        (
            ("--rows=N", "training rows, when the corpus is not built yet"),
            ("--tokens-per-row=N", "mean length (default 885, Open-PerfectBlend's)"),
            ("--supervised-share=SHARE", "share of tokens in answers (default 0.65)"),
            ("--device-tflops=X", "dense peak of one device (default 400)"),
            ("--device-bandwidth=X", "its memory bandwidth in GB/s (default 2000)"),
            ("--tau=X", "accepted length (default: as evaluated, else 2)"),
            ("--calibrate", "measure this machine for half a minute; predict CPU-seconds and peak memory"),
            ("--json", "print as JSON"),
        ),
    ),
    "generate": Command(
        "answer one question with the trained drafter, accepted tokens marked",
        'dspark generate "Count from 3 to 8." -c configs/debug.yaml',
        "pipeline.decoding.generate:generate",
        (("text", "the question"), ("--temperature=T", "default 0"), ("--max-new-tokens=N", "default as in evaluate")),
    ),
    "doctor": Command(
        "check environment, target, disk and tracking, and show chats as token, role, mask and anchor",
        "dspark doctor -c configs/debug.yaml --samples 2",
        "pipeline.operations.doctor:doctor",
        (
            ("--samples=N", "conversations shown (default 2)"),
            ("--endpoint=URL", "compare with a server's own tokenisation, e.g. http://host:8000/v1"),
            ("--json", "print as JSON"),
        ),
    ),
    "fetch": Command(
        "bring hub models, data and prompt sets to this machine, so that compute nodes run offline",
        "dspark fetch -c configs/smollm2.yaml",
        "pipeline.corpus.fetch:fetch",
    ),
    "codecs": Command(
        "what each tap codec costs in acceptance and accepted length, on the trained drafter",
        "dspark codecs -c configs/debug.yaml --prompts 16",
        "pipeline.operations.codecs:codecs",
        (("--prompts=N", "held-out prompts (default 32)"), ("--temperature=T", "of decoding (default 1)")),
    ),
    "feed": Command(
        "build a rolling cache's shards on devices of their own, beside a training run elsewhere",
        "dspark feed -c configs/debug.yaml",
        "pipeline.operations.feed:run",
        stops_well=True,
    ),
    "status": Command(
        "what exists, what runs and how far it is, why it stopped",
        "dspark status -c configs/debug.yaml",
        "pipeline.operations.status:status",
        (("--json", "print as JSON"),),
    ),
    "report": Command(
        "one HTML file about the experiment: results, curves, comparison, lineage (also made by `run`)",
        "dspark report -c configs/debug.yaml",
        "pipeline.operations.report.command:report",
    ),
    "compare": Command(
        "this drafter beside every other one evaluated in the same work directory",
        "dspark compare -c configs/debug.yaml",
        "pipeline.operations.report.command:compare",
        (("--json", "print as JSON"),),
    ),
    "lineage": Command(
        "from an artifact back to the corpus, and forward to what was made from it",
        "dspark lineage evaluate -c configs/debug.yaml",
        "pipeline.operations.lineage:lineage",
        (("artifact", "stage name, fingerprint or folder"), ("--json", "print as JSON")),
    ),
    "gc": Command(
        "list artifacts neither an experiment nor this configuration refers to, and what deleting them frees",
        "dspark gc -c configs/debug.yaml",
        "pipeline.operations.lineage:gc",
        (("--yes", "delete them"), ("--json", "print as JSON")),
    ),
    "verify": Command(
        "check every finished artifact's files against the hashes in its manifest",
        "dspark verify -c configs/debug.yaml",
        "pipeline.operations.verify:verify",
        (("--json", "print as JSON"),),
    ),
    "repair": Command(
        "remove exactly the bad files `verify` finds, and run their stages again",
        "dspark repair -c configs/debug.yaml",
        "pipeline.operations.verify:repair",
        stops_well=True,
    ),
    "push": Command(
        "upload one exported layout to the Hugging Face hub (HF_TOKEN)",
        "dspark push owner/name -c configs/debug.yaml --layout=speculators --private",
        "pipeline.operations.push:push",
        (
            ("repository", "owner/name on the hub; made when it does not exist"),
            ("--layout=NAME", "one of export.layouts (default: the only one)"),
            ("--revision=BRANCH", "branch to commit to"),
            ("--private", "make a new repository private"),
        ),
    ),
}

COMMANDS = {**STAGE_COMMANDS, **OTHER_COMMANDS}
