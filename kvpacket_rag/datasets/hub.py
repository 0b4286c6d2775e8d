"""Question-answering data sets of the Hugging Face hub, by short name."""

from __future__ import annotations

import importlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpacket_rag.datasets.sample import QASample, SourceText, Split
from kvpacket_rag.errors import DatasetError, MissingExtraError

Row = Mapping[str, Any]

_SQUAD_PARAGRAPHS = 5  # a question: its own and others of the same article


def hotpotqa_sample(row: Row, domain: str = "hotpotqa") -> QASample | None:
    """A row of HotpotQA (distractor setting), or of a set with the same columns; None without a document."""
    supporting = set(row["supporting_facts"]["title"])
    context = row["context"]
    documents = [
        SourceText(title, _paragraph(sentences), title in supporting)
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
    ]
    return _sample(row["id"], row["question"], [row["answer"]], documents, domain, {"type": row["type"]})


def two_wiki_sample(row: Row) -> QASample | None:
    """A row of 2WikiMultihopQA; None without a document."""
    return hotpotqa_sample(row, "2wikimultihopqa")


def musique_sample(row: Row) -> QASample | None:
    """A row of MuSiQue; None if its paragraphs do not answer the question."""
    if not row["answerable"]:
        return None
    documents = [SourceText(p["title"], p["paragraph_text"], p["is_supporting"]) for p in row["paragraphs"]]
    answers = [row["answer"], *row["answer_aliases"]]
    hops = row["id"].partition("__")[0]
    return _sample(row["id"], row["question"], answers, documents, "musique", {"hops": hops})


def squad_samples(rows: Sequence[Row], chosen: Iterable[int], seed: int) -> Iterator[QASample]:
    """The chosen rows of SQuAD, each with four other paragraphs of the same article as distractors.

    Args:
        rows: all rows of a split, from which the articles' paragraphs are gathered.
        chosen: places of the rows wanted.
        seed: decides on distractors and order.
    """
    articles: defaultdict[str, dict[str, None]] = defaultdict(dict)  # paragraphs by title, each once, in order
    for row in rows:
        articles[row["title"]][row["context"]] = None
    for place in chosen:
        row = rows[place]
        rng = random.Random(f"squad {seed} {row['id']}")
        others = [text for text in articles[row["title"]] if text != row["context"]]
        texts = [row["context"], *rng.sample(others, min(len(others), _SQUAD_PARAGRAPHS - 1))]
        rng.shuffle(texts)
        title = row["title"].replace("_", " ")
        documents = [SourceText(title, text, text == row["context"]) for text in texts]
        sample = _sample(row["id"], row["question"], row["answers"]["text"], documents, "squad", {})
        if sample:
            yield sample


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Where a data set lies on the hub, and how its rows become samples."""

    path: str
    config: str | None
    convert: Callable[[Row], QASample | None] | None  # None: squad_samples, which needs the whole split


HUB_DATASETS = {
    "hotpotqa": HubDataset("hotpotqa/hotpot_qa", "distractor", hotpotqa_sample),
    "musique": HubDataset("dgslibisey/MuSiQue", None, musique_sample),
    "2wikimultihopqa": HubDataset("framolfese/2WikiMultihopQA", None, two_wiki_sample),
    "squad": HubDataset("rajpurkar/squad", None, None),
}


def load_from_hub(name: str, split: Split, *, seed: int = 0, limit: int | None = None) -> list[QASample]:
    """Samples of a data set of the hub, in random order; downloaded once by the package ``datasets``.

    Args:
        name: one of HUB_DATASETS.
        split: "train", or "dev" for the hub's validation split.
        seed: of the order.
        limit: the most samples.

    Raises:
        MissingExtraError: ``datasets`` is not installed.
        DatasetError: it cannot be loaded.
    """
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise MissingExtraError(
            f"the data set {name!r} comes from the hub, for which 'datasets' is needed; "
            "pip install 'kvpacket-rag[train]'"
        ) from error
    source = HUB_DATASETS[name]
    try:
        rows = load_dataset(source.path, source.config, split="validation" if split == "dev" else "train")
    except Exception as error:  # the loader lets through whatever network, disk and parsers raise
        raise DatasetError(
            f"{name!r} ({source.path}) cannot be loaded from the hub: {error}; check the network, or give a .jsonl file"
        ) from error
    order = list(range(len(rows)))
    random.Random(f"{name} {seed}").shuffle(order)
    if source.convert is None:
        return list(squad_samples(rows, order[:limit], seed))
    samples: list[QASample] = []
    for place in order:
        sample = source.convert(rows[place])
        if sample:
            samples.append(sample)
        if len(samples) == limit:
            break
    return samples


def _paragraph(sentences: Sequence[str]) -> str:
    """Sentences as one text; some sets keep the space between them, some do not."""
    return " ".join(sentence.strip() for sentence in sentences if sentence.strip())


def _sample(
    sample_id: str,
    question: str,
    answers: Sequence[str],
    documents: Sequence[SourceText],
    domain: str,
    meta: Mapping[str, Any],
) -> QASample | None:
    """A sample without empty or repeated answers and empty documents; None if nothing is left of either."""
    kept = tuple(document for document in documents if document.text.strip())
    said = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
    return QASample(sample_id, question, said, kept, domain, meta) if kept and said else None
