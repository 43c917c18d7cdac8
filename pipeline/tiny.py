"""A tiny Qwen3-architecture target made on the spot: tokenizer, chat template, and a few seconds of training.

Used by `target.tiny`, so that the whole chain runs on a laptop without a network. It is a plumbing target: it speaks
the demo corpus's language badly, but it has a spare embedding row for the mask token, a template with turns, and a
distribution sharp enough that a drafter can learn something.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pipeline.artifact import atomic_path
from pipeline.config import Config, TinyTarget
from pipeline.identity import target_folder
from pipeline.preflight.facts import TINY_SPARE_ROWS, tiny_shape
from pipeline.progress import progress, say

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_ROWS, _SEQUENCE, _BATCH = 1000, 96, 8


def make_tiny_target(config: Config) -> Path:
    """Make the folder unless it exists; published whole, so a killed attempt leaves nothing behind."""
    folder = Path(target_folder(config))
    if folder.is_dir():
        return folder
    assert config.target.tiny is not None
    say(f"making the tiny target {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder, keep_existing=True) as temporary:
        temporary.mkdir()
        _write(config.target.tiny, temporary)
    return folder


def _chats(seed: int = 0) -> list[list[dict[str, str]]]:
    """Seeded arithmetic and counting dialogues: enough regularity for a few hundred steps to pick up."""
    rng = random.Random(seed)
    names = ["Ana", "Ben", "Cleo", "Dan", "Eve", "Finn"]
    things = ["apples", "books", "coins", "eggs", "pens", "shells"]
    chats = []
    for _ in range(_ROWS):
        a, b = rng.randint(2, 40), rng.randint(2, 40)
        name, thing = rng.choice(names), rng.choice(things)
        kind = rng.randrange(3)
        if kind == 0:
            question = f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?"
            answer = f"{name} starts with {a} {thing}. After buying {b} more, {name} has {a} + {b} = {a + b} {thing}."
        elif kind == 1:
            question = f"Count from {a} to {a + 5}."
            answer = ", ".join(str(a + step) for step in range(6)) + "."
        else:
            question = f"Write a Python function that adds {a}."
            answer = f"def add_{a}(x):\n    return x + {a}\n\nThe function adds {a} to x and returns the sum."
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return chats


def _write(tiny: TinyTarget, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    chats = _chats()
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        (message["content"] for chat in chats for message in chat),
        trainers.BpeTrainer(
            vocab_size=tiny.vocabulary - TINY_SPARE_ROWS,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], dtype="float32", **tiny_shape(tiny), tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    stream = torch.tensor([token for text in texts for token in tokenizer(text, add_special_tokens=False).input_ids])
    _train(model, stream, tiny.train_steps)
    model.config.save_pretrained(folder)  # not model.save_pretrained: that imports deepspeed where it is installed
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def _train(model: object, stream: object, steps: int) -> None:
    """A plain language-model loop over random windows of the token stream."""
    import torch

    assert isinstance(model, torch.nn.Module) and isinstance(stream, torch.Tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    with progress(steps, what="tiny target", unit="steps") as bar:
        for _ in range(steps):
            starts = torch.randint(0, len(stream) - _SEQUENCE, (_BATCH,), generator=generator)
            ids = torch.stack([stream[start : start + _SEQUENCE] for start in starts.tolist()])
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.advance(1, loss=float(loss.detach()))
