"""One GPU: the first token from packets on device, host and disk beside full prefill, and how fast packets move.

    python benchmarks/gpu.py [--models llama-3.1-8b qwen3-4b] [--lengths 1024 4096 8192 32768] [--json FILE]

Models have the shape of the named ones and random weights, so nothing is downloaded; time does not depend on what
weights hold. `--models tiny --device cpu --lengths 256` tries the script itself. Answers are compared with the model's
own forward under a block mask, in bfloat16.

Packets are copied to the card on the stream that then reads the question, not layer by layer on one of their own: what
that could gain is at most ``host_ms`` less ``device_ms``, and has not been tried.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.assemble import Assembly
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.models import load_tokenizer
from kvpacket_rag.packet import packet_id
from kvpacket_rag.parts import Part
from kvpacket_rag.prefill import Prefiller
from kvpacket_rag.store import DiskStore, MemoryStore, PacketStore, TieredStore

CHUNK, QUESTION = 512, 32  # tokens
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# kind of model, and the sizes of the named one
SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama-3.1-8b": (
        LlamaConfig,
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"max_position_embeddings": 131072, "rope_parameters": _LLAMA_ROPE},
    ),
    "qwen3-4b": (
        Qwen3Config,
        {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
        | {"max_position_embeddings": 40960, "tie_word_embeddings": True},
    ),
    "tiny": (
        LlamaConfig,
        {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
    ),
}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}  # of all but the tiny one


def load(name: str, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> Backbone:
    """A model of that shape with random weights, in bfloat16."""
    kind, sizes = SHAPES[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(kind(**_HEADS | sizes), dtype=torch.bfloat16)
    return Backbone(model, tokenizer, name)


def median(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds, waiting for the device; one round goes before."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(1000 * (time.perf_counter() - started))
    return statistics.median(found[1:])


def first_tokens(backbone: Backbone, length: int, repeats: int, folder: str) -> dict[str, float]:
    """Milliseconds to the first token: packets from each tier, and full prefill of the same tokens."""
    encoder = PacketEncoder(backbone, Adapter.empty(backbone.hidden_size), sink=0)
    device, size = backbone.device, int(backbone.model.config.vocab_size)
    draw = torch.Generator().manual_seed(length)
    chunks = [torch.randint(size, (CHUNK,), generator=draw).tolist() for _ in range(length // CHUNK or 1)]
    names = [packet_id(ids, encoder.signature) for ids in chunks]
    question = Part.of_text(torch.randint(size, (QUESTION,), generator=draw).tolist())
    disk, memory = DiskStore(f"{folder}/{backbone.name}-{length}"), MemoryStore()
    for packet in encoder.encode(list(zip(names, chunks, strict=True))):
        for store in (disk, memory):
            store.put(packet, packet.packet_id)
    host = TieredStore(memory, host_bytes=2 * memory.size_bytes, device=device)
    stores: dict[str, PacketStore] = {"host": host, "disk": disk}
    if device.type == "cuda":
        stores["device"] = TieredStore(memory, device_bytes=2 * memory.size_bytes, device=device)

    def run(store: PacketStore, as_packets: bool) -> torch.Tensor:
        for context in backbone.pool._idle:  # so that none is gone on with
            context.filled = ()
        parts = [Part("", CHUNK, name if as_packets else None, ids) for name, ids in zip(names, chunks, strict=True)]
        filled = Prefiller(backbone, encoder, store).run([*parts, question], 1)
        backbone.pool.give_back(filled.context)
        return filled.logits

    found = {f"{name}_ms": median(lambda s=store: run(s, True), device, repeats) for name, store in stores.items()}
    found["full_prefill_ms"] = median(lambda: run(memory, False), device, max(1, repeats // 3))
    packets = [memory.get(name, encoder.signature) for name in names]
    found |= assembly(backbone, stores.get("device", memory), packets, repeats)
    if length <= 4096:
        found["error"] = exactness(backbone, chunks, question.ids or [], run(disk, True))
    disk.close()
    return found


def assembly(backbone: Backbone, store: PacketStore, packets: list[Any], repeats: int) -> dict[str, float]:
    """Realigning packets that are on the device, in parts of the rate of a plain copy there."""
    near = [store.get(packet.packet_id, packet.signature) for packet in packets]
    context = backbone.pool.take(sum(packet.span for packet in packets))

    def assemble() -> None:
        context.num_slots, context.num_positions = 0, 7
        assembly = Assembly(context)
        for packet in near:
            assembly.add(packet)
        assembly.write()

    def copy() -> None:
        for number, packet in enumerate(near):
            for buffer, tensor in zip(context.buffers, packet.tensors, strict=True):
                buffer[:, 0, :, CHUNK * number : CHUNK * (number + 1)].copy_(tensor)

    turned, copied = (median(work, backbone.device, 3 * repeats) for work in (assemble, copy))
    size = sum(packet.size_bytes for packet in packets)
    return {"assembly_over_copy": copied / turned, "assembly_gb_s": size / turned / 1e6}


@torch.inference_mode()
def exactness(backbone: Backbone, chunks: list[list[int]], question: list[int], found: torch.Tensor) -> float:
    """Largest error of the logits against one forward under a block mask, in parts of the largest logit."""
    ids = torch.tensor([i for part in (*chunks, question) for i in part], device=backbone.device)
    block = torch.repeat_interleave(
        torch.arange(len(chunks) + 1), torch.tensor([len(part) for part in (*chunks, question)])
    ).to(backbone.device)
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool, device=backbone.device).tril()
    mask = causal & ((block[:, None] == block[None]) | (block[:, None] == len(chunks)))
    with backbone.reading(
        backbone.embed(ids.tolist())[None], mask, torch.arange(len(ids), device=ids.device)
    ) as logits:
        expected = logits[0, -1].float()
    return float((found[0].float() - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["llama-3.1-8b", "qwen3-4b"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer, device, rows = load_tokenizer("smollm2-135m-instruct"), torch.device(options.device), []
    print(describe(torch.bfloat16, device))
    for name in options.models:
        backbone = load(name, device, tokenizer)
        for length in options.lengths:
            with tempfile.TemporaryDirectory() as folder:
                found = first_tokens(backbone, length, options.repeats, folder)
            rows.append({"model": name, "context_tokens": length, **found})
            print(name, length, "  ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
        del backbone
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
