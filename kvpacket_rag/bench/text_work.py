"""Finding chunks in a prompt, and decoding beside a plain loop of transformers."""

from __future__ import annotations

import random
import statistics
import time

from kvpacket_rag.bench import bare
from kvpacket_rag.bench.clock import median_of_turns
from kvpacket_rag.bench.texts import chunks_of, prompt, prompt_ids
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.finder import ChunkFinder


def finding(known: int, label: str, repeats: int) -> dict[str, float]:
    """Seconds to find eight chunks of a prompt among ``known`` ones of about 2,000 characters."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    finder, texts = ChunkFinder(), []
    for number in range(known):
        text = " ".join(draw.choices(words, k=310))
        finder.add(str(number), text)
        if number % max(1, known // 8) == 0:
            texts.append(text)
    question = prompt(texts[:8])[0].content
    (took,) = median_of_turns([lambda: finder.find(question)], 3 * repeats)
    return {f"find_seconds_{label}": took}


def decoding(engine: KVPacketEngine, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds a token of an answer, in one piece and streamed, beside a plain greedy loop over the same prompt."""
    texts = chunks_of(engine, 2, 512)
    engine.encode(texts)
    messages = prompt(texts)
    ids = prompt_ids(engine, messages)

    def one_round() -> tuple[float, float, float]:
        loop = statistics.median(bare.greedy(engine.backbone, ids, tokens))
        return loop, _whole(engine, messages, tokens) / loop, _streamed(engine, messages, tokens) / loop

    rounds = [one_round() for _ in range(repeats + 1)][1:]
    loop, whole, streamed = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "decode_seconds_transformers": loop,
        "decode_over_transformers": whole,
        "stream_over_transformers": streamed,
    }


def _whole(engine: KVPacketEngine, messages: list[Message], tokens: int) -> float:
    """Seconds a token behind the first, the answer in one piece."""
    answer = engine.generate(messages, GenerationSettings(max_new_tokens=tokens))
    seconds = answer.timings.total_seconds - answer.timings.ttft_seconds
    return seconds / max(1, answer.usage.completion_tokens - 1)


def _streamed(engine: KVPacketEngine, messages: list[Message], tokens: int) -> float:
    """The same, read piece by piece and timed by the reader."""
    stream = engine.stream(messages, GenerationSettings(max_new_tokens=tokens))
    next(stream)
    started = time.perf_counter()
    for _ in stream:
        pass
    return (time.perf_counter() - started) / max(1, stream.answer.usage.completion_tokens - 1)
