"""How far answers from bare packets are from full prefill, by the number of sink tokens.

    python benchmarks/sink.py [-k 4] [--sinks 0,1,4] [--dtype bfloat16] [--chunk-tokens 256]

For every question of the demo: the full-prefill greedy answer, then the divergence of each kind of packet
from full prefill along that same answer, KL(full prefill || packets) in nats a token, and how often the most
likely token agrees.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import torch
from torch import Tensor

from kvpacket_rag import GenerationSettings, KVPacketEngine, KVPacketRAG, Message, read_documents
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.demo import corpus_folder, questions
from kvpacket_rag.reading import Policy

ANSWER = GenerationSettings(max_new_tokens=24)


def log_probabilities(engine: KVPacketEngine, messages: list[Message], answer: list[int], policy: Policy) -> Tensor:
    """(tokens of the answer, vocabulary), each given the prompt and the answer so far."""
    backbone = engine.backbone
    parts, _ = engine._reader.read(messages, policy, None)
    filled = engine._prefiller.run(parts, len(answer))
    rows = [filled.logits]
    rows += [backbone.step(filled.bound, filled.context, token) for token in answer[:-1]]
    backbone.pool.give_back(filled.context)
    return torch.cat(rows).float().log_softmax(-1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--sinks", default="0,1,4")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    options = parser.parse_args()
    sinks = [int(n) for n in options.sinks.split(",")]
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in sinks}
    with tempfile.TemporaryDirectory() as folder:
        rag = KVPacketRAG.open(folder, adapter=None, chunk_tokens=options.chunk_tokens, dtype=options.dtype)
        rag.add(read_documents(corpus_folder(), on_skip=lambda path, reason: None))
        backbone = rag.engine.backbone
        engines = {n: KVPacketEngine(backbone, sink=n) for n in sinks}
        for question in questions():
            hits = rag.retrieve(question.question, options.k)
            messages = rag.messages(question.question, hits)
            answer = list(rag.engine.generate(messages, ANSWER, policy="prefill").token_ids)
            full = log_probabilities(rag.engine, messages, answer, "prefill")
            for n, engine in engines.items():
                engine.encode([hit.chunk.text for hit in hits])
                ours = log_probabilities(engine, messages, answer, "packets")
                kl = (full.exp() * (full - ours)).sum(-1).mean()
                found[n].append((float(kl), float((full.argmax(-1) == ours.argmax(-1)).float().mean())))
        print(describe(backbone.dtype, backbone.device))
        print(f"{len(questions())} questions, {options.k} chunks of at most {options.chunk_tokens} tokens")
        for n, rows in found.items():
            kl, agreement = (statistics.mean(column) for column in zip(*rows, strict=True))
            print(f"sink {n}: KL {kl:.3f} nats a token, agreement {agreement:.2f}")
        rag.close()


if __name__ == "__main__":
    main()
