"""A small byte-level tokenizer with a ChatML template and switches for the traps real templates set."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<pad>"]
_HEAD = "'<|im_start|>' + message['role'] + '\\n'"
# A closing brace of a Jinja block and one of Python's format are the same character: parts are put together by hand.
_TURN = "{{ " + _HEAD + " + message['content'] + '<|im_end|>\\n' }}"
_GENERATION_TURN = (
    "{% if message['role'] == 'assistant' %}{{ " + _HEAD + " }}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{% else %}" + _TURN + "{% endif %}"
)
_THINK_TURN = (  # as Qwen3: history loses its think blocks, and the generation prompt brings an empty one
    "{% set text = message['content'] %}{% if message['role'] == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ " + _HEAD + " + text + '<|im_end|>\\n' }}"
)
_ALTERNATE = (
    "{% for message in messages %}{% if message['role'] == 'user' and not loop.first "
    "and messages[loop.index0 - 1]['role'] == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}"
)


def template_text(
    *, bos: bool = False, empty_think: str = "", generation: bool = False, alternate: bool = False, think: bool = False
) -> str:
    """`empty_think`: '' never, 'prompt' only in the generation prompt, 'unless_on' there unless enable_thinking."""
    turn = _GENERATION_TURN if generation else _THINK_TURN if think else _TURN
    prompt = "{{ '<|im_start|>assistant\\n' }}"
    block = "{{ '<think>\\n\\n</think>\\n\\n' }}"
    if empty_think == "prompt":
        prompt += block
    elif empty_think == "unless_on":
        prompt += "{% if enable_thinking is defined and not enable_thinking %}" + block + "{% endif %}"
    return (
        ("{{ bos_token }}" if bos else "")
        + (_ALTERNATE if alternate else "")
        + "{% for message in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )  # fmt: skip


def make_tokenizer(folder: Path, template: str, *, add_bos: bool = False) -> Path:
    """Write the tokenizer; `add_bos` makes it put <bos> before whatever it tokenizes by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<|im_end|>", pad_token="<pad>",
        additional_special_tokens=SPECIAL[1:5],
    )  # fmt: skip
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder
