"""From samples of a data set to prompts that methods are measured on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.datasets.sample import QASample, SourceText
from kvpacket_rag.datasets.select import cut_documents, select_documents
from kvpacket_rag.datasets.templates import PIPELINE_STYLE, STYLES, PromptStyle
from kvpacket_rag.errors import DocumentError, PromptError
from kvpacket_rag.evaluation.case import Case


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
        num_chunks: in the prompt.
        case: what methods read.
    """

    sample: QASample
    gold_position: int | None
    num_chunks: int
    case: Case


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
        on_skip: told the id of a sample with a chunk that cannot be used, and why; without it that is an error.

    Raises:
        DatasetError: a setting is out of its range.
        DocumentError: a chunk holds more than the model's window.
        PromptError: the model's chat template refuses the prompt.
    """
    for sample in samples:
        for place in settings.gold_positions or (None,):
            documents = _documents(sample, settings, place)
            if not documents:
                continue
            try:
                yield _question(backbone, sample, documents, settings, place)
            except DocumentError as error:
                if on_skip is None:
                    raise
                on_skip(sample.sample_id, str(error))


def _documents(sample: QASample, settings: PromptSettings, place: int | None) -> list[SourceText]:
    """What stands in the prompt; nothing where the supporting document cannot stand at that place."""
    count = settings.max_chunks or len(sample.documents)
    supporting = sum(document.is_supporting for document in sample.documents)
    chosen = min(len(sample.documents), max(count, supporting))
    if place is not None and not (supporting and place < chosen):
        return []
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
    messages = settings.layout().messages(chunks, sample.question, [document.title for document in documents])
    case = Case.from_chat(backbone, messages, chunks, sample.answers, settings.max_new_tokens)
    return Question(sample, place, len(chunks), replace(case, sample_id=sample.sample_id))
