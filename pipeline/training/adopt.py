"""A published checkpoint as the train stage's result: nothing is learned, everything after it works as if it were ours.

    dspark evaluate -c FILE train.published=FOLDER        (after data and profile; calibrate as usual)

Any layout, or an own checkpoint folder. The drafter must fit the target: vocabulary, width, depth, rotary parameters.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pipeline.chain import StageContext
from pipeline.corpus.template import ChatTemplate
from pipeline.draft.description import unfit
from pipeline.draft.io import DESCRIPTION, TENSORS, save_drafter
from pipeline.errors import ConfigError
from pipeline.frozen import text_config
from pipeline.layouts.load import load_any
from pipeline.progress import say
from pipeline.training.recorder import publish


def adopt(context: StageContext) -> None:
    """Write `draft/` from the checkpoint `train.published` names, and the manifest.

    A checkpoint that does not say in which chat mode it was trained is taken to be in this run's.

    Raises ArtifactError for a checkpoint that is damaged or not understood, ConfigError for one of another target.
    """
    config, artifact = context.config, context.artifact
    source = Path(str(config.train.published))
    options: dict[str, Any] = {"revision": config.target.revision, "trust_remote_code": config.target.trust_remote_code}
    target: dict[str, Any] = text_config(str(context.target_path), **options).to_dict()
    drafter, known = load_any(source, target=target)
    if problems := unfit(drafter.config, target):
        raise ConfigError([f"train.published: {source}: {problem}" for problem in problems])
    template = ChatTemplate(str(context.target_path), config.template, **options)
    if "template" not in known:
        say(f"train: {source} does not name its chat mode; this run's is assumed", warning=True)
    theirs, ours = known.get("target"), artifact.request.get("target")
    if theirs is not None and theirs != ours:
        told = f"was trained for a target known as {theirs}, this run's is {ours}; if they differ, it will draft worse"
        say(f"train: {source} {told}", warning=True)
    meta = {"template": template.info(), "stop_ids": sorted(template.stop_ids), **known, "published": str(source)}
    publish(artifact.path / "draft", partial(save_drafter, drafter=drafter, meta=meta))
    say(f"train: {source} taken as it is ({drafter.config.kind}, {drafter.config.block_size} tokens per round)")
    artifact.finish(
        files=[f"draft/{TENSORS}", f"draft/{DESCRIPTION}"], draft=drafter.config.to_dict(), steps=0, rows=0,
        template=meta["template"], coverage=None, published=str(source),
    )  # fmt: skip
