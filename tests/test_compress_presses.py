from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import CHUNKS
from transformers import (
    DeepseekV3Config,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    Llama4TextConfig,
    MistralConfig,
    OlmoConfig,
    Qwen3Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpacket_rag.adapter import Adapter, LowRank
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.compress.compression import PRESSES, Compression
from kvpacket_rag.compress.kept import pack_positions, unpack_positions
from kvpacket_rag.compress.kvpress_scores import KVPress, _load
from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import (
    AdapterError,
    MissingExtraError,
    ModelNotFoundError,
    PacketError,
    UnsupportedModelError,
)
from kvpacket_rag.packet import Packet
from kvpacket_rag.store import DiskStore

TEXT = " ".join(CHUNKS[:2])
OWN = ("random", "reread", "keydiff", "mixkv")
ALL = [*OWN, *(name for name in PRESSES if name not in (*OWN, "kvzap") and find_spec("kvpress"))]


@pytest.fixture(scope="module")
def wide_backbone(make_model, tokenizer) -> Backbone:
    """With heads wider than the 48 channels of a random sketch, on which leverage scores then depend."""
    return Backbone(make_model(head_dim=128), tokenizer)


def encode(
    backbone: Backbone, adapter: Adapter, compress: str | Compression, text: str = TEXT, sink: int = 0
) -> Packet:
    encoder = PacketEncoder(backbone, adapter, sink, reduction=Reduction.of(compress))
    (packet,) = encoder.encode([encoder.identify(text)])
    return packet


def whole(backbone: Backbone, adapter: Adapter, text: str = TEXT) -> Packet:
    return encode(backbone, adapter, "none", text)


@pytest.mark.parametrize("press", ALL)
@pytest.mark.parametrize("ratio", [0.3, 0.9])
def test_a_compressed_packet_holds_the_kept_tokens_of_the_whole_one(press, ratio, backbone, adapter):
    full, packet = whole(backbone, adapter), encode(backbone, adapter, f"{press}:{ratio}")
    assert packet.span == full.span and packet.num_slots == packet.span - math.floor(packet.span * ratio)
    assert packet.kept is not None and packet.kept.shape == (3, 2, packet.num_slots)
    assert (packet.kept.diff(dim=-1) > 0).all()
    for layer in range(3):
        for head in range(2):
            for stored, original in zip(packet.groups, full.groups, strict=True):
                assert torch.equal(stored[layer, head], original[layer, head, packet.kept[layer, head]])


@pytest.mark.parametrize("press", [name for name in ALL if name != "tova"])
def test_heads_keep_tokens_of_their_own(press, backbone, adapter):
    kept = encode(backbone, adapter, f"{press}:0.3").kept
    assert kept is not None and not torch.equal(kept[:, 0], kept[:, 1])


@pytest.mark.parametrize("press", ALL)
def test_the_choice_depends_on_the_chunk_alone(press, wide_backbone):
    adapter, text = Adapter.empty(64), " ".join(CHUNKS)
    torch.manual_seed(1)
    alone = encode(wide_backbone, adapter, f"{press}:0.5", text)
    torch.manual_seed(1234)
    encoder = PacketEncoder(wide_backbone, adapter, reduction=Reduction.of(f"{press}:0.5"))
    before = torch.random.get_rng_state()
    beside = {p.packet_id: p for p in encoder.encode([encoder.identify(t) for t in (*CHUNKS, text, text + text)])}
    assert torch.equal(beside[alone.packet_id].tensors[-1], alone.tensors[-1])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_other_chunks_draw_other_tokens(backbone, adapter):
    first, second = (encode(backbone, adapter, "random:0.5", text) for text in ("a b" * 20, "b a" * 20))
    assert first.span == second.span and not torch.equal(first.tensors[-1], second.tensors[-1])


def test_mixkv_keeps_what_its_formulae_say(backbone, adapter):
    """Term by term, a head and a key at a time, with queries from the model's own attention weights."""
    packet, full = encode(backbone, Adapter.empty(64), "mixkv:0.5"), whole(backbone, Adapter.empty(64))
    n, kept = full.span, packet.num_slots
    w = min(32, n // 2, kept // 2)
    model = backbone.model
    model.set_attn_implementation("eager")
    ids = torch.tensor([backbone.token_ids(TEXT)])
    attentions = model(input_ids=ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for layer in range(3):
        for head in range(2):
            keys, values = (group[layer, head].double() for group in full.groups)
            seen = attentions[layer][0, 2 * head : 2 * head + 2, -w:, : n - w].double().mean((0, 1)).tolist()
            a = [sum(seen[max(0, i - 2) : i + 3]) / 5 for i in range(n - w)]
            m = torch.stack([k / k.norm() for k in keys]).mean(0)
            r = (n * float(m @ m) - 1) / (n - 1)

            def match(x: list[float], a: list[float] = a) -> list[float]:
                unit = [(v - min(x)) / (max(x) - min(x)) for v in x]
                return [v * (sum(a) / len(a)) / (sum(unit) / len(unit) + 1e-8) for v in unit]

            size = match([float(v.norm()) for v in values[: n - w]])
            unlike = match([-float(k @ m / k.norm()) for k in keys[: n - w]])
            score = [r * d + (1 - r) * (i + v) for d, i, v in zip(unlike, a, size, strict=True)]
            best = sorted(range(n - w), key=lambda i: -score[i])[: kept - w]
            assert packet.kept[layer, head].tolist() == sorted([*best, *range(n - w, n)])


def test_reread_keeps_what_a_second_reading_would_take_most_from(make_model, tokenizer):
    """Attention by the model itself, of a copy of the text that sees the first one alone, in its first layer.

    There a copy reads the same numbers as the text, wherever it stands.
    """
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    for settings in ({}, {"rope_parameters": scaled}):
        backbone = Backbone(make_model(**settings), tokenizer)
        full, packet = whole(backbone, Adapter.empty(64)), encode(backbone, Adapter.empty(64), "reread:0.5")
        n, model = full.span, backbone.model
        first = torch.arange(n)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        mask = torch.zeros(2 * n, 2 * n, dtype=torch.bool)
        mask[:n, :n], mask[n:, :n] = seen, True
        model.set_attn_implementation("eager")
        attention = model(
            input_ids=torch.tensor([backbone.token_ids(TEXT)]).repeat(1, 2),
            position_ids=torch.cat([first, first + n - 1])[None],
            attention_mask=torch.zeros(1, 1, 2 * n, 2 * n).masked_fill(~mask, -torch.inf),
            output_attentions=True,
        ).attentions[0][0, :, n:, :n]
        for head in range(2):
            size = [float(value.norm()) for value in full.groups[1][0, head]]
            score = [
                sum(float(w) ** 2 for w in attention[2 * head : 2 * head + 2, :, i].flatten()) ** 0.5 * size[i]
                for i in range(n)
            ]
            best = sorted(range(n), key=lambda i: -score[i])[: packet.num_slots]
            assert packet.kept is not None and packet.kept[0, head].tolist() == sorted(best)


def test_reread_scores_long_chunks_piece_by_piece(backbone, monkeypatch):
    text = " ".join([*CHUNKS] * 3)
    at_once = encode(backbone, Adapter.empty(64), "reread:0.5", text)
    monkeypatch.setattr("kvpacket_rag.compress.press.BLOCK", 7)
    in_pieces = encode(backbone, Adapter.empty(64), "reread:0.5", text)
    same = (at_once.tensors[-1] == in_pieces.tensors[-1]).float().mean()
    assert same > 0.95  # sums are rounded in another order


def test_keydiff_keeps_the_keys_least_like_the_mean(backbone, adapter):
    packet, full = encode(backbone, adapter, "keydiff:0.4"), whole(backbone, adapter)
    keys = full.groups[0][1, 0].double()
    mean = torch.stack([key / key.norm() for key in keys]).mean(0)
    likeness = [float(key @ mean / key.norm() / mean.norm()) for key in keys]
    expected = sorted(sorted(range(len(keys)), key=likeness.__getitem__)[: packet.num_slots])
    assert packet.kept is not None and packet.kept[1, 0].tolist() == expected


@pytest.mark.parametrize("press", ["reread", "mixkv", "leverage"])
def test_the_low_rank_update_is_active_while_tokens_are_scored(press, backbone, monkeypatch):
    """A press that saw keys of the bare model would find them different from those cached, and refuse."""
    if press not in ALL:
        pytest.skip("kvpress is not installed")
    shapes = {f"model.layers.{n}.self_attn.{p}_proj": (64 if p == "q" else 32, 64) for n in range(3) for p in "qk"}
    update = LowRank.fresh(shapes, 2)
    for up in update.up:
        up.data.normal_(std=0.3)
    adapter = Adapter(torch.randn(3, 64), torch.randn(2, 64), {"header": "left out"}, low_rank=update)
    packet = encode(backbone, adapter, f"{press}:0.5")
    assert packet.num_slots == packet.span - packet.span // 2
    with pytest.raises(AdapterError, match="sink"):
        PacketEncoder(backbone, adapter, sink=1, reduction=Reduction.of(f"{press}:0.5"))


def test_soft_tokens_are_kept_when_that_is_asked_for(backbone, adapter):
    packet = encode(backbone, adapter, Compression("keydiff", 0.9, protect_adapter=True))
    soft = [0, 1, 2, packet.span - 2, packet.span - 1]
    assert packet.kept is not None and all(set(soft) <= set(row.tolist()) for row in packet.kept.flatten(0, 1))
    assert encode(backbone, adapter, "keydiff:0.9").packet_id != packet.packet_id


def test_serving_a_compressed_packet_attends_to_the_kept_tokens_at_their_own_places(backbone, adapter):
    """The same as a whole packet with what was left out hidden, here from one layer's single key head."""
    packet, full = encode(backbone, adapter, "random:0.5"), whole(backbone, adapter)
    contexts = [backbone.pool.take(100) for _ in range(2)]
    small, large = (context.place(p) for context, p in zip(contexts, (packet, full), strict=True))
    assert contexts[0].num_positions == contexts[1].num_positions == full.span
    for found, expected in zip(contexts[0].extract(small), contexts[1].extract(large), strict=True):
        for layer in range(3):
            torch.testing.assert_close(found[layer, 0], expected[layer, 0, packet.kept[layer, 0]])


@pytest.mark.parametrize("press", ["random", "mixkv"])
def test_answers_come_from_compressed_and_quantised_packets_on_disk(press, backbone, adapter, tmp_path: Path):
    reduction = Reduction.of(f"{press}:0.3", "k8v4")
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), adapter, min_match_tokens=4, reduction=reduction)
    (name,) = engine.encode([TEXT])
    read = engine.store.get(name, engine.signature)
    assert read.num_slots < read.span and read.kept is not None and read.signature.quantization.startswith("k8v4")
    answer = engine.generate(f"{TEXT}\nWho?", GenerationSettings(max_new_tokens=4))
    assert answer.usage.chunks_reused == 1 and not answer.usage.misses
    engine.close()


@pytest.mark.parametrize("press", ALL)
def test_short_chunks_are_stored_whole(press, backbone):
    packet = encode(backbone, Adapter.empty(64), f"{press}:0.9", "Yes.")
    assert packet.num_slots == packet.span
    longer = encode(backbone, Adapter.empty(64), f"{press}:0.9", CHUNKS[0][:40])
    assert longer.num_slots == max(1, longer.span - int(longer.span * 0.9 + 1e-9)) or longer.span < 16


def test_settings_of_a_press_change_the_packets_name(backbone, adapter):
    names = {
        encode(backbone, adapter, asked).packet_id
        for asked in ("none", "random:0.3", "random:0.5", "random:0.3:protect", "keydiff:0.3")
    }
    assert len(names) == 5 and encode(backbone, adapter, "random:0").packet_id in names
    assert encode(backbone, adapter, "random:0.29999999").packet_id not in names


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("random:1", "below 1"),
        ("random:-0.1", "below 1"),
        ("random:nan", "NAME:RATIO"),
        ("random", "NAME:RATIO"),
        ("random:much", "NAME:RATIO"),
        ("adakv:0.3", "random, reread, keydiff, mixkv"),
        ("", "NAME:RATIO"),
        ("reread:0.3:weights=x", "kvzap alone"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_what_can(text: str, found: str):
    with pytest.raises(PacketError, match=found):
        Compression.parse(text)


@pytest.mark.parametrize("label", ["none", "int8", "compactor:0.3", "random:0.5:protect+k8v4", "snapkv:0.25+int4"])
def test_a_reduction_survives_its_own_text(label: str):
    assert str(Reduction.parse(label)) == label
    assert Reduction.parse(label.replace(":0", "-0")) == Reduction.parse(label)


def test_positions_survive_their_bits_and_heads_must_keep_equally_many():
    positions = torch.stack([torch.randperm(19)[:7].sort().values for _ in range(6)]).view(2, 3, 7)
    bits = pack_positions(positions, 19)
    assert bits.shape == (2, 3, 3) and torch.equal(unpack_positions(bits), positions)
    bits[0, 0, 0] ^= 1
    with pytest.raises(PacketError, match="tokens, expected one number"):
        unpack_positions(bits)


def test_a_packet_whose_positions_do_not_fit_its_span_is_refused(backbone, adapter):
    packet = encode(backbone, adapter, "random:0.3")
    with pytest.raises(PacketError, match="a bit for each"):
        replace(packet, tensors=(*packet.tensors[:-1], packet.tensors[-1][..., :-1]))


@pytest.mark.parametrize(
    ("config", "settings", "press", "reason"),
    [
        (MistralConfig, {"sliding_window": 64}, "random", "64 tokens back"),
        (Gemma3TextConfig, {"sliding_window": 64, "head_dim": 16}, "keydiff", "64 tokens back"),
        (GPTJConfig, {"rotary_dim": 8, "n_inner": 96}, "mixkv", "does not attend as"),
    ],
)
def test_a_model_the_press_cannot_read_is_refused(config, settings, press, reason, make_model, tokenizer):
    backbone = Backbone(make_model(config, **settings), tokenizer)
    with pytest.raises(UnsupportedModelError, match=reason):
        encode(backbone, Adapter.empty(64), f"{press}:0.3")


def test_a_latent_cache_can_be_thinned_but_not_read_for_queries(make_model, tokenizer):
    sizes = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    backbone = Backbone(
        make_model(DeepseekV3Config, **sizes, num_key_value_heads=4, first_k_dense_replace=3), tokenizer
    )
    packet = encode(backbone, Adapter.empty(64), "random:0.3")
    assert packet.kept is not None and packet.kept.shape[:2] == (3, 1)
    with pytest.raises(UnsupportedModelError, match="leave its packets uncompressed"):
        encode(backbone, Adapter.empty(64), "mixkv:0.3")


@pytest.mark.parametrize("press", [name for name in ALL if name in ("reread", "mixkv", "snapkv", "compactor")])
def test_models_with_normalised_queries_are_read_as_they_are(press, make_model, tokenizer):
    backbone = Backbone(make_model(Qwen3Config, head_dim=16), tokenizer)
    assert encode(backbone, Adapter.empty(64), f"{press}:0.3").kept is not None


@pytest.mark.parametrize("press", [name for name in ALL if name in ("reread", "mixkv", "snapkv", "tova")])
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (Gemma2Config, {"sliding_window": 2048, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
        (OlmoConfig, {"clip_qkv": 3.0}),
        (DiffLlamaConfig, {}),
    ],
)
def test_a_model_that_does_more_to_attention_is_refused(press, config, settings, make_model, tokenizer):
    """Its keys are as a press expects, what becomes of the products is not."""
    model = make_model(config, head_dim=16, **settings)
    for name, weight in model.named_parameters():
        if "q_proj" in name:
            weight.data *= 8
    backbone = Backbone(model, tokenizer)
    with pytest.raises(UnsupportedModelError, match="outputs of attention"):
        encode(backbone, Adapter.empty(64), f"{press}:0.3")
    assert encode(backbone, Adapter.empty(64), "keydiff:0.3").kept is not None


def test_a_model_whose_angles_are_complex_is_refused(make_model, tokenizer):
    backbone = Backbone(
        make_model(Llama4TextConfig, head_dim=16, num_local_experts=2, attention_chunk_size=4096), tokenizer
    )
    with pytest.raises(UnsupportedModelError, match="pair of position_embeddings"):
        encode(backbone, Adapter.empty(64), "reread:0.3")


def test_keys_that_are_computed_otherwise_are_noticed(make_model, tokenizer, monkeypatch):
    backbone = Backbone(make_model(), tokenizer)
    other = "kvpacket_rag.compress.press._project"
    monkeypatch.setattr(other, lambda module, hidden, *_: torch.ones(1, 2, hidden.shape[1], 16))
    with pytest.raises(UnsupportedModelError, match="differ from those"):
        encode(backbone, Adapter.empty(64), "mixkv:0.3", TEXT)


def test_attention_is_given_what_the_hook_reads(backbone):
    """These names changed twice within transformers 5; a press would be refused without them."""
    encoder = PacketEncoder(backbone, Adapter.empty(64), reduction=Reduction.of("mixkv:0.3"))
    with encoder._compressor.watching() as seen:  # type: ignore[union-attr]
        backbone.encode([torch.tensor(backbone.token_ids(TEXT))], whole=True)
    assert all(given.hidden is not None and given.angles is not None for given in seen.values()) and len(seen) == 3


def test_hooks_are_gone_after_encoding(backbone, adapter):
    backbone.encode([torch.arange(9)])  # transformers leaves some of its own with the first forward
    before = [len(module._forward_hooks) for module in backbone.model.modules()]
    encode(backbone, adapter, "mixkv:0.3")
    assert [len(module._forward_hooks) for module in backbone.model.modules()] == before


def test_kvzap_without_weights_says_what_to_do(backbone, tmp_path: Path):
    if not find_spec("kvpress"):
        pytest.skip("kvpress is not installed")
    with pytest.raises(ModelNotFoundError, match="weights=FOLDER"):
        PacketEncoder(backbone, Adapter.empty(64), reduction=Reduction.of(f"kvzap:0.3:weights={tmp_path}"))


def test_kvzap_scores_by_the_weights_it_is_given(backbone, adapter, tmp_path: Path):
    if not find_spec("kvpress"):
        pytest.skip("kvpress is not installed")
    kvzap = _load(["presses.kvzap_press"])["presses.kvzap_press"]
    names = set()
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        torch.manual_seed(seed)
        kvzap.KVzapModel(kvzap.KVzapConfig(input_dim=64, output_dim=2, n_modules=3)).save_pretrained(folder)
        packet = encode(backbone, adapter, f"kvzap:0.3:weights={folder}")
        names.add(packet.packet_id)
        assert packet.num_slots < packet.span
    assert len(names) == 2


def test_a_missing_kvpress_is_said(backbone, monkeypatch):
    monkeypatch.setattr("kvpacket_rag.compress.kvpress_scores.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"kvpacket-rag\[compress\]"):
        PacketEncoder(backbone, Adapter.empty(64), reduction=Reduction.of("compactor:0.3"))
    assert encode(backbone, Adapter.empty(64), "mixkv:0.3").kept is not None


@pytest.mark.skipif(not find_spec("kvpress"), reason="kvpress is not installed")
def test_using_kvpress_leaves_the_attention_of_all_models_alone():
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    KVPress("compactor", 0.3)
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before and "kvpress" not in sys.modules
