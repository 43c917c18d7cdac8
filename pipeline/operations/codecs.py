"""`dspark codecs`: what each tap codec costs in accuracy, on the configured target and its trained drafter.

Prompts of the evaluation split are answered by the target once; then every codec is measured on the same answers and
prompts. Lossy codecs belong into a configuration only after this table was read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from pipeline.artifact import write_json
from pipeline.benchmarks import HELDOUT
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.corpus.prompts import choose, load_prompts
from pipeline.decoding import codec_study as study
from pipeline.decoding.playing import Player
from pipeline.decoding.plots import codec_plot
from pipeline.errors import ArtifactError, ConfigError
from pipeline.identity import target_folder
from pipeline.progress import progress, say
from pipeline.shards.layout import Spec
from pipeline.tracking import attach


def codecs(config: Config, arguments: argparse.Namespace) -> None:
    """Write `<work_dir>/studies/codecs-<drafter>.json` with its plot, print it, and put both on the parent run.

    Raises ArtifactError when the drafter is not trained yet, ConfigError when it reads no taps.
    """
    artifacts = resolve(config)
    for name in ("data", "train"):
        if not artifacts[name].complete:
            raise ArtifactError(f"codecs: the {name} stage is not finished; `dspark run` first")
    count = arguments.prompts or 32
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    player = Player.load(
        config, target_folder(config), dtype=config.evaluate.dtype, drafter=artifacts["train"].path / "draft"
    )
    if not player.drafter.config.uses_taps:
        raise ConfigError("codecs: this drafter was trained without taps; there is nothing to lose")
    prompts = choose(load_prompts(HELDOUT, data=artifacts["data"]), count)
    options: dict[str, Any] = {
        "temperature": temperature, "max_new_tokens": config.evaluate.max_new_tokens,
        "batch_size": config.evaluate.batch_size,
    }  # fmt: skip
    played = [item for item in player.play(prompts, drafted=False, **options) if item.answers and item.answers[0].ids]
    found = measure_all(player, played, options, resamples=config.evaluate.bootstrap, seed=config.seed)
    report = {
        "prompts": len(played),
        "temperature": temperature,
        "fingerprint": artifacts["train"].fingerprint,
        **found,
    }
    path = config.work_dir / "studies" / f"codecs-{artifacts['train'].fingerprint}.json"
    write_json(path, report)
    plot = codec_plot(report["codecs"], report["tapped_layers"], path.with_suffix(".png"))
    attach(config, [path, plot], "codecs")
    tell(report, path)


def measure_all(
    player: Player, played: list[Any], options: dict[str, Any], *, resamples: int, seed: int
) -> dict[str, Any]:
    """Everything of the study as plain data."""
    taps_NLD = torch.cat(
        [player.target.forward(torch.tensor([[*i.asked[0], *i.answers[0].ids]])).taps_BTLD[0] for i in played]
    )
    vocab_size, width = player.target.vocab_size, player.target.hidden_size
    columns = {}
    with progress(len(study.CODECS) + 1, what="codecs", unit="codecs") as bar:
        for codec in (*study.CODECS, study.ZEROED):
            columns[codec] = study.measure(player, study.coder(codec, taps_NLD, vocab_size), played, **options)
            bar.advance()
    table = study.compare(columns, reference="bf16", resamples=resamples, seed=seed)
    for codec in study.CODECS:
        spec: Spec = study.spec_of(codec, num_taps=taps_NLD.shape[1], hidden_size=width, vocab_size=vocab_size)
        table[codec]["tap_bytes_per_token"] = spec.bytes_per_token(0.0)
        table[codec]["relative_error_per_layer"] = study.tap_errors(taps_NLD, codec, vocab_size)
    kept = {str(n): facts for n, facts in study.surrogate_errors(player, played).items()}
    return {"codecs": table, "c_star_error_by_topk": kept, "tapped_layers": list(player.target.layers)}


def tell(report: dict[str, Any], path: Path) -> None:
    """Print the tables."""
    say(f"codecs on {report['prompts']} held-out prompts at T = {report['temperature']:g}; changes against bf16, paired"
        " by prompt, 95 % intervals")  # fmt: skip
    say(f"  {'codec':9s} {'B/token':>8s} {'error':>6s} {'acceptance':>10s} {'change':>26s} {'tau':>6s} {'change':>26s}")
    for codec, facts in report["codecs"].items():
        errors = facts.get("relative_error_per_layer")
        shown = f"{facts['tap_bytes_per_token']:8,.0f} {sum(errors) / len(errors):6.3f}" if errors else " " * 15
        say(f"  {codec:9s} {shown} {facts['acceptance']:10.4f} {_interval(facts['acceptance_change'])} "
            f"{facts['tau']:6.3f} {_interval(facts['tau_change'])}")  # fmt: skip
    say("error of c* under topk against the exact distribution (its bound is the tail mass)")
    for count, facts in report["c_star_error_by_topk"].items():
        say(f"  top-{count:4s} largest {facts['largest']:.5f}, mean {facts['mean']:.6f}, bias {facts['bias']:+.6f}, "
            f"mean tail mass {facts['mean_tail']:.5f}")  # fmt: skip
    say(f"written to {path}")


def _interval(facts: dict[str, Any]) -> str:
    low, high = facts["interval"] or (float("nan"), float("nan"))
    return f"{facts['change']:+.4f} [{low:+.4f}, {high:+.4f}]"
