"""The frozen target: taps are what plain hooks see, states are post-norm, padding and packing change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline.decoding.engine import decode
from pipeline.errors import ConfigError
from pipeline.target import Target, check_layers, default_layers, load_frozen

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "intermediate_size": 64, "vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, rope_theta=500_000.0),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=6, final_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0, embedding_multiplier=3.0),
}
LAYERS = (0, 2)


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, model) of a random target; weights large enough that every part matters."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder, model


def ids(rows: int = 3, length: int = 14) -> Tensor:
    return torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(3))


def close(ours: Tensor, theirs: Tensor) -> None:
    """Norm-relative per token and tap, fp32."""
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-9)
    assert error.max() < 5e-6


@pytest.mark.case("CAB-09")
def test_taps_are_raw_layer_outputs_s4(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    seen: dict[int, Tensor] = {}
    decoder = model.get_decoder()
    hooks = [
        decoder.layers[layer].register_forward_hook(
            lambda module, inputs, output, layer=layer: seen.update(
                {layer: output[0] if isinstance(output, tuple) else output}
            )
        )
        for layer in LAYERS
    ]
    with torch.no_grad():
        hidden = model(ids(), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    taps = Target.load(str(folder), layers=LAYERS).forward(ids()).taps_BTLD
    assert taps.shape == (3, 14, 2, 32)
    for index, layer in enumerate(LAYERS):
        close(taps[:, :, index], seen[layer])
        close(taps[:, :, index], hidden[layer + 1])


@pytest.mark.case("CAB-03")
def test_logits_of_the_post_norm_state_are_the_targets_own_s11(saved: tuple[Path, Any]) -> None:
    """Soft-cap, scales and tying included; and through parts read without the decoder layers."""
    folder, model = saved
    target = Target.load(str(folder), layers=LAYERS)
    target.check()
    with torch.no_grad():
        own = model(ids()).logits
    state = target.forward(ids()).last_hidden_BTD
    for frozen in (target.frozen, load_frozen(str(folder))):
        close(frozen.logits(state.flatten(0, 1)), own.flatten(0, 1))
        some = torch.tensor([5, 319, 0])
        close(frozen.logits(state[0], some), own[0][:, some])
        close(frozen.logits_at(state[0], some.expand(14, 3)), own[0][:, some])
        assert (frozen.head_VD is frozen.embed_VD) == bool(model.config.tie_word_embeddings)


def test_embeddings_are_what_enters_the_first_layer(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    entered: list[Tensor] = []
    hook = model.get_decoder().layers[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    with torch.no_grad():
        model(ids())
    hook.remove()
    close(load_frozen(str(folder)).embed(ids()), entered[0])


@pytest.mark.case("CAB-02")
def test_padding_and_packing_change_nothing(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    target = Target.load(str(folder), layers=LAYERS)
    rows = [ids(1, length)[0] for length in (3, 14, 9)]
    alone = [target.forward(row[None]) for row in rows]
    right = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    left = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows])
    left_mask = torch.arange(14) >= 14 - lengths[:, None]
    padded, turned = target.forward(right), target.forward(left, mask=left_mask)
    packed = target.forward(torch.cat(rows)[None], positions_BT=torch.cat([torch.arange(n) for n in lengths])[None])
    start = 0
    for index, row in enumerate(rows):
        n = len(row)
        for name in ("taps_BTLD", "last_hidden_BTD"):
            reference = getattr(alone[index], name)[0]
            close(getattr(padded, name)[index, :n], reference)
            close(getattr(turned, name)[index, 14 - n :], reference)
            close(getattr(packed, name)[0, start : start + n], reference)
        start += n


def test_a_cache_and_a_mask_by_layer_type_are_passed_on(saved: tuple[Path, Any]) -> None:
    """The decoding engine brings both: a second forward over the cache continues the first."""
    folder, _ = saved
    target = Target.load(str(folder), layers=LAYERS)
    whole = target.forward(ids(2))
    cache = transformers.DynamicCache()
    target.forward(ids(2)[:, :9], cache=cache)
    positions = torch.arange(9, 14).expand(2, -1)
    window = getattr(target.config, "sliding_window", None)
    distance = positions[0][:, None] - torch.arange(14)[None]
    full = (distance >= 0)[None, None].expand(2, 1, 5, 14)
    types = set(getattr(target.config, "layer_types", None) or [])
    masks: Any = full
    if "sliding_attention" in types and window:
        masks = {"full_attention": full, "sliding_attention": full & (distance < window)}
    rest = target.forward(ids(2)[:, 9:], positions_BT=positions, mask=masks, cache=cache)
    close(rest.taps_BTLD, whole.taps_BTLD[:, 9:])
    close(rest.last_hidden_BTD, whole.last_hidden_BTD[:, 9:])


@pytest.mark.parametrize("saved", ["qwen3", "gemma2"], indirect=True)
@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_decoding_draws_the_targets_own_tokens_under_any_attention(saved: tuple[Path, Any], attention: str) -> None:
    """The engine's masks are boolean; eager attention adds masks to scores. Gemma 2 has no other implementation."""
    target = Target.load(str(saved[0]), layers=LAYERS, attention=attention)
    prompts = [[7, 41, 12], [5, 300, 99, 8, 31]]
    made = decode(
        target, prompts, temperature=0.0, max_new_tokens=12, stop_ids=(), batch_size=2, seeds=[0, 1]
    )  # fmt: skip
    for prompt, generation in zip(prompts, made, strict=True):
        with torch.no_grad():
            logits = saved[1](torch.tensor([prompt + generation.ids])).logits[0, len(prompt) - 1 : -1]
        assert torch.equal(logits.argmax(-1), torch.tensor(generation.ids))
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"target\.attention: flash_attention_2 cannot decode"):
        target.forward(ids(1, 2), mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_bf16_is_close_and_nothing_is_trainable(saved: tuple[Path, Any]) -> None:
    target = Target.load(str(saved[0]), layers=LAYERS, dtype=torch.bfloat16)
    target.check()
    out = target.forward(ids())
    assert out.taps_BTLD.dtype == torch.bfloat16 and not out.taps_BTLD.requires_grad
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    exact = Target.load(str(saved[0]), layers=LAYERS).forward(ids()).taps_BTLD
    assert (out.taps_BTLD - exact).norm() / exact.norm() < 0.03


def test_an_architecture_with_a_head_of_its_own_kind_is_refused(tmp_path: Path) -> None:
    """Phi's head has a bias; an unknown factor on the logits is found by comparing."""
    phi = PhiConfig(**{**SIZES, "num_key_value_heads": 4})
    transformers.AutoModelForCausalLM.from_config(phi).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="phi"):
        Target.load(str(tmp_path))


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_check_finds_logits_that_do_not_match(saved: tuple[Path, Any]) -> None:
    target = Target.load(str(saved[0]))
    target.frozen = target.frozen.to(dtype=torch.float32)
    object.__setattr__(target.frozen, "logit_scale", 1.5)
    with pytest.raises(ConfigError, match="logits rebuilt"):
        target.check()


@pytest.mark.parametrize("saved", ["qwen3-untied"], indirect=True)
def test_missing_tensors_are_named(saved: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved[1].config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no model.safetensors"):
        load_frozen(str(tmp_path))
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="embedding") as refused:
        load_frozen(str(tmp_path))
    assert "head" in str(refused.value)


# ------------------------------------------------------------------------------------------------ layer ids


@pytest.mark.case("CAB-10")
@pytest.mark.parametrize("num_layers", [2, 3, 4, 5])
def test_shallow_targets_need_explicit_layers(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=f"num_layers = {num_layers}"):
        default_layers(num_layers)


@pytest.mark.case("CAB-10")
def test_default_layers() -> None:
    assert tuple(default_layers(36)) == (1, 9, 17, 25, 33)
    assert tuple(default_layers(30)) == (1, 7, 14, 20, 27)
    for num_layers in range(8, 100):
        assert not check_layers(default_layers(num_layers), num_layers)


@pytest.mark.parametrize("layers", [(), (-1,), (3,), (4,), (1, 1), (2, 1), (0, 3)])
def test_bad_layer_ids_are_refused_before_weights_are_read_s4(layers: tuple[int, ...], tmp_path: Path) -> None:
    assert check_layers(layers, 4)
    CONFIGS["qwen3"].save_pretrained(tmp_path)  # a configuration without weights
    if layers:
        with pytest.raises(ConfigError, match="targets.layers"):
            Target.load(str(tmp_path), layers=layers)


@pytest.mark.case("DEP-01")
@pytest.mark.parametrize("form", ["rope_theta", "rope_parameters"])
def test_both_rope_forms_of_a_configuration_give_the_same_target(form: str, tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta, transformers 5 writes rope_parameters."""
    import json

    CONFIGS["llama"].save_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    plain.pop("rope_parameters", None)
    plain.pop("rope_theta", None)
    plain |= (
        {"rope_theta": 500_000.0, "rope_scaling": None}
        if form == "rope_theta"
        else {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}
    )
    (tmp_path / "config.json").write_text(json.dumps(plain))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(plain))
    frequencies = Target.load(str(tmp_path)).decoder.rotary_emb.inv_freq
    assert torch.allclose(frequencies, 500_000.0 ** (-torch.arange(0, 8, 2) / 8), rtol=1e-6)
