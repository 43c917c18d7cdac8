"""`dspark push REPOSITORY`: upload one exported layout to the Hugging Face hub.

    HF_TOKEN=... dspark push owner/name -c FILE --layout=speculators --private

Only a finished export whose files still match their hashes is uploaded, in one commit. HF_ENDPOINT names another
server.
"""

from __future__ import annotations

import argparse

from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError
from pipeline.layouts.hub import push as upload
from pipeline.progress import say


def push(config: Config, arguments: argparse.Namespace) -> None:
    """Upload `--layout` (default: the only one exported) of this configuration's export.

    Raises ConfigError when the layout is not among `export.layouts`, ArtifactError when the export is not finished.
    """
    layouts = config.export.layouts
    layout = arguments.layout or (layouts[0] if len(layouts) == 1 else None)
    if layout not in layouts:
        raise ConfigError(f"--layout {layout}: name one of export.layouts: {', '.join(layouts)}")
    artifact = resolve(config)["export"]
    if not artifact.complete:
        raise ArtifactError(f"{artifact.path}: not finished; run `dspark export` first")
    address = upload(
        artifact.path / layout,
        arguments.repository,
        private=arguments.private,
        revision=arguments.revision,
        message=f"{config.experiment}: {layout} export {artifact.fingerprint}",
    )
    say(f"push: {address}", result=True)
