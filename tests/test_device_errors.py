"""Memory that runs out while a prompt is assembled: room is made, the rest is read, and the answer says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CHUNKS

from kvpacket_rag import prefill
from kvpacket_rag.assemble import Assembly
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.device_errors import is_out_of_memory, told
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import DeviceError, PacketMissError, StoreError
from kvpacket_rag.reading import Reuse
from kvpacket_rag.store import MemoryStore, TieredStore

SHORT = GenerationSettings(max_new_tokens=8)
PROMPT = [Message("system", "Be brief."), Message("user", "\n\n".join([*CHUNKS, "Question: Who?"]))]
KINDS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 79.10 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    MemoryError(),
]


@pytest.fixture
def engine(backbone: Any, adapter: Any) -> KVPacketEngine:
    store = TieredStore(MemoryStore(), host_bytes=1 << 24)
    engine = KVPacketEngine(backbone, store, adapter, min_match_tokens=4)
    engine.encode(CHUNKS)
    return engine


def failing(work: Callable[..., Any], error: BaseException, times: int, calls: list[int]) -> Callable[..., Any]:
    """The work, which fails the first ``times`` it is done."""

    def run(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return work(*given, **named)

    return run


@pytest.mark.parametrize("error", KINDS, ids=lambda error: f"{type(error).__name__} {str(error)[:10]}")
@pytest.mark.parametrize("where", ["buffer", "packet", "text"])
def test_room_is_made_and_the_packets_are_used(engine: KVPacketEngine, monkeypatch: Any, error: Any, where: str):
    expected = engine.generate(PROMPT, SHORT)
    pool, store, calls = engine.backbone.pool, engine.store, []
    place, part = {"buffer": (pool, "take"), "packet": (Assembly, "write"), "text": (engine.backbone, "prefill")}[where]
    if where == "buffer":
        pool.drop_idle()
    monkeypatch.setattr(place, part, failing(getattr(place, part), error, 1, calls))
    monkeypatch.setattr(pool, "take_filled", lambda *_: None)
    found = engine.generate(PROMPT, SHORT)
    assert found.token_ids == expected.token_ids and found.usage.chunks_reused == 4 and not found.usage.misses
    assert len(calls) > 1 and store.tiers["host"].size_bytes == 0  # the second try made no copies


def test_where_packets_find_no_room_their_text_is_read_and_told_of(engine: KVPacketEngine, monkeypatch: Any, caplog):
    expected = engine.generate(PROMPT, SHORT, policy="prefill")
    engine.backbone.pool.drop_idle()
    monkeypatch.setattr(Assembly, "add", failing(Assembly.add, KINDS[0], 1 << 30, []))
    found = engine.generate(PROMPT, SHORT)
    assert found.token_ids == expected.token_ids and found.usage.packet_tokens == 0
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    names = engine.encode(CHUNKS)
    assert [miss.packet_id for miss in found.usage.misses] == names
    assert all("memory ran out" in miss.reason for miss in found.usage.misses)
    assert caplog.text.count("ran out while a prompt was assembled") == 2
    with pytest.raises(PacketMissError, match="memory ran out"):
        engine.generate(PROMPT, SHORT, reuse=Reuse(on_miss="error"))


def test_text_is_read_in_small_pieces_where_memory_is_short(engine: KVPacketEngine, monkeypatch: Any):
    """As a forward does that has room for no more than a few tokens."""
    expected = engine.generate(PROMPT, SHORT, policy="prefill")
    read, sizes = engine.backbone.prefill, []

    def narrow(bound: Any, texts: Any) -> Any:
        sizes.append(sum(len(ids) for _, ids in texts))
        if sizes[-1] > 16:
            raise KINDS[0]
        return read(bound, texts)

    monkeypatch.setattr(engine.backbone, "prefill", narrow)
    monkeypatch.setattr(prefill, "_PIECE", 16)
    found = engine.generate(PROMPT, SHORT, policy="prefill")
    assert found.token_ids == expected.token_ids and found.usage == expected.usage and not found.usage.misses
    assert sizes[0] > 100 and max(sizes[1:]) == 16


def test_no_room_at_all_is_an_error_that_names_the_need(engine: KVPacketEngine, monkeypatch: Any):
    right, take = engine.generate(PROMPT, SHORT), engine.backbone.pool.take
    engine.backbone.pool.drop_idle()
    with monkeypatch.context() as patch:
        patch.setattr(engine.backbone.pool, "take", failing(take, KINDS[1], 1 << 30, []))
        with pytest.raises(DeviceError, match=r"cpu has no room for .* tokens, whose keys and values take \d+ bytes"):
            engine.generate(PROMPT, SHORT)
    assert engine.generate(PROMPT, SHORT).token_ids == right.token_ids  # and nothing is held or broken afterwards


def test_memory_that_runs_out_later_is_said_in_words(engine: KVPacketEngine, monkeypatch: Any):
    step, freed = engine.backbone.step, []
    monkeypatch.setattr(engine.backbone, "step", failing(step, KINDS[0], 1, []))
    give = engine.backbone.pool.give_back
    monkeypatch.setattr(engine.backbone.pool, "give_back", lambda context: freed.append(give(context)))
    with pytest.raises(DeviceError, match=r"the memory of cpu ran out .CUDA out of memory.*; retrieve fewer"):
        engine.generate(PROMPT, SHORT)
    assert len(freed) == 1


def test_other_errors_pass_as_they_are(engine: KVPacketEngine, monkeypatch: Any):
    monkeypatch.setattr(Assembly, "add", failing(Assembly.add, RuntimeError("shapes differ"), 1 << 30, []))
    engine.backbone.pool.drop_idle()
    with pytest.raises(RuntimeError, match="shapes differ"):
        engine.generate(PROMPT, SHORT)
    assert not any(map(is_out_of_memory, (RuntimeError("shapes differ"), ValueError("out of memory"), KeyError())))


@pytest.mark.parametrize("words", ["CUDA error: device-side assert triggered", "HIP error: unspecified launch failure"])
def test_a_device_that_disappears_is_named_with_what_to_do(words: str):
    with (
        pytest.raises(DeviceError, match=f"cuda:1 cannot be used any more .{words}.*another device"),
        told(torch.device("cuda:1"), ""),
    ):
        raise RuntimeError(f"{words}\nCompile with TORCH_USE_CUDA_DSA")


@pytest.mark.parametrize("where", ["packet", "text"])
def test_a_device_that_disappears_within_a_request_is_told_of(engine: KVPacketEngine, monkeypatch: Any, where: str):
    """Not taken for memory that ran out: nothing is tried a second time."""
    engine.generate(PROMPT, SHORT)
    place, part = {"packet": (Assembly, "write"), "text": (engine.backbone, "prefill")}[where]
    calls: list[int] = []
    monkeypatch.setattr(place, part, failing(getattr(place, part), RuntimeError("CUDA error: lost"), 1, calls))
    monkeypatch.setattr(engine.backbone.pool, "take_filled", lambda *_: None)
    with pytest.raises(DeviceError, match=r"cannot be used any more .CUDA error: lost.*packets on disk are not"):
        engine.generate(PROMPT, SHORT)
    assert len(calls) == 1


def test_a_tier_larger_than_the_device_is_refused(monkeypatch: Any):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 29, 1 << 30))
    with pytest.raises(StoreError, match=f"device_bytes is {1 << 31}; expected 0 up to the {1 << 30} bytes"):
        TieredStore(MemoryStore(), device_bytes=1 << 31, device="cuda")


def narrow(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException, rows: int) -> list[int]:
    """Let the model's memory hold a few chunks at once; tells how many were tried."""
    encode, tried = engine.backbone.encode, []

    def run(given: Any, *rest: Any) -> Any:
        tried.append(len(given))
        if len(given) > rows:
            raise error
        return encode(given, *rest)

    monkeypatch.setattr(engine.backbone, "encode", run)
    return tried


@pytest.mark.parametrize("error", KINDS, ids=lambda error: f"{type(error).__name__} {str(error)[:10]}")
def test_chunks_that_find_no_room_together_are_encoded_in_smaller_batches(
    engine: KVPacketEngine, adapter: Any, monkeypatch: Any, error: Any
):
    fresh, freed = KVPacketEngine(engine.backbone, adapter=adapter, min_match_tokens=4), []
    monkeypatch.setattr(fresh.writer, "_make_room", lambda: freed.append(1))
    tried = narrow(fresh, monkeypatch, error, rows=1)
    names = fresh.encode(CHUNKS)
    assert tried == [4, 2, 1, 1, 2, 1, 1] and len(freed) == 3
    for name in names:
        one, other = (e.store.get(name, e.signature).tensors for e in (engine, fresh))
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, other, strict=True))


def test_a_chunk_is_tried_again_once_room_was_made(backbone: Any, monkeypatch: Any):
    engine = KVPacketEngine(backbone)
    idle = backbone.pool.take(8)
    backbone.pool.give_back(idle)
    monkeypatch.setattr(backbone, "encode", failing(backbone.encode, KINDS[0], 1, []))
    engine.encode(CHUNKS[:1])
    assert len(engine.store) == 1 and idle not in backbone.pool._idle


def test_a_chunk_that_finds_no_room_by_itself_is_told_with_its_bytes(engine: KVPacketEngine, monkeypatch: Any):
    bare = KVPacketEngine(engine.backbone)
    tokens = bare.count_tokens(CHUNKS[0])
    narrow(bare, monkeypatch, KINDS[1], rows=0)
    size = tokens * bare.backbone.pool.slot_bytes
    with pytest.raises(DeviceError, match=f"cpu has no room to encode a chunk of {tokens} tokens.* {size} bytes; cut"):
        bare.encode(CHUNKS[:1])
    assert len(bare.store) == 0


def test_a_prompt_whose_lost_packet_cannot_be_made_again_is_read_as_text(engine: KVPacketEngine, monkeypatch: Any):
    expected = engine.generate(PROMPT, SHORT, policy="prefill")
    monkeypatch.setattr(engine.store.below, "get", failing(engine.store.below.get, StoreError("gone"), 1 << 30, []))
    narrow(engine, monkeypatch, KINDS[0], rows=0)
    found = engine.generate(PROMPT, SHORT)
    assert found.token_ids == expected.token_ids and len(found.usage.misses) == 4


def test_memory_that_runs_out_while_a_packet_is_written_is_said_in_words(engine: KVPacketEngine, monkeypatch: Any):
    monkeypatch.setattr(engine.store, "put", failing(engine.store.put, MemoryError(), 1, []))
    with pytest.raises(DeviceError, match=r"the memory of cpu ran out \(MemoryError\); cut documents"):
        engine.encode(["A chunk that nobody has seen before, of some length."])
