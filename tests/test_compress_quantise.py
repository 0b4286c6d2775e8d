from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from conftest import CHUNKS
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.assemble import ContextPool
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.compress.quantise import Quantiser
from kvpacket_rag.compress.quantized import QuantizedTensor
from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.compress.scheme import SCHEMES, find_scheme
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import MissingExtraError, PacketError, PacketMismatchError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.rope import RotaryPlan, Rotation, TensorGroup, realign
from kvpacket_rag.store import DiskStore

KEYS = TensorGroup("keys", (0, 1), 3, 64, True, Rotation("half", 0, (0.1,) * 32))
VALUES = TensorGroup("values", (0, 1), 3, 64, True, None)
TOKENS = 141
FEW = GenerationSettings(max_new_tokens=4)


def quantised(name: str, tensor: Tensor, group: TensorGroup) -> QuantizedTensor:
    return QuantizedTensor(*Quantiser(SCHEMES[name]).quantise([tensor], [group]))


def random_tensor(tokens: int = TOKENS, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Channels of very different sizes, as keys have them."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = torch.logspace(-2, 2, width)
    return ((torch.randn(2, 3, tokens, width, generator=generator) + 0.5) * sizes).to(dtype)


def packet_of(backbone: Backbone, adapter: Adapter, quantize: str | None, text: str = CHUNKS[1]) -> Packet:
    encoder = PacketEncoder(backbone, adapter, reduction=Reduction.of(None, quantize))
    (packet,) = encoder.encode([encoder.identify(text)])
    return packet


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("group", [KEYS, VALUES])
@pytest.mark.parametrize("tokens", [1, 2, 33, TOKENS])
def test_every_number_comes_back_within_its_own_step(name: str, group: TensorGroup, tokens: int):
    tensor = random_tensor(tokens)
    stored = quantised(name, tensor, group)
    restored = stored.restore(slice(None))
    error = (restored - tensor.float())[:, :, 1:].abs()
    step = stored.scale.float()
    for axis in (2, 3):
        if step.shape[axis] not in (1, error.shape[axis]):
            step = step.repeat_interleave(32, axis).narrow(axis, 0, error.shape[axis])
    assert (error <= step * 1.01).all()  # half a step of rounding, and half a step of the zero point at the ends
    assert restored.shape == stored.shape == tensor.shape
    assert torch.equal(restored[:, :, 0], tensor.float()[:, :, 0])


@pytest.mark.parametrize(("name", "group", "shape"), [("int8", KEYS, (1, 64)), ("int8", VALUES, (TOKENS - 1, 1))])
def test_keys_share_a_scale_along_a_channel_and_values_along_a_token(name: str, group: TensorGroup, shape: tuple):
    assert tuple(quantised(name, random_tensor(), group).scale.shape[2:]) == shape


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_packet_holds_is_what_the_library_itself_would_restore(name: str):
    tensor = random_tensor()
    stored = quantised(name, tensor, KEYS)
    codes = stored.codes
    if stored.is_packed:
        codes = unpack_from_int32(codes, 4, torch.Size((2, 3, TOKENS - 1, 64)))
    steps = [part.float() for part in (stored.scale, stored.zero)]
    if name == "int4":
        steps = [part.repeat_interleave(32, 2)[:, :, : TOKENS - 1] for part in steps]
    arguments = QuantizationArgs(num_bits=4 if stored.is_packed else 8, symmetric=False, strategy="channel")
    expected = dequantize(codes, *steps, arguments, dtype=torch.float32)
    torch.testing.assert_close(stored.restore(slice(None))[:, :, 1:], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "worst"), [("int8", 0.55), ("k8v4", 0.42), ("int4", 0.32)])
def test_a_token_takes_the_share_of_16_bits_that_is_promised(name: str, worst: float):
    tensors = [random_tensor(), random_tensor()]
    stored = Quantiser(SCHEMES[name]).quantise(tensors, [KEYS, VALUES])
    assert sum(part.nbytes for part in stored) <= worst * sum(tensor.nbytes for tensor in tensors)


def test_what_may_serve_as_keys_is_stored_as_keys():
    scheme = SCHEMES["k8v4"]
    rotated = replace(VALUES, rotation=KEYS.rotation)  # where a latent cache keeps the part that is rotated
    unrotated = replace(KEYS, rotation=None)  # a layer without positions
    assert [scheme.grain(group).bits for group in (KEYS, VALUES, rotated, unrotated)] == [8, 4, 8, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_placed_packet_is_the_restored_one_moved_and_rounded_once(dtype: torch.dtype, make_model, tokenizer):
    backbone = Backbone(make_model(dtype=dtype), tokenizer)
    packet = packet_of(backbone, Adapter.empty(64), "int8")
    context = backbone.pool.take(100)
    context.reserve(7)
    place = context.place(packet)
    for found, stored, group in zip(context.extract(place), packet.groups, backbone.plan.groups, strict=True):
        expected = realign(stored.restore(slice(None)), group.rotation, 7).to(dtype)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_large_enough_to_be_written_past_the_caches_is_the_restored_one(dtype: torch.dtype):
    """Of the shape of an 8B model: a mebibyte a layer in bfloat16."""
    rotation = Rotation("half", 0, tuple(10000 ** (-k / 64) for k in range(64)))
    plan = RotaryPlan((TensorGroup("keys", (0,), 8, 128, True, rotation),), 4096)
    parts = Quantiser(SCHEMES["int8"]).quantise([torch.randn(1, 8, 512, 128).to(dtype)], plan.groups)
    stored = QuantizedTensor(*parts)
    name = str(dtype).removeprefix("torch.")
    signature = PacketSignature("w", "t", "none", plan.digest, name, quantization=SCHEMES["int8"].settings)
    context = ContextPool(plan, dtype, torch.device("cpu")).take(600)
    context.reserve(20)
    place = context.place(Packet("large", signature, parts, 512, 512))
    (found,) = context.extract(place)
    torch.testing.assert_close(
        found, realign(stored.restore(slice(None)), rotation, 20).to(dtype), atol=0.02, rtol=0.01
    )


def test_placing_never_holds_more_than_a_layer_in_full(backbone, adapter, monkeypatch):
    packet = packet_of(backbone, adapter, "k8v4")
    sizes = []
    real = QuantizedTensor.restore

    def watched(self, layers, device=None):
        restored = real(self, layers, device)
        sizes.append(restored.shape[0])
        return restored

    monkeypatch.setattr(QuantizedTensor, "restore", watched)
    backbone.pool.take(200).place(packet)
    assert sizes == [1] * 6  # three layers of keys and three of values


@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_packet_survives_its_file_bit_for_bit(name, backbone, adapter, tmp_path: Path):
    packet = packet_of(backbone, adapter, name)
    with_store = DiskStore(tmp_path)
    with_store.put(packet, CHUNKS[1])
    read = with_store.get(packet.packet_id, packet.signature)
    assert all(torch.equal(a, b) for a, b in zip(read.tensors, packet.tensors, strict=True))
    file = next(tmp_path.glob("packets/*/*.safetensors"))
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - header == packet.size_bytes
    with_store.close()


def test_packets_of_another_scheme_are_never_read_as_this_one(backbone, adapter, tmp_path: Path):
    store = DiskStore(tmp_path)
    packets = {name: packet_of(backbone, adapter, name) for name in ("none", *SCHEMES)}
    for packet in packets.values():
        store.put(packet, CHUNKS[1])
    assert len({packet.packet_id for packet in packets.values()}) == 4
    for name, packet in packets.items():
        others = [other.signature for key, other in packets.items() if key != name]
        for signature in others:
            with pytest.raises(PacketMismatchError, match="quantization"):
                store.get(packet.packet_id, signature)
    store.close()


def test_answers_of_int8_packets_are_those_of_whole_ones(backbone, adapter):
    prompt = f"{CHUNKS[0]}\n{CHUNKS[1]}\nWho signed it?"
    answers = []
    for quantize in (None, "int8"):
        engine = KVPacketEngine(backbone, adapter=adapter, min_match_tokens=4, reduction=Reduction.of(None, quantize))
        engine.encode(CHUNKS[:2])
        answers.append(engine.generate(prompt, FEW))
    assert answers[1].usage.chunks_reused == 2 and not answers[1].usage.misses
    assert answers[0].token_ids == answers[1].token_ids


def test_a_repeated_preamble_is_kept_in_full_beside_quantised_chunks(backbone, adapter):
    engine = KVPacketEngine(backbone, adapter=adapter, min_match_tokens=4, reduction=Reduction.of("random:0.5", "int8"))
    engine.encode(CHUNKS[:1])
    first, again = (engine.generate(f"Read this: {CHUNKS[0]} Now say.", FEW) for _ in range(2))
    assert again.token_ids == first.token_ids and again.usage.preamble_tokens > first.usage.preamble_tokens


def test_numbers_that_are_not_finite_are_refused():
    tensor = random_tensor()
    tensor[0, 0, 3, 3] = torch.inf
    with pytest.raises(PacketError, match="not all finite"):
        Quantiser(SCHEMES["int8"]).quantise([tensor], [KEYS])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_very_small_and_very_large_numbers_keep_their_relative_precision(scale: float):
    tensor = random_tensor(dtype=torch.float32) * scale
    restored = quantised("int8", tensor, KEYS).restore(slice(None))
    assert float(((restored - tensor) / scale).norm() / (tensor / scale).norm()) < 0.01


def test_parts_that_do_not_fit_are_refused(backbone, adapter):
    packet = packet_of(backbone, adapter, "int8")
    for number in range(4):
        parts = list(packet.tensors)
        parts[number] = parts[number][..., :-1]
        with pytest.raises(PacketError, match="fit"):
            replace(packet, tensors=tuple(parts))
    with pytest.raises(PacketError, match="parts"):
        replace(packet, tensors=packet.tensors[:-1])


def test_an_unknown_scheme_names_the_known_ones():
    with pytest.raises(PacketError, match="int8, k8v4, int4"):
        find_scheme("int3")


def test_a_missing_library_is_said_when_the_engine_is_made(backbone, monkeypatch):
    monkeypatch.setattr("kvpacket_rag.compress.quantise.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"kvpacket-rag\[compress\]"):
        KVPacketEngine(backbone, reduction=Reduction.of(None, "int8"))
