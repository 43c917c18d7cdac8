"""Published checkpoint layouts: writing a drafter the way an engine reads it, and reading it back.

    facts = publish(folder, drafter, layout="deepspec", frozen=frozen, origin=origin, options=Options())
    drafter, meta = load_published(folder)

    config_json.py DraftConfig -> config.json of each layout; read_config.py the way back
    table.py       the complete tensor list of each layout; tensors.py the drafter's under its names, and back
    mtp.py         heads that live inside the target's checkpoint
    files.py       safetensors files (split above a size), tokenizer files, the folder's own hash list
    publish.py     writes one folder, and gives it its name when check.py has proved it
    load.py        reads any layout, strictly; starting points for training
    sidefiles.py   STS and SPS files in SGLang's schemas
    card.py        README.md; serve.py the command line of each engine
    hub.py         upload of a folder; registry.py what a model registry is told

Which layout can carry which drafter, and which engine serves it, stands in `pipeline.engines`. No transformers here.
"""
