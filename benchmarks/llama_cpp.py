"""Full prefill by llama.cpp beside packets and transformers, from one GGUF file, in turns.

    pip install xllamacpp
    python benchmarks/llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf --threads 2

llama.cpp computes with the file's own few bits, kvpacket and transformers with the same weights restored. The wheels
of xllamacpp are built for any processor with AVX2; the line that is printed says what the one at hand makes use of.
A build for the processor itself is quicker, so this is no measure of llama.cpp at its best.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import xllamacpp

from kvpacket_rag.bench import bare
from kvpacket_rag.bench.clock import describe, median_of_turns
from kvpacket_rag.bench.first_token import CHUNK_TOKENS, ONE
from kvpacket_rag.bench.texts import chunks_of, in_turns, prompt, prompt_ids
from kvpacket_rag.cli.output import table
from kvpacket_rag.engine import KVPacketEngine


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf", type=Path, help="weights that llama.cpp reads")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the same, as kvpacket knows it")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 8, 14], help="of 512 tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def llama_cpp(gguf: Path, threads: int, num_tokens: int) -> xllamacpp.Server:
    """A server inside this process that reads prompts of up to so many tokens."""
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.warmup = num_tokens, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def main() -> None:
    """Measure and print."""
    args = read_arguments()
    torch.set_num_threads(args.threads)
    server = llama_cpp(args.gguf, args.threads, CHUNK_TOKENS * (max(args.chunks) + 1))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engine = KVPacketEngine.load(args.model, store=folder)
        for chunks in args.chunks:
            texts = chunks_of(engine, chunks, CHUNK_TOKENS)
            engine.encode(texts)
            ids, turns = prompt_ids(engine, prompt(texts)), in_turns(texts)
            request = {"prompt": ids, "n_predict": 1, "cache_prompt": False, "temperature": 0}

            def peer(request: dict[str, object] = request, expected: int = len(ids)) -> None:
                found = server.handle_completions(request)
                if found["timings"]["prompt_n"] != expected:
                    raise RuntimeError(f"llama.cpp read {found['timings']['prompt_n']} tokens, expected {expected}")

            works = [
                lambda turns=turns: engine.generate(next(turns), ONE),
                peer,
                lambda ids=ids: bare.prefill(engine.backbone, ids),
            ]
            packets, llama, plain = median_of_turns(works, args.repeats)
            figures = f"{1e3 * packets:.0f}", f"{1e3 * llama:.0f}", f"{1e3 * plain:.0f}", f"{llama / packets:.1f}"
            rows.append([str(len(ids)), *figures])
        print(describe(engine.backbone.dtype, engine.backbone.device))
    print(f"llama.cpp: {xllamacpp.get_system_info()}")
    print(table(["tokens", "packets, ms", "llama.cpp, ms", "transformers, ms", "llama.cpp / packets"], rows))


if __name__ == "__main__":
    main()
