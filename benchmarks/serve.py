"""What the server adds to the engine: first token and whole answer of one client, and answers a minute of several.

    python benchmarks/serve.py [--model smollm2-135m-instruct] [--chunks 4] [--tokens 32] [--clients 4] [--repeats 9]

Engine and server answer the same prompts in turns and in one process with the client, so that what the client itself
costs counts as the server's.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import uvicorn

from kvpacket_rag import GenerationSettings, KVPacketEngine, Message
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.bench.texts import chunks_of, in_turns
from kvpacket_rag.serving.server.app import ServerSettings, create_app
from kvpacket_rag.serving.server.backend import EngineBackend
from kvpacket_rag.serving.server.calls import Limits

Ask = Callable[[list[Message]], tuple[float, float]]  # seconds to the first piece and to the end


@contextmanager
def serving(engine: KVPacketEngine, threads: int) -> Iterator[str]:
    """The server's address, while the context lasts."""
    app = create_app(EngineBackend(engine, threads=threads), ServerSettings(Limits(("model",))))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        finally:
            server.should_exit = True
            thread.join()


def by_engine(engine: KVPacketEngine, tokens: int) -> Ask:
    """Ask the engine itself."""

    def ask(messages: list[Message]) -> tuple[float, float]:
        started = time.perf_counter()
        stream = engine.stream(messages, GenerationSettings(max_new_tokens=tokens))
        next(stream)
        first = time.perf_counter() - started
        stream.read_all()
        return first, time.perf_counter() - started

    return ask


def by_server(client: httpx.Client, url: str, tokens: int) -> Ask:
    """Ask the server for a stream."""

    def ask(messages: list[Message]) -> tuple[float, float]:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        body = {"model": "model", "messages": turns, "max_tokens": tokens, "stream": True}
        started, first = time.perf_counter(), 0.0
        with client.stream("POST", url, json=body) as response:
            for _ in response.raise_for_status().iter_lines():
                first = first or time.perf_counter() - started
        return first, time.perf_counter() - started

    return ask


def per_minute(ask: Ask, prompts: list[list[Message]], clients: int) -> float:
    """Answers a minute of so many clients at once."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, prompts))
    return 60 * len(prompts) / (time.perf_counter() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    for name, default in (("--chunks", 4), ("--tokens", 32), ("--clients", 4), ("--repeats", 9)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    engine = KVPacketEngine.load(args.model)
    texts = chunks_of(engine, args.chunks, 256)
    engine.encode(texts)
    turns = in_turns(texts)
    with serving(engine, args.clients) as url, httpx.Client(timeout=600) as client:
        asks = [by_engine(engine, args.tokens), by_server(client, url, args.tokens)]
        rounds = [[ask(next(turns)) for ask in asks] for _ in range(args.repeats + 1)][1:]  # the first one warms up
        bare, served = ([1000 * statistics.median(r[side][part] for r in rounds) for part in (0, 1)] for side in (0, 1))
        prompts = [next(turns) for _ in range(2 * args.clients)]
        rates = [[per_minute(ask, prompts, args.clients) for ask in asks] for _ in range(3)]
        alone, over = (statistics.median(rate[side] for rate in rates) for side in (0, 1))
    print(describe(engine.backbone.dtype, engine.backbone.device))
    print(
        f"first token {bare[0]:.1f} ms by the engine, {served[0]:.1f} ms by the server (+{served[0] - bare[0]:.1f}); "
        f"answer of {args.tokens} tokens {bare[1]:.0f} and {served[1]:.0f} ms ({served[1] / bare[1]:.2f}); "
        f"{args.clients} clients at once: {alone:.0f} and {over:.0f} answers a minute ({over / alone:.2f})"
    )


if __name__ == "__main__":
    main()
