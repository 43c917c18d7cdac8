"""Published checkpoint layouts: writing a drafter the way an engine reads it, and reading it back.

    facts = publish(folder, drafter, frozen=frozen, layout="deepspec", card=..., options=...)
    drafter, meta = load_published(folder)

    support.py     which layout carries which drafter, and which engine serves it
    config_json.py DraftConfig -> config.json of each layout, and back
    tensors.py     the drafter's tensors under each layout's names, and back
    files.py       safetensors files (split above a size), tokenizer files, the folder's own hash list
    publish.py     writes one folder and proves it (check.py)
    load.py        reads any layout, strictly; rope and block-size rules
    sidefiles.py   STS and SPS files in SGLang's schemas
    card.py        README.md: model card and engine command lines
    hub.py         upload of a folder; registry.py: what a model registry is told

Imports no transformers.
"""
