"""Time to the first token: packets from warm disk, the question alone, full prefill, and a prefix that is reused."""

from __future__ import annotations

from kvpacket_rag.bench import bare
from kvpacket_rag.bench.clock import median_of_turns
from kvpacket_rag.bench.texts import QUESTION, chunks_of, in_turns, prompt, prompt_ids
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError

CHUNK_TOKENS = 512
ONE = GenerationSettings(max_new_tokens=1)
_SYSTEM = "You answer from the documents you are given, in one sentence, and say so where they hold no answer. " * 6


def over_floor(engine: KVPacketEngine, chunks: int, repeats: int) -> dict[str, float]:
    """Packets on warm disk beside the question alone over a finished context, and the same hits asked again."""
    texts = _stored(engine, chunks)
    messages = prompt(texts)
    packets = [engine.store.get(name, engine.signature) for name in engine.encode(texts)]
    backbone = engine.backbone
    context = backbone.pool.take(sum(packet.span for packet in packets) + 256)
    for packet in packets:
        context.place(packet)
    question = backbone.token_ids(f"\n\nQuestion: {QUESTION}<|im_end|>\n<|im_start|>assistant\n", plain=False)
    bound, slots, positions = backbone.bind(context), context.num_slots, context.num_positions

    def floor() -> object:
        context.num_slots, context.num_positions = slots, positions
        return backbone.prefill(bound, [(context.reserve(len(question)), question)]).argmax()

    turns = in_turns(texts)
    from_packets, alone = median_of_turns([lambda: engine.generate(next(turns), ONE), floor], repeats)
    (same_hits,) = median_of_turns([lambda: engine.generate(messages, ONE)], repeats)
    backbone.pool.give_back(context)
    return {
        "context_tokens": slots,
        "ttft_packets": from_packets,
        "ttft_packets_same_hits": same_hits,
        "ttft_floor": alone,
        "ttft_over_floor": from_packets / alone,
    }


def speedup(engine: KVPacketEngine, chunks: int, label: str, repeats: int) -> dict[str, float]:
    """Full prefill beside packets at a length of context; transformers' own prefill and prefix reuse stand by.

    Args:
        engine: its store on disk.
        chunks: of 512 tokens each.
        label: of the context's length, such as ``"4k"``.
        repeats: of the fast side; full prefill is measured a third as often.
    """
    texts = _stored(engine, chunks)
    messages = prompt(texts)
    ids = prompt_ids(engine, messages)
    question = engine.token_ids(f"\n\nQuestion: {QUESTION}")
    answer = engine.generate(messages, ONE)
    if answer.usage.chunks_reused != chunks:
        raise KVPacketError(f"only {answer.usage.chunks_reused} of {chunks} chunks were reused: {answer.usage.misses}")
    slow = [lambda: engine.generate(messages, ONE, policy="prefill"), lambda: bare.prefill(engine.backbone, ids)]
    full, plain = median_of_turns(slow, max(1, repeats // 3))
    cache = bare.prefill(engine.backbone, ids[: -len(question)])
    turns = in_turns(texts)
    quick = [lambda: engine.generate(next(turns), ONE), lambda: bare.prefill_behind(engine.backbone, cache, question)]
    from_packets, prefix = median_of_turns(quick, repeats)
    return {
        f"ttft_packets_{label}": from_packets,
        f"ttft_full_prefill_{label}": full,
        f"ttft_transformers_{label}": plain,
        f"ttft_transformers_prefix_{label}": prefix,
        f"speedup_{label}": full / from_packets,
    }


def preamble(engine: KVPacketEngine, repeats: int) -> dict[str, float]:
    """Seconds that a system prompt adds which an earlier request had, too."""
    texts = _stored(engine, 2)
    works = [
        lambda: engine.generate(prompt(texts, _SYSTEM), ONE),
        lambda: engine.generate(prompt(texts, "Answer."), ONE),
    ]
    long, short = median_of_turns(works, 3 * repeats)
    return {"preamble_tokens": engine.count_tokens(_SYSTEM), "preamble_seconds": long - short}


def _stored(engine: KVPacketEngine, chunks: int) -> list[str]:
    texts = chunks_of(engine, chunks, CHUNK_TOKENS)
    engine.encode(texts)
    return texts
