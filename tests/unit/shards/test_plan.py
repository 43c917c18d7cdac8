"""What a cache costs: arithmetic against tars that were written."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.errors import StorageError
from pipeline.shards import plan
from pipeline.shards.layout import Spec
from pipeline.shards.plan import Shape, estimate, refuse_without_space, show_bytes
from tests.unit.shards.cache import build, rows_of, spec_of

QWEN3_4B = {
    "num_hidden_layers": 36, "hidden_size": 2560, "vocab_size": 151_936, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
}  # fmt: skip
CORPUS = (1_400_000, 1_240_000_000, 1_240_000_000)  # Open-PerfectBlend, every token supervised at worst


@pytest.mark.case("CAB-01")
@pytest.mark.parametrize("taps", ["bf16", "int8", "int4", "int2"])
@pytest.mark.parametrize("positions", ["supervised", "all"])
def test_estimate_against_bytes_on_disk(taps: str, positions: str, tmp_path: Path) -> None:
    spec = spec_of(taps, positions=positions)
    sizes = (200, 200)
    artifact = build(tmp_path, spec, sizes=sizes)
    rows = [row for number, size in enumerate(sizes) for row in rows_of(size, seed=number)]
    counts = len(rows), sum(len(row.ids) for row in rows), sum(int(row.mask.sum()) for row in rows)
    actual = sum(fact["bytes"] for fact in artifact.manifest()["shards"])
    assert estimate(spec, *counts, shards=2) == pytest.approx(actual, rel=0.03)


@pytest.mark.parametrize(
    ("taps", "logits", "terabytes"),
    [("bf16", "last_hidden", (37, 39)), ("int4", "topk", (8, 9.3)), ("int2", "topk", (4, 5.2))],
)
def test_open_perfectblend_on_qwen3_4b(taps: str, logits: str, terabytes: tuple[float, float]) -> None:
    spec = Spec(
        taps=taps, logits=logits, topk=64, positions="supervised", num_taps=5, hidden_size=2560, vocab_size=151_936
    )
    assert terabytes[0] < estimate(spec, *CORPUS, shards=1400) / 1e12 < terabytes[1]


def test_flops_are_two_per_weight_and_token_plus_attention() -> None:
    shape = Shape.of(QWEN3_4B)
    weights = shape.layers * shape.layer_parameters
    assert weights == pytest.approx(3.63e9, rel=0.01)  # 4.02 B less the embedding
    assert shape.forward_flops(tokens=1, samples=1) == pytest.approx(2 * weights, rel=0.001)
    long = shape.forward_flops(tokens=4096, samples=1) / 4096
    assert long - 2 * weights == pytest.approx(36 * 2 * 32 * 128 * 4096)
    head = shape.forward_flops(tokens=10, samples=1, head_positions=10) - shape.forward_flops(tokens=10, samples=1)
    assert head == 10 * 2 * 2560 * 151_936
    assert Shape.of({"text_config": QWEN3_4B}) == shape


def test_experts_count_only_where_a_token_goes() -> None:
    dense = Shape.of(QWEN3_4B)
    sparse = Shape.of({**QWEN3_4B, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
    attention = dense.layer_parameters - 3 * 2560 * 9728
    assert sparse.layer_parameters == attention + 2560 * (8 * 3 * 768 + 128)


@pytest.mark.case("CAB-01")
def test_a_disk_too_small_is_refused_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage(0, 0, 10**12))
    refuse_without_space(tmp_path, int(0.9e12))
    with pytest.raises(StorageError, match=r"need 38\.0 TB, 1\.0 TB are free"):
        refuse_without_space(tmp_path, 38 * 10**12)


def test_byte_texts() -> None:
    assert [show_bytes(count) for count in (7, 1234, 7.3e6, 38e12)] == ["7 B", "1.2 kB", "7.3 MB", "38.0 TB"]
