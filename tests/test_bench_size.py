from __future__ import annotations

import pytest
from transformers import MistralConfig

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.bench import run
from kvpacket_rag.bench.size import quantised, thinned
from kvpacket_rag.compress.press import RandomPress
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def figures(backbone, adapter) -> dict[str, float]:
    return quantised(KVPacketEngine(backbone, adapter=adapter), 1)


def test_fewer_bits_are_further_away_and_take_less(figures: dict[str, float]):
    assert 0 < figures["kl_direct_int8"] < figures["kl_direct_k8v4"] < figures["kl_direct_int4"]
    assert all(abs(figures[f"kl_{name}"]) < 1 for name in ("int8", "k8v4", "int4"))
    assert figures["bytes_int8"] > figures["bytes_k8v4"] > figures["bytes_int4"] > 0


def test_bytes_are_a_share_of_those_in_16_bits(figures: dict[str, float]):
    """Of 16 channels: 8 or 4 bits each, and 24 bits of scale and zero point for a token's values."""
    assert figures["bytes_int8"] == pytest.approx((8 + (8 + 24 / 16)) / 32, rel=0.05)
    assert figures["bytes_k8v4"] == pytest.approx((8 + (4 + 24 / 16)) / 32, rel=0.05)


def test_a_press_that_chooses_as_chance_does_is_as_far_away(backbone, adapter, monkeypatch):
    engine = KVPacketEngine(backbone, adapter=adapter)
    apart = thinned(engine, 1)
    monkeypatch.setattr("kvpacket_rag.compress.compressor.RereadPress", RandomPress)
    assert thinned(engine, 1) == {"press_over_random_30": 1.0, "press_over_random_50": 1.0} != apart


def test_a_part_that_cannot_be_measured_is_passed_over_unless_it_was_asked_for(
    make_model, tokenizer, caplog, monkeypatch
):
    """The others are still measured."""
    backbone = Backbone(make_model(MistralConfig, sliding_window=64), tokenizer)
    monkeypatch.setattr(run, "PARTS", {name: run.PARTS[name] for name in ("presses", "assembly")})

    def parts(*asked: str) -> list[str]:
        options = run.BenchOptions(asked, chunks=1, repeats=1)
        return [name for name, _ in run.run_bench(lambda folder: KVPacketEngine(backbone), options)]

    assert parts() == ["machine", "assembly"] and "presses is not measured: the press" in caplog.text
    with pytest.raises(UnsupportedModelError, match="64 tokens back"):
        parts("presses")
