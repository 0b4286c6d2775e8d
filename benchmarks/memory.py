"""Peak memory of one question, and the time to open a large index.

    python benchmarks/memory.py [--dtype float32] [--chunks 8] [--tokens 512] [--rows 10000]

The question runs in a process of its own, through the same pipeline as ``kvpacket ask``; its peak
resident memory (file-mapped pages included) stands beside weights, context bytes and the budget
weights + 2.5 x context + 300 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

from kvpacket_rag import Chunk, DiskStore, Document, GenerationSettings, KVPacketRAG, PacketIndex, read_documents
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.demo import corpus_folder

MB = 1e6


def ask(folder: str, chunks: int) -> None:
    """In the measured process: open, ask, report."""
    import sentence_transformers  # noqa: F401 - as opening the index will
    import transformers.modeling_utils  # noqa: F401

    libraries = _peak_bytes()
    rag = KVPacketRAG.open(folder)
    found = rag.ask("How is a probe calibrated?", k=chunks, settings=GenerationSettings(max_new_tokens=8))
    pool = rag.engine.backbone.pool
    print(
        json.dumps(
            {
                "libraries": libraries,
                "reused": found.answer.usage.chunks_reused,
                "weights": sum(p.nbytes for p in rag.engine.backbone.model.parameters()),
                "context": sum(b.nbytes for context in pool._idle for b in context.buffers),
                "prompt_tokens": found.answer.usage.prompt_tokens,
                "peak": _peak_bytes(),
            }
        )
    )


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def open_large_index(rows: int) -> tuple[float, float]:
    """Seconds to open an index of ``rows`` chunks beside its store, and to answer its first search."""
    with tempfile.TemporaryDirectory() as folder:
        index = PacketIndex.open(folder)
        vectors = np.random.default_rng(0).standard_normal((rows, 384), dtype=np.float32)
        texts = [f"chunk {n} " + "words of an ordinary length " * 60 for n in range(rows)]
        index.add([Chunk(str(n), t) for n, t in enumerate(texts)], vectors, [f"{n:064x}" for n in range(rows)])
        index.close()
        DiskStore(folder).close()
        started = time.perf_counter()
        index, store = PacketIndex.open(folder), DiskStore(folder)
        opened = time.perf_counter()
        index.search(vectors[0], k=8)
        searched = time.perf_counter()
        index.close()
        store.close()
    return opened - started, searched - opened


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        ask(options.ask, options.chunks)
        return
    with tempfile.TemporaryDirectory() as folder:
        rag = KVPacketRAG.open(folder, chunk_tokens=options.tokens, dtype=options.dtype)
        print(f"{'machine':22} {describe(rag.engine.backbone.dtype, rag.engine.backbone.device)}")
        documents = read_documents(corpus_folder(), on_skip=lambda path, reason: None)
        rag.add([Document("corpus", "\n\n".join(d.text for d in islice(documents, 2 * options.chunks)))])
        rag.close()
        command = [sys.executable, __file__, "--ask", folder, "--chunks", str(options.chunks)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    budget = found["weights"] + 2.5 * found["context"] + 300 * MB
    print(f"{'chunks reused':22} {found['reused']} of {options.chunks}, {found['prompt_tokens']} tokens of prompt")
    for name in ("libraries", "weights", "context", "peak"):
        print(f"{name:22} {found[name] / MB:.0f} MB")
    print(f"{'budget':22} {budget / MB:.0f} MB; peak is {found['peak'] / budget:.2f} of it")
    opened, searched = open_large_index(options.rows)
    print(f"{'open index':22} {options.rows} chunks in {opened:.3f} s, first search {searched:.3f} s")


if __name__ == "__main__":
    main()
