"""``kvpacket demo``."""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvpacket_rag.cli.compare import Comparison, warm_up
from kvpacket_rag.cli.ingest import contents, encoded
from kvpacket_rag.cli.options import add_engine, open_index, positive
from kvpacket_rag.cli.output import Bar, count, facts, say, show, table
from kvpacket_rag.errors import StoreError

if TYPE_CHECKING:
    from kvpacket_rag.chunk import Hit
    from kvpacket_rag.demo import DemoQuestion
    from kvpacket_rag.documents import Document
    from kvpacket_rag.pipeline import KVPacketRAG

SUMMARY = "answer questions about a small corpus, from packets and by full prefill"
DESCRIPTION = (
    "Builds an index over the handbook, policies and product manual of an invented company, asks it questions, and "
    "measures the time to the first token from packets beside full prefill of the same prompt. A second run starts "
    "from the stored packets."
)
_PREFIX = "demo/"  # of document ids, so that the packets serve whichever folder the package is installed in
_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question with both answers."""

    question: DemoQuestion
    hits: tuple[Hit, ...]
    both: Comparison

    def is_right(self, text: str) -> bool:
        """Whether a text holds the answer as the document words it."""
        return " ".join(self.question.answer.casefold().split()) in " ".join(text.casefold().split())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and how much."""
    parser.add_argument("--index", metavar="DIR", type=Path, help="folder of the index (default: in the user's cache)")
    parser.add_argument(
        "-k", metavar="N", type=positive, default=4, help="answer from the N nearest chunks (default: %(default)s)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="ask only the first N questions")
    add_engine(parser.add_argument_group("model"))


def run(args: argparse.Namespace) -> None:
    """Build, ask, measure."""
    from kvpacket_rag.bench.clock import describe

    folder = args.index or _default_folder()
    args.adapter = args.adapter or "auto"
    with Bar() as bar, open_index(args, folder, bar, reencode=True) as rag:
        foreign = [name for name in rag.index.documents() if not name.startswith(_PREFIX)]
        if foreign:
            raise StoreError(f"the index in {folder} holds other documents ({foreign[0]}); name a folder for the demo")
        documents = list(_documents())
        report = rag.add(documents, bar)
        for name in set(rag.index.documents()) - {document.document_id for document in documents}:
            rag.delete(name)
        show(
            facts(
                [
                    ("Model", rag.engine.model_name),
                    ("Machine", describe(rag.engine.backbone.dtype, rag.engine.backbone.device)),
                    ("Index", f"{folder}: {contents(rag)}"),
                    ("Encoded", encoded(report)),
                ]
            )
        )
        show(_note(rag))
        say("warming up both ways of answering with another question")
        warm_up(rag, args.k)
        asked = []
        for number, question in enumerate(_questions(args.limit), start=1):
            asked.append(_ask(rag, question, args.k))
            show(_block(number, asked[-1]))
    show(_totals(asked))


def _default_folder() -> Path:
    from kvpacket_rag.models import cache_dir

    return cache_dir() / "demo"


def _documents() -> Iterator[Document]:
    from kvpacket_rag.demo import corpus_folder
    from kvpacket_rag.documents import read_documents

    for document in read_documents(corpus_folder(), lambda path, reason: say(f"skipped {path}: {reason}")):
        name = Path(document.document_id).name
        yield replace(document, document_id=_PREFIX + name, metadata={**document.metadata, "source": name})


def _questions(limit: int | None) -> list[DemoQuestion]:
    from kvpacket_rag.demo import questions

    return questions()[:limit]


def _ask(rag: KVPacketRAG, question: DemoQuestion, k: int) -> _Asked:
    from kvpacket_rag.decode import GenerationSettings

    settings = GenerationSettings(max_new_tokens=_ANSWER_TOKENS)
    hits = rag.retrieve(question.question, k)
    messages = rag.messages(question.question, hits)
    packets = rag.engine.generate(messages, settings)
    prefill = rag.engine.generate(messages, settings, policy="prefill")
    return _Asked(question, hits, Comparison(packets, prefill))


def _note(rag: KVPacketRAG) -> str:
    millions = sum(parameter.numel() for parameter in rag.engine.backbone.model.parameters()) / 1e6
    small = (
        " That is very small: it often misreads what stands before it, from packets and by full prefill alike."
        if millions < 1000
        else ""
    )
    return "\n" + textwrap.fill(
        f"The model has {millions:,.0f} million parameters.{small} 'Full prefill' reads the same prompt, token for "
        "token, in the same run.",
        100,
    )


def _block(number: int, asked: _Asked) -> str:
    packets, prefill = asked.both.packets, asked.both.prefill
    usage = packets.usage
    sources = "; ".join(f"{hit.chunk.title} ({hit.score:.2f})" for hit in asked.hits)
    lines = [
        ("Answer", _short(packets.text)),
        ("Full prefill", "the same" if asked.both.same else _short(prefill.text)),
        ("Document says", asked.question.answer),
        ("Sources", sources),
        (
            "Tokens",
            f"{usage.packet_tokens:,} reused from {count(usage.chunks_reused, 'packet')}, "
            f"{usage.preamble_tokens:,} of the preamble kept, {usage.prefilled_tokens:,} prefilled",
        ),
        (
            "First token",
            f"{_ms(packets.timings.ttft_seconds)} from packets, {_ms(prefill.timings.ttft_seconds)} by full prefill",
        ),
    ]
    lines += [("Read again", miss.reason) for miss in usage.misses]
    return f"\n{number}. {asked.question.question}\n{textwrap.indent(facts(lines), '   ')}"


def _totals(asked: Sequence[_Asked]) -> str:
    rows = [[str(number), *_numbers([entry])] for number, entry in enumerate(asked, start=1)]
    rows.append(["median", *_numbers(asked)])
    header = ["question", "reused", "prefilled", "from packets, ms", "full prefill, ms", "times sooner"]
    packets = sum(entry.is_right(entry.both.packets.text) for entry in asked)
    prefill = sum(entry.is_right(entry.both.prefill.text) for entry in asked)
    return (
        "\nTime to the first token, loading packets included, after both ways were warmed up with another question\n\n"
        f"{table(header, rows)}\n\nAnswers with the document's own words: {packets} of {len(asked)} from packets, "
        f"{prefill} of {len(asked)} by full prefill"
    )


def _numbers(asked: Sequence[_Asked]) -> list[str]:
    """Medians of one or several questions."""
    columns = zip(
        *(
            (
                entry.both.packets.usage.packet_tokens,
                entry.both.packets.usage.prefilled_tokens,
                entry.both.packets.timings.ttft_seconds * 1000,
                entry.both.prefill.timings.ttft_seconds * 1000,
                entry.both.ttft_ratio,
            )
            for entry in asked
        ),
        strict=True,
    )
    reused, prefilled, packets, prefill, ratio = (statistics.median(column) for column in columns)
    return [f"{reused:,.0f}", f"{prefilled:,.0f}", f"{packets:,.0f}", f"{prefill:,.0f}", f"{ratio:.1f}"]


def _short(text: str) -> str:
    return textwrap.shorten(text, 200, placeholder=" …") or "(nothing)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
