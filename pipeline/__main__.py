"""The command line: `dspark STAGE -c FILE [section.key=value ...]`, also as `python -m pipeline`, and under
`torchrun -m pipeline` or `accelerate launch -m pipeline` with the same arguments.

Exit codes: 0 done, or stopped cleanly (`stopped.json` says why); 1 an unexpected failure; 2 the configuration or the
command line is wrong; 3 the data is wrong; 4 an artifact is damaged or unfinished; 5 the disk is full;
130 Ctrl-C twice.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from pipeline import config as configuration
from pipeline import progress, stopping
from pipeline.chain import STAGES
from pipeline.config import Config
from pipeline.errors import ConfigError, DsparkError, Stopped
from pipeline.progress import say

# command -> (module:function taking (config, arguments), one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("pipeline.operations.run:run", "walk the whole chain, skipping what is finished"),
}

DEBUG_OVERRIDES = (
    "data.shard_rows=32",
    "data.workers=0",
    "tokens.workers=0",
    "answers.max_new_tokens=32",
    "answers.batch_size=8",
    "tokens.max_length=256",
    "train.steps=20",
    "train.global_batch_size=8",
    "train.num_anchors=16",
    "train.validate_every=10",
    "train.save_every=10",
    "train.compile=false",
    "train.workers=0",
    "train.engine=single",
    "calibrate.num_prompts=8",
    "calibrate.max_new_tokens=32",
    "profile.grid=powers_of_two",
    "profile.max_batch_tokens=16",
    "profile.repeats=2",
    "evaluate.num_prompts=8",
    "evaluate.max_new_tokens=32",
    "evaluate.bootstrap=100",
)
DEBUG_SOURCE_LIMIT = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn errors into one clear message and an exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = build_parser()
    arguments = parser.parse_args(argv)
    progress.configure(quiet=arguments.quiet)
    try:
        config = load_config(arguments)
        stopping.install(stop_after_seconds=arguments.stop_after)
        dispatch(config, arguments)
    except Stopped as stop:
        say(f"stopped: {stop}. The same command goes on from here.")
        return stop.exit_code
    except DsparkError as error:
        say(f"{error}", warning=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    stages = "\n".join(f"  {name:10s} {_stage_help(name)}" for name in STAGES)
    others = "\n".join(f"  {name:10s} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="dspark",
        description="Train, calibrate, measure and export drafters for speculative decoding.",
        epilog=f"stages:\n{stages}\n\nother commands:\n{others}\n\n"
        "example: dspark run -c configs/debug.yaml train.steps=40\n\n" + (__doc__ or "").split("\n\n")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=[*STAGES, *COMMANDS], metavar="STAGE|COMMAND")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="YAML run configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change the configuration")
    parser.add_argument("--debug", action="store_true", help="small one-device run: prints the overrides it applies")
    parser.add_argument("--array", metavar="I/N", help="do the I-th of N shares of a sharded stage (Slurm array task)")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="stop cleanly after this long")
    parser.add_argument("--quiet", action="store_true", help="only warnings and the final result on the console")
    parser.add_argument("--json", action="store_true", help="print the command's result as JSON")
    parser.add_argument("--yes", action="store_true", help="go through with what would only be listed")
    return parser


def _stage_help(name: str) -> str:
    inputs = {
        "data": "conversations -> text shards: ids, no duplicates, splits",
        "answers": "the target answers the prompts",
        "tokens": "chats -> token ids and loss masks",
        "targets": "target hidden states and distributions -> webdataset shards",
        "train": "the drafter, under accelerate, DeepSpeed ZeRO or FSDP2",
        "calibrate": "STS temperatures of the confidence head",
        "profile": "SPS: steps per second by batch tokens",
        "evaluate": "accepted length, acceptance curves, speed; report and plots",
        "export": "checkpoints that serving engines load",
    }
    return inputs[name]


def load_config(arguments: argparse.Namespace) -> Config:
    """The file, the debug set when asked for (printed), then the user's own overrides."""
    if arguments.array:
        _check_array(arguments.array)
        os.environ["DSPARK_ARRAY"] = arguments.array
    debug: list[str] = []
    if arguments.debug:
        base = configuration.load(arguments.config, arguments.overrides)
        debug = [*DEBUG_OVERRIDES, *_debug_limits(base), f"experiment={base.experiment}-debug"]
        say("debug overrides: " + " ".join(debug))
    return configuration.load(arguments.config, [*debug, *arguments.overrides])


def _debug_limits(config: Config) -> list[str]:
    return [
        f"data.sources.{index}.limit={min(source.limit or DEBUG_SOURCE_LIMIT, DEBUG_SOURCE_LIMIT)}"
        for index, source in enumerate(config.data.sources)
    ]


def _check_array(text: str) -> None:
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(f"--array {text}: write I/N with 0 <= I < N, e.g. 0/4")


def dispatch(config: Config, arguments: argparse.Namespace) -> None:
    if arguments.command in STAGES:
        from pipeline.runner import run_chain

        run_chain(config, [arguments.command])
        return
    module, _, function = COMMANDS[arguments.command][0].partition(":")
    getattr(importlib.import_module(module), function)(config, arguments)


if __name__ == "__main__":
    sys.exit(main())
