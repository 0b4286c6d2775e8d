"""Time to the first token, assembly, ingest and memory, each beside what it is compared with.

    python benchmarks/serving.py [--dtype float32] [--chunks 8] [--tokens 512] [--repeats 7] [--json FILE]

Every ratio comes from one run, its two sides measured in turns. The model is SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from machine import chunks_of, describe, median_of_turns
from transformers import DynamicCache

from kvpacket_rag import DiskStore, GenerationSettings, KVPacketEngine, Message
from kvpacket_rag.backbone import Backbone

ONE = GenerationSettings(max_new_tokens=1)
QUESTION = "In which document is the calibration of a probe described?"


def prompt(texts: list[str]) -> list[Message]:
    """As a retrieval chain would send it."""
    return [Message("user", "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}")]


def first_token(engine: KVPacketEngine, texts: list[str], repeats: int) -> dict[str, float]:
    """TTFT from packets on warm disk, of full prefill, and of the question alone over a finished context."""
    messages = prompt(texts)
    names = engine.encode(texts)
    packets = [engine.store.get(name, engine.signature) for name in names]
    backbone = engine.backbone
    context = backbone.pool.take(sum(p.span for p in packets) + 256)
    for packet in packets:
        context.place(packet)
    question = backbone.token_ids(f"\n\nQuestion: {QUESTION}<|im_end|>\n<|im_start|>assistant\n", plain=False)
    bound, slots, positions = backbone.bind(context), context.num_slots, context.num_positions

    def floor() -> object:
        context.num_slots, context.num_positions = slots, positions
        return backbone.prefill(bound, [(context.reserve(len(question)), question)]).argmax()

    from_packets, question_only = median_of_turns([lambda: engine.generate(messages, ONE), floor], repeats)
    answer = engine.generate(messages, ONE)
    (full,) = median_of_turns([lambda: engine.generate(messages, ONE, policy="prefill")], max(2, repeats // 3))
    if answer.usage.chunks_reused != len(texts):
        raise SystemExit(f"only {answer.usage.chunks_reused} of {len(texts)} chunks were reused: {answer.usage.misses}")
    return {
        "ttft_packets": from_packets,
        "ttft_floor": question_only,
        "ttft_full_prefill": full,
        "ttft_over_floor": from_packets / question_only,
        "speedup": full / from_packets,
        "context_tokens": float(slots),
        "prefilled_tokens": float(answer.usage.prefilled_tokens),
    }


def assembly(engine: KVPacketEngine, texts: list[str], repeats: int) -> dict[str, float]:
    """Realign and copy into a reused buffer, beside a plain copy of the same bytes into the same buffer."""
    packets = [engine.store.get(name, engine.signature) for name in engine.encode(texts)]
    pool = engine.backbone.pool
    context = pool.take(sum(p.span for p in packets))
    plain = [tuple(t.clone() for t in p.tensors) for p in packets]

    def assemble() -> None:
        context.num_slots, context.num_positions = 0, 7  # 7: so that the first packet is turned as well
        for packet in packets:
            context.place(packet)

    def copy() -> None:
        slot = 0
        for tensors in plain:
            for buffer, tensor in zip(context.buffers, tensors, strict=True):
                buffer[:, 0, :, slot : slot + tensor.shape[2]].copy_(tensor)
            slot += tensors[0].shape[2]

    seconds, floor = median_of_turns([assemble, copy], 3 * repeats)
    size = sum(p.size_bytes for p in packets)
    return {
        "assembly_over_memcpy": floor / seconds,
        "assembly_gb_s": size / seconds / 1e9,
        "copy_gb_s": size / floor / 1e9,
    }


def ingest(engine: KVPacketEngine, texts: list[str], repeats: int) -> dict[str, float]:
    """Tokens a second of storing packets on disk, beside bare batched prefill of the same chunks."""
    backbone = engine.backbone
    ids = [backbone.token_ids(t) for t in texts]
    tokens = sum(map(len, ids))
    rows = sorted((torch.tensor(i) for i in ids), key=len, reverse=True)
    batch = max(1, engine.encoder.max_batch_tokens // len(rows[0]))

    def store_all() -> None:
        with tempfile.TemporaryDirectory() as folder:
            KVPacketEngine(backbone, DiskStore(folder), engine.encoder.adapter).encode(texts)

    def bare() -> None:
        for start in range(0, len(rows), batch):
            _bare_prefill(backbone, rows[start : start + batch])

    stored, prefilled = median_of_turns([store_all, bare], repeats)
    return {
        "ingest_tokens_s": tokens / stored,
        "prefill_tokens_s": tokens / prefilled,
        "ingest_over_prefill": prefilled / stored,
    }


@torch.inference_mode()
def _bare_prefill(backbone: Backbone, rows: list[torch.Tensor]) -> None:
    inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(backbone.device)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long().to(backbone.device)
    whole = bool(mask.all())
    backbone.model(
        input_ids=inputs, attention_mask=None if whole else mask, cache=DynamicCache(), use_cache=True, logits_to_keep=1
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = KVPacketEngine.load(store=folder, dtype=options.dtype, device=options.device)
        texts = chunks_of(engine.token_ids, engine.backbone.decode, options.tokens)[: options.chunks]
        found: dict[str, float | str] = {"machine": describe(engine.backbone.dtype, engine.backbone.device)}
        found["sizes"] = f"{len(texts)} chunks of {statistics.mean(map(engine.count_tokens, texts)):.0f} tokens"
        for part in (first_token, assembly, ingest):
            found |= part(engine, texts, options.repeats)
    for key, value in found.items():
        print(f"{key:22} {value:.4g}" if isinstance(value, float) else f"{key:22} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
