"""Copies: assembly beside a plain memory copy, ingest beside bare prefill, and the memory a request holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch

from kvpacket_rag.assemble import Assembly, ContextPool
from kvpacket_rag.bench import bare
from kvpacket_rag.bench.clock import median_of_turns
from kvpacket_rag.bench.texts import chunks_of, prompt
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.packet import Packet
from kvpacket_rag.store import DiskStore, MemoryStore


def assembly(engine: KVPacketEngine, chunks: int, repeats: int) -> dict[str, float]:
    """Realigning into a reused buffer beside a plain copy of the same bytes into it, in both number formats."""
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        turned, copied, size = _assemble(engine, chunks, dtype, 3 * repeats)
        found |= {f"assembly_over_memcpy_{name}": copied / turned, f"assembly_gb_s_{name}": size / turned / 1e9}
    return {"assembly_over_memcpy": min(v for k, v in found.items() if "memcpy" in k), **found}


def _assemble(engine: KVPacketEngine, chunks: int, dtype: torch.dtype, repeats: int) -> tuple[float, float, int]:
    """Seconds of realigning, seconds of copying, and bytes."""
    plan, device = engine.backbone.plan, engine.backbone.device
    shapes = [(len(group.layers), group.heads, 512, group.width) for group in plan.groups]
    signature = replace(engine.signature, dtype=str(dtype).removeprefix("torch."), quantization="none")
    packets = [
        Packet(str(number), signature, tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes), 512, 512)
        for number in range(chunks)
    ]
    context = ContextPool(plan, dtype, device).take(512 * chunks)

    def assemble() -> None:
        context.num_slots, context.num_positions = 0, 7  # 7: so that the first packet is turned as well
        assembly = Assembly(context)
        for packet in packets:
            assembly.add(packet)
        assembly.write()

    def copy() -> None:
        for number, packet in enumerate(packets):
            for buffer, tensor in zip(context.buffers, packet.tensors, strict=True):
                buffer[:, 0, :, 512 * number : 512 * (number + 1)].copy_(tensor)

    turned, copied = median_of_turns([assemble, copy], repeats)
    return turned, copied, sum(packet.size_bytes for packet in packets)


def ingest(engine: KVPacketEngine, chunks: int, repeats: int) -> dict[str, float]:
    """Storing packets on disk beside bare batched prefill of the same chunks."""
    backbone = engine.backbone
    texts = chunks_of(engine, chunks, 512)
    rows = sorted((backbone.token_ids(text) for text in texts), key=len, reverse=True)
    batch = max(1, engine.encoder.max_batch_tokens // len(rows[0]))

    def store_all() -> None:
        with tempfile.TemporaryDirectory() as folder:
            fresh = KVPacketEngine(backbone, DiskStore(folder), engine.encoder.adapter)
            fresh.encode(texts)
            fresh.close()

    def read_all() -> None:
        for start in range(0, len(rows), batch):
            bare.prefill_batch(backbone, rows[start : start + batch])

    stored, read = median_of_turns([store_all, read_all], max(1, repeats // 2))
    tokens = sum(map(len, rows))
    return {"ingest_tokens_s": tokens / stored, "ingest_over_prefill": read / stored}


def peak(engine: KVPacketEngine, chunks: int) -> dict[str, float]:
    """Bytes a request allocates and holds at its peak, the model's own intermediates among them, by context bytes.

    Packets are in memory meanwhile: they are stored, not held by the request.
    """
    texts = chunks_of(engine, chunks, 512)
    held = KVPacketEngine(engine.backbone, MemoryStore(), engine.encoder.adapter)
    held.encode(texts)
    pool, settings = engine.backbone.pool, GenerationSettings(max_new_tokens=1)
    held.generate(prompt(texts), settings)  # keeps the preamble
    pool.drop_idle()
    highest = _peak_bytes(lambda: held.generate(prompt(texts), settings), engine.backbone.device)
    packets = [held.store.get(name, held.signature) for name in held.encode(texts)]
    return {"peak_over_context": highest / sum(packet.size_bytes for packet in packets)}


def _peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most that torch holds during ``work`` above what it held before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0)
