"""Refusals: one clear message, exit code 2, before torch is imported or weights are read."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.__main__ import DEBUG_OVERRIDES, main
from pipeline.chain import STAGES
from pipeline.commands import COMMANDS, NUMBERS
from pipeline.config import load
from pipeline.errors import DsparkError

ROOT = Path(__file__).resolve().parents[2]
DEBUG = str(ROOT / "configs/debug.yaml")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    return capsys.readouterr().err


def test_a_typo_names_the_nearest_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean train.learning_rate?" in refused(capsys, "run", "-c", DEBUG, "train.learnin_rate=1")
    assert "did you mean targets?" in refused(capsys, "run", "-c", DEBUG, "target_s.taps=int8")


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "absent.jsonl")
    assert "cannot be read" in refused(capsys, "run", "-c", str(tmp_path / "absent.yaml"))
    words = ["run", "-c", DEBUG, f"work_dir={tmp_path}", f"data.sources=[{{path: {missing}}}]"]
    assert f"{missing}: no such file" in refused(capsys, *words)


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A target that is only described: reading its weights would fail."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 6, "vocab_size": 64, "eos_token_id": 7}))
    (folder / "model.safetensors").write_bytes(b"not weights")
    return folder


@pytest.mark.parametrize(
    ("override", "why"),
    [("draft.mask_token_id=7", "eos_token"), ("targets.layers=[1,5]", "last layer"), ("targets.layers=[9]", "outside")],
)
def test_what_the_target_cannot_serve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, described: Path, override: str, why: str
) -> None:
    words = ["run", "-c", DEBUG, f"work_dir={tmp_path}", "target.tiny=null", f"target.model={described}"]
    assert why in refused(capsys, *words, "draft.mask_token_id=63", override)
    assert not (tmp_path / "data").exists()


def test_refusals_import_no_torch(tmp_path: Path) -> None:
    """Also a mask token that the tiny target's tokenizer uses."""
    program = (
        "import sys\nfrom pipeline.__main__ import main\n"
        f"assert main(['run', '-c', {DEBUG!r}, 'train.stepz=1']) == 2\n"
        f"assert main(['run', '-c', {DEBUG!r}, 'work_dir={tmp_path}', 'draft.mask_token_id=3']) == 2\n"
        "heavy = {'torch', 'transformers', 'mlflow', 'accelerate', 'deepspeed', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_commands_suggest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean train?" in refused(capsys, "trian", "-c", DEBUG)


def test_bad_shares_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "write I/N" in refused(capsys, "data", "-c", DEBUG, "--array", "3/3")


def offered(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_would_have_no_effect_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Array tasks share stages made of shards; a time limit is for what looks for one between its units of work."""
    shown = offered(name, capsys)
    for option, value, useful in (
        ("--array", "0/2", name in STAGES and STAGES[name].ranks == "shards"),
        ("--stop-after", "5", COMMANDS[name].stops_well),
    ):
        assert (option in shown) == useful
        if not useful:
            with pytest.raises(SystemExit) as ending:
                main([name, "-c", DEBUG, option, value])
            assert ending.value.code == 2 and f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "soon"])
def test_a_time_limit_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["run", "-c", DEBUG, f"--stop-after={seconds}"])
    assert ending.value.code == 2
    assert f"--stop-after: a number of seconds is expected, found {seconds!r}" in capsys.readouterr().err


NUMBERED = [
    (name, flag.partition("=")[0], metavar)
    for name, command in COMMANDS.items()
    for flag, _ in command.arguments
    if (metavar := flag.partition("=")[2]) in NUMBERS
]


@pytest.mark.parametrize(("name", "option", "metavar"), NUMBERED)
def test_options_that_are_no_such_number_are_refused(
    name: str, option: str, metavar: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"N": ["0", "-1", "1.5", "nan", "x"], "X": ["0", "-1", "nan", "inf", "x"], "SHARE": ["0", "1.5", "x"]}
    for value in wrong.get(metavar, ["-1", "nan", "inf", "x"]):
        with pytest.raises(SystemExit) as ending:
            main([name, "-c", DEBUG, f"{option}={value}"])
        assert ending.value.code == 2 and f"{option}: " in capsys.readouterr().err
    assert len(NUMBERED) >= 10


def test_debug_prints_what_it_overrides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", "-c", DEBUG, "--debug", f"work_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out.splitlines()[0]
    assert all(item in shown for item in DEBUG_OVERRIDES)
    load(DEBUG, DEBUG_OVERRIDES)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([name, "--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert f"example: dspark {name}" in shown and "exit codes: 0 done" in shown and "--quiet" in shown


def test_a_work_dir_that_cannot_be_a_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(capsys, "verify", "-c", DEBUG, f"work_dir={tmp_path / 'file'}")
    assert "cannot be written" in refused(capsys, "data", "-c", DEBUG, "work_dir=/proc/x")


def test_files_that_are_no_configuration_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(capsys, "status", "-c", str(path))
    path.write_text("experiment: a\nexperiment: b\n")
    assert "given twice" in refused(capsys, "status", "-c", str(path))


def test_the_overview_names_every_command_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ending.value.code == 0 and all(f"\n  {name} " in shown for name in COMMANDS)
    codes = {kind.exit_code for kind in (DsparkError, *DsparkError.__subclasses__())}
    assert codes == {0, 1, 2, 3, 4, 5}
    assert all(f" {code} " in shown.partition("exit codes:")[2].replace("\n", " ") for code in {*codes, 130})


JSON = [name for name, command in COMMANDS.items() if "--json" in dict(command.arguments)]


@pytest.mark.parametrize("name", [name for name in JSON if name not in ("lineage", "compare")])
def test_json_is_all_that_a_script_reads(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also with --debug, which has something to say otherwise. Those that want an artifact have tests of their own."""
    settings = [f"work_dir={tmp_path}", "target.tiny.train_steps=0", "--debug"]
    more = ["--rows", "1000"] if name == "plan" else []
    assert main([name, "-c", DEBUG, *settings, *more, "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert len(JSON) >= 6


def test_ctrl_c_ends_a_command_that_is_no_stage_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr("pipeline.operations.status.status", interrupted)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["status", "-c", DEBUG, f"work_dir={tmp_path}"]) == 130
    finally:
        signal.signal(signal.SIGINT, old)


def test_a_full_disk_is_told_wherever_it_is_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x")

    monkeypatch.setattr("pipeline.operations.status.status", full)
    assert main(["status", "-c", DEBUG, f"work_dir={tmp_path}"]) == 5
    assert "/data/x: cannot be written (No space left on device)" in capsys.readouterr().err
