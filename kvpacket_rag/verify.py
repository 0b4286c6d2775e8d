"""Whether packets are fit for a model: the laws on its real weights, and how far answers stray from full prefill.

The probe set is small and made here: needles and biographies that are generated, and the demo's documents.
It tells a fitting adapter from a foreign one, no more; ``kvpacket eval`` measures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.datasets.catalogue import open_dataset
from kvpacket_rag.datasets.select import cut, cut_documents, select_documents
from kvpacket_rag.datasets.templates import PIPELINE_STYLE
from kvpacket_rag.demo import corpus_folder, questions
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import AdapterError, UnsupportedModelError
from kvpacket_rag.training.objective import Targets
from kvpacket_rag.training.row import Row, make_row
from kvpacket_rag.training.teacher import Teacher
from kvpacket_rag.training.validation import compare
from kvpacket_rag.verdict import Fidelity, Verdict

_PER_DOMAIN = 6
_CHUNKS = 5
_CHUNK_TOKENS = 110
_ANSWER_TOKENS = 32


def verify(encoder: PacketEncoder) -> Verdict:
    """Measure packets as the encoder makes them, plain concatenation and full prefill on the probe set.

    Args:
        encoder: of an engine; the laws of its model were proved when that was loaded.
    """
    backbone, adapter = encoder.backbone, encoder.adapter
    room = backbone.context_window - _ANSWER_TOKENS
    rows = [row for row in probe_rows(encoder) if row.num_tokens <= room]
    if not rows:
        raise UnsupportedModelError(
            f"{backbone.name} has {backbone.context_window} positions, too few for the probe set"
        )
    teacher = Teacher(backbone, max_new_tokens=_ANSWER_TOKENS)
    targets = [teacher.answer(row) for row in rows]
    bare = Adapter.empty(backbone.hidden_size)
    as_text = [replace(row, context=tuple(replace(part, packet_id=None) for part in row.context)) for row in rows]
    return Verdict(
        backbone.report.error_shift,
        backbone.report.error_packets,
        sum(len(target.answer) for row in targets for target in row),
        _fidelity(backbone, _behind_sinks(encoder) if encoder.sink_ids else adapter, rows, targets),
        _fidelity(backbone, bare, rows, targets),
        _fidelity(backbone, bare, as_text, targets),
        not adapter.is_empty,
    )


def _behind_sinks(encoder: PacketEncoder) -> Adapter:
    """Sink tokens as the header of an adapter that has nothing else: read before a chunk, and left out."""
    if not encoder.adapter.is_empty:
        raise AdapterError("the probe measures an adapter or sink tokens, not both; leave out one of them")
    hidden = encoder.backbone.hidden_size
    about = {"header": "left out", "separators": "kept"}
    return Adapter(encoder.backbone.embed(encoder.sink_ids), torch.zeros(0, hidden), about)


def probe_rows(encoder: PacketEncoder) -> Iterator[Row]:
    """The probe set: five chunks, the one with the answer among them, and a question each."""
    token_ids = encoder.backbone.token_ids
    for name in ("niah", "biography"):
        for sample in open_dataset(name, "dev", seed=7, limit=_PER_DOMAIN):
            documents = select_documents(sample, random.Random(sample.sample_id), _CHUNKS)
            chunks = cut_documents(documents, sample.answers, token_ids, _CHUNK_TOKENS)
            yield make_row(encoder, [PIPELINE_STYLE.messages(chunks, sample.question)], chunks, name)
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(corpus_folder().glob("**/*.md"))}
    for number, asked in enumerate(questions()):
        others = [text for name, text in texts.items() if name != asked.document]
        shown = [others[(number * _CHUNKS + k) % len(others)] for k in range(_CHUNKS - 1)]
        shown.insert(number % _CHUNKS, texts[asked.document])
        chunks = [cut(text, token_ids, _CHUNK_TOKENS, [asked.answer]) for text in shown]
        yield make_row(encoder, [PIPELINE_STYLE.messages(chunks, asked.question)], chunks, "documents")


def _fidelity(
    backbone: Backbone, adapter: Adapter, rows: Sequence[Row], targets: Sequence[Sequence[Targets]]
) -> Fidelity:
    found = [compare(backbone, adapter, row, wanted) for row, wanted in zip(rows, targets, strict=True)]
    divergence, same = (torch.cat(values).float() for values in zip(*found, strict=True))
    return Fidelity(float(divergence.mean()), float(same.mean()))
