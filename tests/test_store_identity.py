"""A packet is found by who made it of what: whatever differs in the model, its tokenizer or its settings misses."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import SIGNATURE, closing  # noqa: F401 (a fixture)

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.packet import PacketSignature, packet_id
from kvpacket_rag.store import DiskStore

PROMPT = f"{CHUNKS[0]}\n\nWhat is kept cold?"
Make = Callable[..., Any]


def one_weight(make: Make, tokenizer: Any) -> Backbone:
    model = make()
    model.model.layers[1].self_attn.v_proj.weight.data[3, 5] += 1e-3
    return Backbone(model, tokenizer, "tiny")


def merged_lora(make: Make, tokenizer: Any) -> Backbone:
    model = make()
    weight = model.model.layers[0].self_attn.q_proj.weight.data
    weight += 1e-3 * torch.ones(weight.shape[0], 1) @ torch.ones(1, weight.shape[1])
    return Backbone(model, tokenizer, "tiny")


def added_token(make: Make, tokenizer: Any) -> Backbone:
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["freezer"])
    return Backbone(make(), changed, "tiny")


def scaled_rope(make: Make, tokenizer: Any) -> Backbone:
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    return Backbone(make(rope_parameters=scaling), tokenizer, "tiny")


OTHERS: dict[str, Callable[[Make, Any], Backbone]] = {
    "one weight edited": one_weight,
    "a merged LoRA": merged_lora,
    "other weights of the same name": lambda make, tokenizer: Backbone(make(seed=1), tokenizer, "tiny"),
    "a token added": added_token,
    "another RoPE scaling": scaled_rope,
    "another dtype": lambda make, tokenizer: Backbone(make(dtype=torch.float64), tokenizer, "tiny"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_packets_of_another_model_are_never_reused(
    backbone: Backbone, make_model: Make, tokenizer: Any, tmp_path: Path, other: str
) -> None:
    store = DiskStore(tmp_path)
    mine = KVPacketEngine(backbone, store, min_match_tokens=4)
    (name,) = mine.encode(CHUNKS[:1])
    theirs = KVPacketEngine(OTHERS[other](make_model, tokenizer), store, min_match_tokens=4)
    assert theirs.signature != mine.signature and theirs.encoder.identify(CHUNKS[0])[0] != name
    assert theirs.generate(PROMPT).usage.chunks_reused == 0 and mine.generate(PROMPT).usage.chunks_reused == 1
    with pytest.raises(KVPacketError, match="packet has"):
        store.get(name, theirs.signature)
    theirs.encode(CHUNKS[:1])
    assert theirs.generate(PROMPT).usage.chunks_reused == 1 and len(store) == 2


def test_another_adapter_none_a_sink_and_whatever_makes_packets_smaller_are_identities_of_their_own(
    backbone: Backbone, adapter: Adapter, tmp_path: Path
) -> None:
    store = DiskStore(tmp_path)
    engines = [
        KVPacketEngine(backbone, store, min_match_tokens=4),
        KVPacketEngine(backbone, store, adapter=adapter, min_match_tokens=4),
        KVPacketEngine(backbone, store, sink=1, min_match_tokens=4),
        KVPacketEngine(backbone, store, min_match_tokens=4, reduction=Reduction.of("random:0.3", None)),
        KVPacketEngine(backbone, store, min_match_tokens=4, reduction=Reduction.of("random:0.5", None)),
        KVPacketEngine(backbone, store, min_match_tokens=4, reduction=Reduction.of(None, "int8")),
        KVPacketEngine(backbone, store, min_match_tokens=4, reduction=Reduction.of(None, "int4")),
    ]
    for number, engine in enumerate(engines):
        assert engine.generate(PROMPT).usage.chunks_reused == 0
        engine.encode(CHUNKS[:1])
        assert engine.generate(PROMPT).usage.chunks_reused == 1 and len(store) == number + 1


texts = st.text(max_size=12) | st.sampled_from(['","adapter":"x', "none", "\\", '"', "\x00", "\ud7ff", "a,b", "{}"])


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, min_size=7, max_size=7), st.lists(texts, min_size=7, max_size=7))
def test_no_two_signatures_share_a_text_or_a_name(left: list[str], right: list[str]) -> None:
    one, other = PacketSignature(*left), PacketSignature(*right)
    assert (one == other) == (one.to_json() == other.to_json()) == (packet_id([1], one) == packet_id([1], other))
    assert PacketSignature.from_json(one.to_json()) == one


def test_a_separator_inside_a_field_forges_no_other_signature() -> None:
    names = [field.name for field in fields(PacketSignature) if field.name != "format_version"]
    for first, second in pairwise(names):
        for mark in (",", '","', "|", ":", "\x1f", f'","{second}":"'):
            moved = replace(SIGNATURE, **{first: f"a{mark}b", second: "c"})
            other = replace(SIGNATURE, **{first: "a", second: f"b{mark}c"})
            assert packet_id([1], moved) != packet_id([1], other)
    assert packet_id([1, 2], SIGNATURE) != packet_id([12], SIGNATURE) != packet_id([2, 1], SIGNATURE)


def test_names_are_equal_in_every_process() -> None:
    code = (
        "from kvpacket_rag.packet import PacketSignature, packet_id\n"
        f"print(packet_id(range(50), PacketSignature.from_json({SIGNATURE.to_json()!r})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent.parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "random")
    }
    assert found == {packet_id(range(50), SIGNATURE)}
