"""``kvpacket ask``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.cli.compare import Comparison, warm_up
from kvpacket_rag.cli.options import (
    add_embedder,
    add_engine,
    add_index,
    add_remote,
    open_index,
    positive,
    require_index,
)
from kvpacket_rag.cli.output import count, facts, show, show_json, source

if TYPE_CHECKING:
    from kvpacket_rag.answer import Answer
    from kvpacket_rag.chunk import Hit
    from kvpacket_rag.decode import GenerationSettings
    from kvpacket_rag.pipeline import KVPacketRAG

SUMMARY = "answer a question from an index"
DESCRIPTION = "Finds the chunks nearest to a question and answers from their packets."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Question, index, and how to answer."""
    parser.add_argument("question", metavar="QUESTION", help="in natural language, in quotes")
    add_index(parser)
    parser.add_argument(
        "-k", metavar="N", type=positive, default=4, help="answer from the N nearest chunks (default: %(default)s)"
    )
    parser.add_argument("--stream", action="store_true", help="print the answer as it is written")
    parser.add_argument(
        "--compare", action="store_true", help="answer the same prompt by full prefill, too, and compare times"
    )
    parser.add_argument(
        "--json", action="store_true", help="print answer, sources, counts and times as one JSON object"
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--max-new-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="end the answer after N tokens (default: %(default)s)",
    )
    decoding.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="of sampling; 0, the default, takes the most likely token",
    )
    decoding.add_argument(
        "--seed", type=int, metavar="N", help="makes sampling repeatable; without effect at temperature 0"
    )
    decoding.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    model = parser.add_argument_group("model")
    add_engine(model)
    add_remote(model)
    add_embedder(model)


def run(args: argparse.Namespace) -> None:
    """Answer."""
    if args.stream and args.json:
        args.usage("--stream prints text as it comes and --json one object; choose one")
    require_index(args.index)
    from kvpacket_rag.decode import GenerationSettings

    settings = GenerationSettings(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, stop=tuple(args.stop), seed=args.seed
    )
    with open_index(args, args.index) as rag:
        if args.compare:
            warm_up(rag, args.k)
        started = time.perf_counter()
        hits = rag.retrieve(args.question, args.k)
        search_seconds = time.perf_counter() - started
        answer = _answer(rag, hits, settings, args)
        prefill = None
        if args.compare:
            prefill = rag.engine.generate(rag.messages(args.question, hits), settings, policy="prefill")
    if args.json:
        show_json(_as_json(args.question, hits, answer, prefill, search_seconds))
    else:
        show(_as_text(hits, answer, prefill, search_seconds))


def _answer(rag: KVPacketRAG, hits: tuple[Hit, ...], settings: GenerationSettings, args: argparse.Namespace) -> Answer:
    """From packets; printed, unless it is to be part of a JSON object."""
    stream = rag.engine.stream(rag.messages(args.question, hits), settings)
    if args.stream:
        for piece in stream:
            show(piece, end="")
        show()
    answer = stream.read_all()
    if not args.stream and not args.json:
        show(answer.text.strip())
    return answer


def _as_text(hits: tuple[Hit, ...], answer: Answer, prefill: Answer | None, search_seconds: float) -> str:
    usage, timings = answer.usage, answer.timings
    lines = [("Source", f"{hit.score:.2f}  {source(hit.chunk)}") for hit in hits]
    lines.append(
        (
            "Tokens",
            f"{usage.packet_tokens:,} reused ({count(usage.chunks_reused, 'chunk')}), "
            + (f"{usage.preamble_tokens:,} of the preamble kept, " if usage.preamble_tokens else "")
            + f"{usage.prefilled_tokens:,} prefilled, {usage.completion_tokens:,} written"
            + (", cut at the limit" if answer.finish_reason == "length" else ""),
        )
    )
    lines += [("Read as text", text) for text in _not_reused(hits, answer)]
    lines.append(
        (
            "Time",
            f"search {_ms(search_seconds)}, load {_ms(timings.load_seconds)}, "
            f"assemble {_ms(timings.assemble_seconds)}, first token after {_ms(timings.ttft_seconds)} "
            f"(search not counted), whole answer {_ms(timings.total_seconds)}",
        )
    )
    if prefill is not None:
        both = Comparison(answer, prefill)
        lines += [
            ("Full prefill", "the same answer" if both.same else prefill.text.strip()),
            (
                "Compared",
                f"first token after {_ms(prefill.timings.ttft_seconds)} by full prefill of the same "
                f"{prefill.usage.prefilled_tokens:,} tokens: {both.ttft_ratio:.1f} times sooner from packets "
                "(both warmed up with another question)",
            ),
        ]
    return "\n" + facts(lines)


def _not_reused(hits: tuple[Hit, ...], answer: Answer) -> Iterator[str]:
    """The chunks of the prompt that did not come from packets, each with the reason."""
    reasons = {miss.packet_id: miss.reason for miss in answer.usage.misses}
    for hit in hits:
        if hit.packet_id not in answer.packet_ids:
            short = f"it has fewer than {MIN_MATCH_TOKENS} tokens or lies within a longer chunk"
            yield f"{hit.chunk.title}: {reasons.get(hit.packet_id, short)}"


def _as_json(
    question: str, hits: tuple[Hit, ...], answer: Answer, prefill: Answer | None, search_seconds: float
) -> dict[str, Any]:
    found: dict[str, Any] = {"question": question, **_answer_json(answer), "sources": [hit.as_source() for hit in hits]}
    found["timings"]["search_seconds"] = search_seconds
    if prefill is not None:
        found["prefill"] = _answer_json(prefill)
        found["ttft_ratio"] = Comparison(answer, prefill).ttft_ratio
    return found


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "answer": answer.text.strip(),
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
        "timings": asdict(answer.timings),
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
