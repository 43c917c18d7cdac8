"""Files of a published folder: safetensors (split above a size), tokenizer, and the folder's own hash list.

`export_manifest.json` lists every other file with its size and SHA-256. A folder that carries one is checked against it
whenever it is read, so a checkpoint that was cut, renamed, cast or edited after it was published says so.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipeline.artifact import read_json, sha256_file, write_json
from pipeline.errors import ArtifactError, ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HASHES = "export_manifest.json"
# Edited on the hub by people and by its bots; describes, decides nothing.
_FREE = ("README.md", ".gitattributes")

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


# -------------------------------------------------------------------------------------------------- tensors


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], *, max_shard_bytes: int) -> list[str]:
    """Write `tensors` as one file, or as numbered ones with an index when they exceed `max_shard_bytes`.

    Returns the names of the files written. A tensor is never cut: one larger than the limit has a file of its own.
    """
    groups: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensors[name].detach().cpu().contiguous()
        filled += size
    if len(groups) == 1:
        save_file(groups[0], folder / WEIGHTS, metadata={"format": "pt"})
        return [WEIGHTS]
    places, total = {}, 0
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(group, file))
        total += sum(tensor.numel() * tensor.element_size() for tensor in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sorted({*places.values(), INDEX})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index when it has one.

    Raises ArtifactError when there are none, or when files and index disagree (a file missing, or one too many).
    """
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if (folder / INDEX).exists():
        listed = {folder / name for name in _weight_map(folder).values()}
        missing, extra = listed - set(found), set(found) - listed
        if missing or extra:
            raise ArtifactError(
                f"{folder / INDEX}: files and index disagree; missing {sorted(path.name for path in missing)}, "
                f"not listed {sorted(path.name for path in extra)}"
            )
    elif len(found) > 1 and (folder / WEIGHTS) not in found:
        raise ArtifactError(f"{folder}: several weight files and no {INDEX}")
    if not found:
        raise ArtifactError(f"{folder}: no *.safetensors; is this a checkpoint folder?")
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index. Raises ArtifactError when it says neither."""
    index = read_json(folder / INDEX, ours=False)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ArtifactError(f"{folder / INDEX}: has no weight_map of tensor names to file names")
    return places


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder. Raises ArtifactError on damage, and on one stored twice or misplaced."""
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in tensors:
                        raise ArtifactError(f"{path}: {name} is also in {places[name]}")
                    tensors[name], places[name] = file.get_tensor(name), path.name
        except (SafetensorError, OSError, ValueError) as error:
            raise ArtifactError(f"{path}: not a readable safetensors file ({error}); it was cut or damaged") from error
    if (folder / INDEX).exists():
        listed = _weight_map(folder)
        if listed != places:
            wrong = sorted(name for name in {*listed, *places} if listed.get(name) != places.get(name))
            raise ArtifactError(f"{folder / INDEX}: the index does not describe the files: {', '.join(wrong)}")
    return tensors


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype as written, shape) from a safetensors header alone; no tensor is read."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"}


# ------------------------------------------------------------------------------------------------ tokenizer


def copy_tokenizer(target: str | Path, folder: Path, *, revision: str | None, chat_template: str | None) -> list[str]:
    """Put the target's tokenizer files and chat template into `folder`; returns their names.

    Args:
        target: local folder, or a hub id (read through the local hub cache where possible).
        chat_template: path of the Jinja file that replaced the tokenizer's template in training, if one did: it is what
            must be served, so it is what is exported.
    Raises:
        ConfigError: when the target has no tokenizer file.
    """
    source = Path(target)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(str(target), revision=revision, allow_patterns=list(TOKENIZER_FILES)))
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not any(name.startswith(("tokenizer.", "vocab.")) for name in names):
        raise ConfigError(f"target.model: {target} holds no tokenizer ({', '.join(TOKENIZER_FILES[:2])} …)")
    for name in names:
        shutil.copyfile(source / name, folder / name)
    if chat_template is not None:
        shutil.copyfile(chat_template, folder / "chat_template.jinja")
        names = sorted({*names, "chat_template.jinja"})
    return names


# ------------------------------------------------------------------------------------------------ hash list


def write_hashes(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write `export_manifest.json`: size and SHA-256 of every other file, and `facts`."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != HASHES
    }
    manifest = {"files": files, **facts}
    write_json(folder / HASHES, manifest)
    shutil.rmtree(folder / ".tmp", ignore_errors=True)
    return manifest


def hash_problems(folder: Path, *, everything: bool = False) -> list[str]:
    """What no longer is as it was published; empty when nothing is, or when the folder carries no hash list.

    The card may be edited freely; `everything` checks it too. Weight files that are not on the list count as well.
    """
    if not (folder / HASHES).exists():
        return []
    manifest = read_json(folder / HASHES, ours=False)
    problems = []
    for name, fact in manifest["files"].items():
        path = folder / name
        if name in _FREE and not everything:
            continue
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif path.stat().st_size != fact["bytes"]:
            problems.append(f"{path}: {path.stat().st_size} bytes, published with {fact['bytes']}")
        elif sha256_file(path) != fact["sha256"]:
            problems.append(f"{path}: content differs from what was published")
    extra = {path.name for path in folder.glob("*.safetensors")} - set(manifest["files"])
    return [*problems, *(f"{folder / name}: not part of the export" for name in sorted(extra))]


def check_hashes(folder: Path) -> None:
    """Raises ArtifactError when a published folder was changed after its export."""
    problems = hash_problems(folder)
    if problems:
        hint = f"export it again; after an edit on purpose, remove {folder / HASHES}"
        raise ArtifactError("\n".join([*problems, hint]))
