"""The sections of a report, each from the artifacts it is about. Where one is not finished, the section says so."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.decoding.markdown import LAB_HEADER, PARTS, lab_rows, number, tau_text
from pipeline.operations.report.page import Figure, Fold, Note, Table
from pipeline.operations.report.story import Parts, Story, flat, reasons
from pipeline.training import plots

Record = dict[str, Any]


def results(story: Story) -> Parts:
    """Accepted length with intervals beside prompt lookup, by prompt set, domain and temperature."""
    if story.manifest("evaluate") is None:
        yield story.missing("evaluate")
        return
    records = story.read("evaluate", "report.json")["records"]
    lookup = {_key(record): record for record in records if record["drafter"] == "prompt-lookup"}
    rows = []
    for record in _drafted(records):
        beside = lookup.get(_key(record))
        rows.append([
            *_key(record), str(record["num_prompts"]), tau_text(record), tau_text(beside) if beside else "–",
            number(record["tau_draft_only"]), number(record.get("tokens_per_second"), 1),
            number(record.get("vanilla_tokens_per_second"), 1), number(record.get("speedup")),
        ])  # fmt: skip
    header = ["prompts", "domain", "T", "n", "tau [95 %]", "prompt lookup [95 %]", "drafts only"]
    yield Table([*header, "tokens/s", "without drafter", "times faster"], rows, "Accepted length and speed")
    yield from story.figures("evaluate", {"tau": "Accepted length with 95 % intervals"})
    for record in _drafted(records):
        if (found := record.get("lossless")) and record["domain"] is None:
            faults = len(found["faults"])
            yield Note(
                f"{record['prompts']}, T = 0: {found['equal']} of {found['compared']} outputs equal plain decoding, "
                f"{len(found['near_ties'])} part at a near-tie, {faults} elsewhere.",
                "warning" if faults else "note",
            )


def trained(story: Story) -> Parts:
    """Target, data with what was left out, and the recipe."""
    rows = []
    for stage in ("data", "answers", "tokens", "targets", "train"):
        if (manifest := story.manifest(stage)) is None:
            if stage in story.chain:
                yield story.missing(stage)
            continue
        rows.append([stage, *_counts(stage, manifest), reasons(manifest["skipped"])])
    if rows:
        yield Table(["stage", "rows", "tokens", "supervised", "details", "left out"], rows, "Data")
    facts = [("target", story.config.target.model or "tiny")]
    if (manifest := story.manifest("train")) is not None:
        best = manifest.get("best") or {}
        facts += [("steps", f"{manifest['steps']:,}"), *flat(manifest["draft"], "draft")]
        facts += [(f"best held-out {key}", number(best[key], 4 if key == "loss" else 0)) for key in sorted(best)]
    yield Table(["what", "value"], facts, "Drafter")
    request = story.chain["train"].request["config"]
    yield Table(["setting", "value"], [*flat(request["train"], "train"), *flat({"seed": request["seed"]})], "Recipe")


def _counts(stage: str, manifest: dict[str, Any]) -> list[str]:
    """Rows, tokens, supervised tokens and details of one stage; a dash where the stage does not count them."""
    if stage == "data":
        rows, kept = manifest["rows"], ("in", "train", "calibration", "evaluation")
        return [f"{rows['out']:,}", "–", "–", ", ".join(f"{name} {rows[name]:,}" for name in kept)]
    if stage == "answers":
        return [f"{manifest['rows']:,}", "–", "–", reasons(manifest["finish_reasons"])]
    if stage == "train":
        held_out = manifest.get("validation_rows")
        return [f"{manifest['rows']:,}", "–", "–", f"held out {held_out:,}" if held_out is not None else "–"]
    facts = manifest if stage == "tokens" else manifest["targets"]
    counts = [f"{facts[key]:,}" if key in facts else "–" for key in ("samples", "tokens", "supervised")]
    return [*counts, f"{manifest['conversations']:,} conversations" if stage == "tokens" else "–"]


def acceptance(story: Story) -> Parts:
    if story.manifest("evaluate") is None:
        yield story.missing("evaluate")
        return
    report = story.read("evaluate", "report.json")
    yield from story.figures("evaluate", {"acceptance": "Conditional acceptance by slot, pooled prompts"})
    slots = [str(slot) for slot in range(1, report["block_size"] + 1)]
    for name, title in (
        ("conditional_acceptance", "P(slot k accepted | slots before accepted)"),
        ("prefix_acceptance", "P(accepted >= k)"),
        ("teacher_forced_acceptance", "Mean acceptance, teacher-forced"),
    ):
        rows = [
            [*_key(record), record["drafter"], *(number(value) for value in record[name])]
            for record in report["records"]
            if any(record.get(f"{name}_n", ()))
        ]
        if rows:
            yield Table(["prompts", "domain", "T", "drafter", *slots], rows, title)


def calibration(story: Story) -> Parts:
    manifest = story.manifest("calibrate")
    if manifest is None:
        yield story.missing("calibrate")
        return
    if not manifest["calibrated"]:
        yield Note("This drafter has no confidence head: there is nothing to calibrate.")
        return
    rows, warnings = [], []
    for name in manifest["ece"]:
        found = story.read("calibrate", f"sts-{name}.json")
        for what, values in (
            ("ECE before", found["ece_before"]),
            ("ECE after", found["ece_after"]),
            ("STS temperature", found["temperatures"]),
        ):
            mean = manifest["ece"][name].get(what.removeprefix("ECE ")) if what.startswith("ECE") else None
            rows.append([name, what, number(mean, 4), *(number(value, 4) for value in values)])
        if found["ece_change_interval"] is not None:
            low, high = found["ece_change_interval"]
            over = f"95 % over {found['report_prompts']} prompts drawn again"
            warnings.append(Note(f"{name}: calibration changes mean ECE by {low:+.4f} ... {high:+.4f} ({over})."))
        warnings += [Note(f"{name}: worse on {text}", "warning") for text in found["warnings"]]
    slots = [str(slot) for slot in range(1, len(rows[0]) - 2)]
    yield Table(["served at", "", "mean", *slots], rows, "Calibration of survival by slot, on report prompts")
    yield from warnings
    captions = {f"reliability-{name}": f"Reliability at {name}, before and after STS" for name in manifest["ece"]}
    yield from story.figures("calibrate", captions)


def scheduling(story: Story) -> Parts:
    """Threshold sweep and scheduler lab."""
    if story.manifest("evaluate") is None:
        yield story.missing("evaluate")
        return
    lab = story.read("evaluate", "lab.json")
    if not lab["temperatures"]:
        yield Note("No recorded rounds with confidences: nothing to schedule by.", "missing")
        return
    yield Note(f"Recorded rounds replayed over the SPS table ({lab['sps_source']}).")
    captions = {f"lab-{name}": f"Scheduler lab at {name}" for name in lab["temperatures"]}
    yield from story.figures("evaluate", {"thresholds": "Threshold sweep", **captions})
    for name, section in lab["temperatures"].items():
        yield Table(LAB_HEADER, lab_rows(section), f"{name}, {section['rounds']:,} recorded rounds")
        for text in section["shortfalls"]:
            yield Note(f"{name}: {text}")


def speed(story: Story) -> Parts:
    """Where the time goes, the SPS table, and what each stage cost."""
    if story.manifest("evaluate") is None:
        yield story.missing("evaluate")
    else:
        rows = []
        for record in _drafted(story.read("evaluate", "report.json")["records"]):
            if record.get("latency_seconds") is not None:
                parts = [number(record["seconds"].get(part), 1) for part in PARTS]
                times = [1e3 * record["latency_seconds"], 1e3 * record["latency_from_parts_seconds"]]
                share = number(100 * record["overhead_share"], 1)
                rows.append(
                    [record["prompts"], f"{record['temperature']:g}", *parts, *(number(t) for t in times), share]
                )
        header = ["prompts", "T", *(f"{part} s" for part in PARTS), "ms per token", "from parts", "overhead %"]
        yield Table(header, rows, "Where the rounds' wall clock goes")
    if story.manifest("profile") is None:
        yield story.missing("profile")
        return
    sps = story.read("profile", "sps.json")
    yield from story.figures("profile", {"sps": "Steps per second by batch tokens"})
    pairs = zip(sps["sample_batch_tokens"], sps["sample_steps_per_sec"], strict=True)
    shown = [[f"{size:,}", f"{rate:,.2f}"] for size, rate in pairs if size & (size - 1) == 0]
    yield Table(["batch tokens", "steps per second"], shown, f"SPS, {sps['source']}")


def cache(story: Story) -> Parts:
    """Bytes of the target cache, and what codecs cost where a study was made."""
    manifest = story.manifest("targets")
    if manifest is None:
        yield story.missing("targets")
        return
    facts = manifest["targets"]
    rows = [(name, f"{facts[name]:,}") for name in ("samples", "tokens", "bytes") if name in facts]
    if facts.get("tokens"):
        rows.append(("bytes per token", f"{facts['bytes'] / facts['tokens']:,.0f}"))
    kept = ("taps", "channel_rms", "layers", "logits", "topk", "positions", "hidden_size", "vocab_size", "dtype")
    yield Table(
        ["what", "value"], [*rows, *flat({name: facts[name] for name in kept if name in facts})], "Target cache"
    )
    yield from story.figures("targets", {"codec": "Relative error of the taps after the codec, by layer"})
    study = story.config.work_dir / "studies" / f"codecs-{story.chain['train'].fingerprint}.json"
    if not study.exists():
        yield Note("No codec study of this drafter; `dspark codecs` makes one.", "missing")
        return
    yield Figure.of(study.with_suffix(".png"), "Codec errors, and what they cost against bf16")


TRAINING = {
    "loss": "Loss and its terms",
    "acceptance_by_slot": "Acceptance by slot over steps",
    "acceptance": "Acceptance over steps",
    "tau": "Expected accepted length over steps",
    "learning_rate": "Learning rate and gradient norm",
    "throughput": "Throughput: tokens per second, seconds per step",
}


def curves(story: Story) -> Parts:
    """Training curves: those the run left, else drawn from a journal that may still be growing."""
    run = story.chain["train"].path
    if (run / "plots").exists():
        yield from story.figures("train", TRAINING)
        return
    with tempfile.TemporaryDirectory() as temporary:
        drawn = {path.stem: path for path in plots.draw(run, Path(temporary))}
        if not drawn:
            yield story.missing("train") if story.manifest("train") is None else Note("Nothing was trained.", "missing")
            return
        if story.manifest("train") is None:
            yield story.missing("train")
        for name, caption in TRAINING.items():
            if name in drawn:
                yield Figure.of(drawn[name], caption)


def definitions(story: Story) -> Parts:
    if story.manifest("evaluate") is None:
        yield story.missing("evaluate")
        return
    report = story.read("evaluate", "report.json")
    yield Table(["name", "meaning"], list(report["definitions"].items()))
    yield Fold("The first prompt, as rendered", report["first_prompt"])


def _drafted(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["drafter"] != "prompt-lookup"]


def _key(record: Record) -> tuple[str, str, str]:
    return record["prompts"], record["domain"] or "all", f"{record['temperature']:g}"
