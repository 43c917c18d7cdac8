"""The command line: `dspark COMMAND -c FILE [section.key=value ...]`, also as `python -m pipeline`, and under
`torchrun -m pipeline` or `accelerate launch -m pipeline` with the same arguments.

Stages, `run`, `submit`, `repair` and `feed` stop well at the first Ctrl-C, at once at the second; the others at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import __version__, progress, stopping
from pipeline import config as configuration
from pipeline.chain import STAGES
from pipeline.commands import COMMANDS, NUMBERS, OTHER_COMMANDS, STAGE_COMMANDS, Command
from pipeline.config import Config
from pipeline.errors import ConfigError, DsparkError, Stopped
from pipeline.files import storage_error
from pipeline.progress import say

EXIT_CODES = """\
exit codes: 0 done, or stopped cleanly (stopped.json says why); 1 an unexpected failure; 2 the configuration or the
command line is wrong; 3 the data is wrong; 4 an artifact is damaged, unfinished or in use; 5 the disk is full, or the
hub took no upload; 130 ended by Ctrl-C. torchrun and accelerate pass none of these on, and exit with 1 when they are
signalled themselves: read stopped.json and failed.json in the artifact's folder"""
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
    "launch.nodes=1",
    "launch.processes_per_node=1",
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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked workers would deadlock on its threads
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # longer spins made steps 5 x slower on busy cores
    # oneDNN keeps 1,024 compiled products, hundreds of MB where lengths vary. Three paired runs of 150 train steps took
    # the same time with 128 (medians 28.0 and 28.3 s) and 250 MB less.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # PyTorch keeps 1,024 of them beside that, of every kind, to the end of the process. Three paired runs of 120 train
    # steps on one thread, few shapes among them new: 32 take 120 instead of 118 ms a step (medians) and 180 MB less.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = parse(words)
        progress.configure(quiet=arguments.quiet or getattr(arguments, "json", False))
        config = load_config(arguments)
        if COMMANDS[arguments.command].stops_well:
            stopping.install(stopping.obeyed(config.launch.stop_signal), arguments.stop_after)
        module, _, function = COMMANDS[arguments.command].call.partition(":")
        getattr(importlib.import_module(module), function)(config, arguments)
    except Stopped as stop:
        say(f"stopped: {stop}. The same command goes on from here.")
        return stop.exit_code
    except DsparkError as error:
        say(str(error), error=True)
        return error.exit_code
    except OSError as error:
        full = storage_error(Path(error.filename or "the disk"), error)
        if full is None:
            raise
        say(str(full), error=True)
        return full.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


# ------------------------------------------------------------------------------------------------ words


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command first, then its own arguments and overrides in any order."""
    if not words or words[0] in ("-h", "--help"):
        _overview().print_help()
        raise SystemExit(0)
    if words[0] == "--version":
        say(__version__)
        raise SystemExit(0)
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        raise ConfigError(f"command {name!r}: unknown; {hint}")
    arguments = _command_parser(name, COMMANDS[name]).parse_intermixed_args(list(words[1:]))
    arguments.command = name
    return arguments


def _overview() -> argparse.ArgumentParser:
    def table(commands: dict[str, Command]) -> str:
        return "\n".join(f"  {name:10s} {command.help}" for name, command in commands.items())

    return argparse.ArgumentParser(
        prog="dspark",
        usage="dspark COMMAND -c FILE [section.key=value ...]",
        description="Train, calibrate, measure and export drafters for speculative decoding.",
        epilog=f"stages:\n{table(STAGE_COMMANDS)}\n\nother commands:\n{table(OTHER_COMMANDS)}\n\n"
        f"`dspark COMMAND --help` shows a command's options.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _command_parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"dspark {name}",
        description=command.help,
        epilog=f"example: {command.example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="YAML run configuration")
    for flag, text in command.arguments:
        option, _, metavar = flag.partition("=")
        if metavar:
            parser.add_argument(option, metavar=metavar, type=NUMBERS.get(metavar, str), help=text)
        elif option.startswith("--"):
            parser.add_argument(option, action="store_true", help=text)
        else:
            parser.add_argument(option, help=text)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change the configuration")
    parser.add_argument("--debug", action="store_true", help="small one-device run: prints the overrides it applies")
    if name in STAGES and STAGES[name].ranks == "shards":
        parser.add_argument("--array", metavar="I/N", help="the I-th of N shares of the work (Slurm array task)")
    if command.stops_well:
        parser.add_argument(
            "--stop-after", metavar="SECONDS", type=NUMBERS["SECONDS"], help="stop cleanly after this long"
        )
    parser.add_argument("--quiet", action="store_true", help="only warnings and results on the console")
    return parser


# ------------------------------------------------------------------------------------------------ configuration


def load_config(arguments: argparse.Namespace) -> Config:
    """The file, the debug set when asked for (printed), then the user's own overrides."""
    if share := getattr(arguments, "array", None):
        _check_array(share)
        os.environ["DSPARK_ARRAY"] = share
    debug: list[str] = []
    if arguments.debug:
        base = configuration.load(arguments.config, arguments.overrides)
        debug = [*DEBUG_OVERRIDES, *_debug_limits(base), f"experiment={base.experiment}-debug"]
        say("debug overrides: " + " ".join(debug))
    config = configuration.load(arguments.config, [*debug, *arguments.overrides])
    _check_work_dir(config.work_dir)
    return config


def _check_work_dir(folder: Path) -> None:
    """A path that cannot be a folder is refused before anything looks for artifacts below it."""
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"work_dir: {folder} cannot be a folder: {nearest} is a file")
    if not os.access(nearest, os.W_OK) or nearest.is_relative_to("/proc") or nearest.is_relative_to("/sys"):
        raise ConfigError(f"work_dir: {folder} cannot be written below {nearest}")


def _debug_limits(config: Config) -> list[str]:
    return [
        f"data.sources.{index}.limit={min(source.limit or DEBUG_SOURCE_LIMIT, DEBUG_SOURCE_LIMIT)}"
        for index, source in enumerate(config.data.sources)
    ]


def _check_array(text: str) -> None:
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(f"--array {text}: write I/N with 0 <= I < N, e.g. 0/4")


if __name__ == "__main__":
    sys.exit(main())
