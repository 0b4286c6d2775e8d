"""Data sets by name: generators, files, and the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpacket_rag.datasets.biography import generate_biographies
from kvpacket_rag.datasets.hub import HUB_DATASETS, load_from_hub
from kvpacket_rag.datasets.niah import generate_niah, haystack_from_folder
from kvpacket_rag.datasets.sample import QASample, Split, read_jsonl
from kvpacket_rag.errors import DatasetError

GENERATED = ("niah", "biography")
_DEFAULT_COUNT = 200


def open_dataset(
    name: str,
    split: Split = "dev",
    *,
    seed: int = 0,
    limit: int | None = None,
    haystack: Path | None = None,
) -> list[QASample]:
    """The samples of a data set.

    Args:
        name: "niah" or "biography", which are generated ("niah" has one needle a sample in "dev", and sometimes
            others in "train"); "niah:FOLDER", with passages from the texts in that folder; a .jsonl file, read
            whatever the split; a folder that holds ``train.jsonl`` and ``dev.jsonl``; or the name of a data set on
            the hub. A folder called like one of the names is given as "./niah".
        split: "train" or "dev"; the hub's "dev" is its validation split.
        seed: of the generators, and of the order of the hub's samples.
        limit: the first so many samples. Generators make so many, 200 by default.
        haystack: folder of texts for "niah".

    Raises:
        DatasetError: no such data set, it is malformed, or ``limit`` is below 1.
        MissingExtraError: a data set of the hub, and ``datasets`` is not installed.
    """
    if split not in ("train", "dev"):
        raise DatasetError(f"the split {split!r} is unknown; the splits are 'train' and 'dev'")
    if limit is not None and limit < 1:
        raise DatasetError(f"limit is {limit}; give 1 or more, or None for all")
    if name == "niah" or name.startswith("niah:"):
        folder = name.partition(":")[2] or haystack
        texts = haystack_from_folder(folder) if folder else []
        # Small models take the wrong needle even after full prefill, so the test has but one.
        return generate_niah(limit or _DEFAULT_COUNT, seed, texts, split=split, other_needles=split == "train")
    if name == "biography":
        return generate_biographies(limit or _DEFAULT_COUNT, seed, split)
    if name in HUB_DATASETS:
        return load_from_hub(name, split, seed=seed, limit=limit)
    path = Path(name)
    if path.is_dir():
        return read_jsonl(path / f"{split}.jsonl")[:limit]
    if path.suffix == ".jsonl":
        return read_jsonl(path)[:limit]
    known = ", ".join((*GENERATED, *HUB_DATASETS))
    raise DatasetError(
        f"no data set is called {name!r}; give one of {known}, 'niah:FOLDER', a .jsonl file, or a folder with "
        "train.jsonl and dev.jsonl"
    )


def names_apart(opened: Sequence[tuple[str, Sequence[QASample]]]) -> list[str]:
    """A name for each of several data sets: its domain's, or what it was opened by where two have one domain.

    "all" stands for all of them together, so a domain of that name gives way, too.

    Args:
        opened: what :func:`open_dataset` was given, and what it gave.
    """
    domains = [samples[0].domain for _, samples in opened]
    taken = [*domains, "all"]
    return [domain if taken.count(domain) == 1 else name for domain, (name, _) in zip(domains, opened, strict=True)]
