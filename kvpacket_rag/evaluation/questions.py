"""From samples of a data set to prompts that methods are measured on."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.datasets.sample import QASample, SourceText
from kvpacket_rag.datasets.select import cut_documents, select_documents
from kvpacket_rag.datasets.templates import PIPELINE_STYLE, STYLES, PromptStyle
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import DocumentError, PromptError
from kvpacket_rag.evaluation.case import Case
from kvpacket_rag.parts import Part, absorb, parts_of


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How prompts are made.

    Attributes:
        max_chunks: the most chunks of a prompt, unless more are supporting; None for all documents.
        chunk_tokens: the most tokens of a chunk; None for whole documents.
        max_new_tokens: of an answer.
        style: name of the prompt's layout, one of :data:`kvpacket_rag.datasets.templates.STYLES`.
        seed: of distractors and order.
        gold_positions: places at which the first supporting chunk is put, from 0; each is a prompt of its own. Empty
            for a random place.

    Raises:
        PromptError: there is no such style.
    """

    max_chunks: int | None = 10
    chunk_tokens: int | None = 256
    max_new_tokens: int = 32
    style: str = PIPELINE_STYLE.name
    seed: int = 0
    gold_positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.layout()

    def layout(self) -> PromptStyle:
        """The style itself."""
        for style in STYLES:
            if style.name == self.style:
                return style
        raise PromptError(f"there is no style {self.style!r}; known are {', '.join(style.name for style in STYLES)}")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to measure methods on, and what is known about it.

    Attributes:
        sample: it was made from.
        gold_position: place of the first supporting chunk if it was set, else None.
        num_chunks: in the prompt, those that packets can stand for.
        num_short: documents with too few tokens for that; all methods read them as text, but the one without context.
        case: what methods read.
    """

    sample: QASample
    gold_position: int | None
    num_chunks: int
    num_short: int
    case: Case

    @property
    def name(self) -> str:
        """The sample's id, and the place of the supporting chunk if it was set."""
        return _name(self.sample, self.gold_position)


def _name(sample: QASample, place: int | None) -> str:
    return sample.sample_id if place is None else f"{sample.sample_id} (gold at {place})"


def make_questions(
    backbone: Backbone,
    samples: Sequence[QASample],
    settings: PromptSettings,
    on_skip: Callable[[str, str], None] | None = None,
) -> Iterator[Question]:
    """Prompts of samples, in their order, with every place of the supporting chunk that is asked for and exists.

    Which distractors stand in which order depends on the seed and the sample alone.

    Args:
        backbone: whose tokenizer and template are used.
        samples: to make prompts of.
        settings: of the prompts.
        on_skip: told the name of a prompt that cannot be made, and why; without it a chunk that cannot be used is an
            error, and places that do not exist are passed over.

    Raises:
        DatasetError: a setting is out of its range.
        DocumentError: a chunk holds more than the model's window.
        PromptError: the model's chat template refuses the prompt.
    """
    for sample in samples:
        for place in settings.gold_positions or (None,):
            if reason := _missing(sample, settings, place):
                if on_skip is not None:
                    on_skip(_name(sample, place), reason)
                continue
            try:
                yield _question(backbone, sample, _documents(sample, settings, place), settings, place)
            except DocumentError as error:
                if on_skip is None:
                    raise
                on_skip(_name(sample, place), str(error))


def _missing(sample: QASample, settings: PromptSettings, place: int | None) -> str:
    """Why a sample has no documents to show, or none to put at that place; empty if it has."""
    supporting = sum(document.is_supporting for document in sample.documents)
    chosen = min(len(sample.documents), max(settings.max_chunks or len(sample.documents), supporting))
    if not chosen:
        return "it has no documents"
    if place is None:
        return ""
    if not supporting:
        return "none of its documents is marked as supporting, so none can be put at a place"
    return "" if place < chosen else f"place {place} is behind the last of its documents"


def _documents(sample: QASample, settings: PromptSettings, place: int | None) -> list[SourceText]:
    """What stands in the prompt."""
    count = settings.max_chunks or len(sample.documents)
    return select_documents(sample, random.Random(f"{settings.seed} {sample.sample_id}"), count, gold_position=place)


def _question(
    backbone: Backbone,
    sample: QASample,
    documents: Sequence[SourceText],
    settings: PromptSettings,
    place: int | None,
) -> Question:
    if settings.chunk_tokens is None:
        chunks = [document.text.strip() for document in documents]
    else:
        chunks = cut_documents(documents, sample.answers, backbone.token_ids, settings.chunk_tokens)
    titles = [document.title for document in documents]
    messages = settings.layout().messages(chunks, sample.question, titles)
    case = Case.from_chat(backbone, messages, chunks, sample.answers, settings.max_new_tokens)
    case = replace(case, sample_id=sample.sample_id, bare=_bare(backbone, settings, sample, titles))
    num_chunks = sum(part.packet_id is not None for part in case.parts)
    num_short = sum(len(backbone.token_ids(chunk.strip())) < MIN_MATCH_TOKENS for chunk in chunks)
    return Question(sample, place, num_chunks, num_short, case)


def _bare(backbone: Backbone, settings: PromptSettings, sample: QASample, titles: Sequence[str]) -> list[Part]:
    """The prompt without documents: words that stand nowhere else take their places and are left out."""
    marks = [f"document {secrets.token_hex(8)}" for _ in titles]
    encoder = PacketEncoder(backbone, Adapter.empty(backbone.hidden_size))
    messages = settings.layout().messages(marks, sample.question, titles)
    return [part for part in absorb(parts_of(encoder, messages, marks, min_tokens=1)) if part.packet_id is None]
