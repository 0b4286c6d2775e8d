"""Several prompts in one decode loop beside the same prompts one by one."""

from __future__ import annotations

from collections.abc import Callable

from kvpacket_rag.answer import Answer
from kvpacket_rag.bench.clock import median_of_turns
from kvpacket_rag.bench.texts import chunks_of, prompt
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine

_WIDTHS = (4, 8)
_CHUNKS = 2  # of 512 tokens, different ones in every prompt


def throughput(engine: KVPacketEngine, tokens: int, repeats: int) -> dict[str, float]:
    """Prompts of 1,000 tokens of context each: how many times sooner a batch of them is answered, and how many alike.

    Args:
        engine: that answers.
        tokens: of an answer at most.
        repeats: of each width; a median is taken.
    """
    texts = chunks_of(engine, _CHUNKS * _WIDTHS[-1], 512)
    engine.encode(texts)
    prompts = [prompt(texts[start : start + _CHUNKS]) for start in range(0, len(texts), _CHUNKS)]
    settings = GenerationSettings(max_new_tokens=tokens)
    answers: dict[int, list[Answer]] = {}

    def answer_all(width: int) -> Callable[[], None]:
        def work() -> None:
            groups = [prompts[start : start + width] for start in range(0, len(prompts), width)]
            answers[width] = [a for group in groups for a in engine.generate_batch(group, settings)]

        return work

    alone, *together = median_of_turns([answer_all(width) for width in (1, *_WIDTHS)], repeats)
    found: dict[str, float] = {"answers_seconds": alone}
    for width, seconds in zip(_WIDTHS, together, strict=True):
        same = [a.token_ids == b.token_ids for a, b in zip(answers[1], answers[width], strict=True)]
        found |= {f"batch_{width}_times_faster": alone / seconds, f"batch_{width}_alike": sum(same) / len(same)}
    return found
