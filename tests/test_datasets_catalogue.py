from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from dataset_samples import ROW, sample_with, write_rows

from kvpacket_rag.datasets import QASample, open_dataset, read_jsonl
from kvpacket_rag.datasets.biography import generate_biographies
from kvpacket_rag.datasets.catalogue import names_apart
from kvpacket_rag.datasets.niah import generate_niah, haystack_from_folder
from kvpacket_rag.errors import DatasetError

ROWS = [{**ROW, "id": f"q{i}"} for i in range(5)]


@pytest.fixture
def essays(tmp_path: Path) -> Path:
    folder = tmp_path / "essays"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text(" ".join(f"Sentence {j} of essay {i} says little." for j in range(300)))
    return folder


def test_generated_sets_are_made_by_their_generators() -> None:
    assert open_dataset("niah", "train", seed=3, limit=4) == generate_niah(4, 3, split="train")
    assert open_dataset("biography", seed=3, limit=4) == generate_biographies(4, 3, "dev")
    assert len(open_dataset("biography")) == 200


def test_only_training_needles_have_others_beside_them() -> None:
    assert not any(sample.meta["other_needles"] for sample in open_dataset("niah", "dev"))
    assert any(sample.meta["other_needles"] for sample in open_dataset("niah", "train"))


def test_a_haystack_is_given_by_name_or_by_argument(essays: Path) -> None:
    expected = generate_niah(3, 0, haystack_from_folder(essays), split="dev", other_needles=False)
    assert open_dataset(f"niah:{essays}", limit=3) == expected
    assert open_dataset("niah", limit=3, haystack=essays) == expected


def test_a_folder_holds_both_splits_and_names_the_domain(tmp_path: Path) -> None:
    write_rows(tmp_path / "leases" / "train.jsonl", ROWS[:3])
    dev = write_rows(tmp_path / "leases" / "dev.jsonl", ROWS[3:])
    assert open_dataset(str(tmp_path / "leases")) == read_jsonl(dev, "leases")
    assert [s.sample_id for s in open_dataset(str(tmp_path / "leases"), "train")] == ["q0", "q1", "q2"]


def test_a_file_is_read_whatever_the_split_and_a_limit_gives_its_first_samples(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "leases.jsonl", ROWS)
    assert open_dataset(str(path), "train") == open_dataset(str(path), "dev") == read_jsonl(path)
    assert open_dataset(str(path), limit=2) == read_jsonl(path)[:2]


def test_a_folder_without_the_split_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"train\.jsonl cannot be read"):
        open_dataset(str(tmp_path), "train")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DatasetError, match="niah, biography, hotpotqa, musique, 2wikimultihopqa, squad"):
        open_dataset("hotpot")


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": -1}, {"split": "test"}])
def test_a_wrong_limit_or_split_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match=r"limit is|the split 'test' is unknown"):
        open_dataset("biography", **cast(Any, options))


def test_samples_do_not_depend_on_the_processs_hash_seed() -> None:
    code = "from kvpacket_rag.datasets import open_dataset as o; print(o('niah', limit=5), o('biography', limit=5))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_data_sets_of_one_domain_are_told_apart_by_what_they_were_opened_by() -> None:
    def opened(name: str, domain: str) -> tuple[str, list[QASample]]:
        return name, [replace(sample_with((0,), 1), domain=domain)]

    sets = [opened("x/data.jsonl", "data"), opened("y/data.jsonl", "data"), opened("z.jsonl", "z")]
    assert names_apart(sets) == ["x/data.jsonl", "y/data.jsonl", "z"]
    assert names_apart([opened("x/all.jsonl", "all")]) == ["x/all.jsonl"]
