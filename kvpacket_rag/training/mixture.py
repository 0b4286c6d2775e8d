"""Rows drawn from several domains: the data of the *universal* adapter.

What users will send is not known, so all that may vary does: the number, length and order of chunks, the
place of the one that holds the answer, the prompt around them, titles inside, between or left out.
Every row follows from a seed and its number alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from kvpacket_rag.datasets.sample import QASample, SourceText
from kvpacket_rag.datasets.select import cut_documents, select_documents
from kvpacket_rag.datasets.templates import QUESTIONS, STYLES
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import DocumentError, PromptError, TrainingError
from kvpacket_rag.training.row import Row, make_row
from kvpacket_rag.training.teacher import ANSWER_TOKENS

logger = logging.getLogger(__name__)
_ATTEMPTS = 20  # to make a row of another sample when one cannot be used


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of data in a mixture.

    Attributes:
        name: for figures apart.
        samples: to draw from.
        weight: of the domain, relative to the others.
    """

    name: str
    samples: Sequence[QASample]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How large rows are.

    Attributes:
        max_chunks: the most chunks, unless more hold the answer.
        min_chunk_tokens: lowest token budget of a chunk.
        max_chunk_tokens: highest; each row draws its own.
        context_tokens: chunks that would take more together are made shorter, then fewer.
        questions: put to each row: the sample's own, and others about its documents.
    """

    max_chunks: int = 10
    min_chunk_tokens: int = 40
    max_chunk_tokens: int = 160
    context_tokens: int = 560
    questions: int = 3

    def __post_init__(self) -> None:
        fits = 1 <= self.min_chunk_tokens <= self.max_chunk_tokens and self.context_tokens >= self.min_chunk_tokens
        if not (fits and self.max_chunks >= 1 and 1 <= self.questions <= len(QUESTIONS) + 1):
            raise TrainingError(
                f"rows cannot be made in the shape {asdict(self)}; expected max_chunks of 1 or more, 1 to "
                f"{len(QUESTIONS) + 1} questions, and min_chunk_tokens up to both max_chunk_tokens and context_tokens"
            )


class Mixture:
    """Endless rows by number.

    Args:
        encoder: knows the tokenizer, and the soft tokens that rows have to have room for.
        domains: at least one, each with samples.
        shape: of the rows.
        seed: of all draws.
        pool: number of different rows; they come again in the same order, so that the teacher's answers are reused.
    """

    def __init__(
        self,
        encoder: PacketEncoder,
        domains: Sequence[Domain],
        shape: Shape | None = None,
        seed: int = 0,
        pool: int = 0,
    ) -> None:
        empty = [d.name for d in domains if not d.samples or not 0 < d.weight < math.inf]
        if empty or not domains:
            raise TrainingError(
                f"nothing to draw from: {', '.join(empty) or 'no domains'}; give samples and a weight above 0"
            )
        self._encoder, self._domains = encoder, list(domains)
        if pool < 0:
            raise TrainingError(f"pool is {pool}; give the number of different rows, or 0 for no limit")
        self._shape, self._seed, self._pool = shape or Shape(), seed, pool

    def describe(self) -> str:
        """What the rows are made of, as JSON."""
        domains = [
            {"name": d.name, "samples": len(d.samples), "weight": d.weight, "content": _digest(d.samples)[:12]}
            for d in self._domains
        ]
        return json.dumps({"domains": domains, "shape": asdict(self._shape), "seed": self._seed, "pool": self._pool})

    def row(self, number: int) -> Row:
        """The row of that number; a sample of which none can be made is passed over.

        Raises:
            TrainingError: no sample that was drawn gives a row that the model has room for.
        """
        if self._pool:
            number %= self._pool
        for attempt in range(_ATTEMPTS):
            rng = random.Random(f"{self._seed}/{number}/{attempt}" if attempt else f"{self._seed}/{number}")
            (domain,) = rng.choices(self._domains, [d.weight for d in self._domains])
            sample = rng.choice(domain.samples)
            try:
                row = self._make(domain.name, sample, rng)
                longest = self._positions(row)
                if longest <= self._encoder.backbone.context_window:
                    return row
                reason = (
                    f"it takes {longest} positions of {self._encoder.backbone.context_window}; "
                    "lower context_tokens or max_chunks"
                )
            except (PromptError, DocumentError) as error:
                reason = str(error)
        raise TrainingError(
            f"no row could be made of {_ATTEMPTS} samples, the last of them {sample.sample_id!r} of {domain.name}: "
            f"{reason}"
        )

    def _positions(self, row: Row) -> int:
        """Those that a row takes at most: soft tokens, context, question and answer."""
        adapter, packets = self._encoder.adapter, sum(1 for part in row.context if part.packet_id)
        soft = adapter.left_out_tokens + packets * adapter.stored_tokens
        return soft + len(row.context_ids) + max(map(len, row.suffixes)) + ANSWER_TOKENS

    def _make(self, name: str, sample: QASample, rng: random.Random) -> Row:
        documents, texts = self._chunks(sample, rng)
        style = rng.choice(STYLES)
        titles = [document.title for document in documents]
        if any(titles) and rng.random() < 0.5:  # a title is part of the chunk, as most splitters leave it
            texts = [f"{title}\n{text}" if title else text for title, text in zip(titles, texts, strict=True)]
            titles = []
        questions = self._questions(sample, documents, rng)
        chats = [style.messages(texts, question, titles) for question in questions]
        return make_row(self._encoder, chats, texts, name)

    def _chunks(self, sample: QASample, rng: random.Random) -> tuple[list[SourceText], list[str]]:
        shape = self._shape
        documents = select_documents(sample, rng, rng.randint(1, shape.max_chunks))
        budget = rng.randint(shape.min_chunk_tokens, shape.max_chunk_tokens)
        budget = max(shape.min_chunk_tokens, min(budget, shape.context_tokens // len(documents)))
        while len(documents) > 1 and budget * len(documents) > shape.context_tokens:
            spare = [d for d in documents if not d.is_supporting] or documents
            documents.remove(rng.choice(spare))
        return documents, cut_documents(documents, sample.answers, self._encoder.backbone.token_ids, budget)

    def _questions(self, sample: QASample, documents: Sequence[SourceText], rng: random.Random) -> list[str]:
        """The sample's question, and others whose answers only the teacher knows."""
        titled = [document.title for document in documents if document.title] or ["the subject of the text"]
        more = rng.sample(QUESTIONS, min(len(QUESTIONS), self._shape.questions - 1))
        return [sample.question, *(question.format(title=rng.choice(titled)) for question in more)]


def _digest(samples: Sequence[QASample]) -> str:
    """SHA-256 over questions, answers and documents, in hex."""
    content = [[s.question, s.answers, [(d.title, d.text, d.is_supporting) for d in s.documents]] for s in samples]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def hold_out(data: Sequence[Domain], share: float = 0.1, seed: int = 0) -> tuple[list[Domain], list[Domain]]:
    """Domains to train on and domains to validate on, of the same names and weights and without a common sample.

    Samples are one if they ask the same of the same texts. Of those, the first stays and the others are left out, which
    is logged.

    Args:
        data: all there is of each domain.
        share: of a domain's samples that is held out, at least one.
        seed: decides which.

    Raises:
        TrainingError: a domain has fewer than two samples that are not those of one before it.
    """
    train, held_out = [], []
    seen: set[object] = set()
    for domain in data:
        new = _by_key(domain.samples)
        samples = [sample for key, sample in new.items() if key not in seen]
        seen |= new.keys()
        count, repeated = max(1, round(share * len(samples))), len(domain.samples) - len(samples)
        if len(samples) <= count:
            raise TrainingError(
                f"the data set {domain.name} has {len(samples)} samples, without {repeated} that repeat others; "
                "training and validation need two at least"
            )
        if repeated:
            logger.warning(
                "left out %d samples of %s that repeat others, of it or of sets before", repeated, domain.name
            )
        mixed = random.Random(seed).sample(samples, len(samples))
        held_out.append(replace(domain, samples=mixed[:count]))
        train.append(replace(domain, samples=mixed[count:]))
    return train, held_out


def _by_key(samples: Sequence[QASample]) -> dict[object, QASample]:
    """Samples by what makes two of them one, question and texts whatever their order; the first of each."""
    found: dict[object, QASample] = {}
    for sample in samples:
        texts = frozenset(document.text.strip() for document in sample.documents)
        found.setdefault((sample.question.strip(), texts), sample)
    return found


def was_trained_on(about: Mapping[str, str], samples: Sequence[QASample]) -> bool:
    """Whether an adapter, or one that it went on from, was trained on a data set, as far as its metadata tell.

    Args:
        about: metadata of the adapter.
        samples: the whole data set, of which :func:`hold_out` held out a share. One of which some were left out, for
            they stood in another set, is not known again.
    """
    with suppress(ValueError, KeyError, TypeError, TrainingError):
        data = json.loads(about["data"])
        (part,), _ = hold_out([Domain("", list(_by_key(samples).values()))], seed=data["seed"])
        if _digest(part.samples)[:12] in [domain["content"] for domain in data["domains"]]:
            return True
    earlier = json.loads(about.get("warm_start_training") or "{}")
    return bool(earlier) and was_trained_on(earlier, samples)
