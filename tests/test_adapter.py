from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvpacket_rag.adapter import Adapter, import_paper_adapter
from kvpacket_rag.errors import AdapterError


def test_wrapping_puts_header_before_and_trailer_behind_in_the_dtype_of_the_chunk():
    adapter = Adapter(torch.full((2, 4), 1.0), torch.full((3, 4), 3.0))
    wrapped = adapter.wrap(torch.full((5, 4), 2.0, dtype=torch.bfloat16))
    assert wrapped.dtype == torch.bfloat16
    assert wrapped[:, 0].tolist() == [1, 1, 2, 2, 2, 2, 2, 3, 3, 3]


def test_an_adapter_reads_back_as_it_was_saved(tmp_path: Path):
    adapter = Adapter(torch.randn(8, 16), torch.randn(4, 16), {"model": "tiny", "recipe": "a: b"})
    adapter.save(tmp_path / "a.safetensors")
    again = Adapter.load(tmp_path / "a.safetensors")
    assert torch.equal(again.header, adapter.header) and torch.equal(again.trailer, adapter.trailer)
    assert again.metadata == adapter.metadata and again.digest == adapter.digest


def test_the_digest_tells_content_and_border_apart():
    rows = torch.randn(6, 4)
    digests = {Adapter(rows[:n], rows[n:]).digest for n in range(7)}
    assert len(digests) == 7 and Adapter.empty(4).digest == "none"


def test_the_random_draw_follows_the_scalar_statistics_of_the_embeddings():
    embeddings = torch.randn(2000, 64) * 0.13 + 0.4
    adapter = Adapter.random(embeddings, 500, 500, seed=3)
    assert (
        abs(float(adapter.header.detach().mean()) - 0.4) < 0.01
        and abs(float(adapter.trailer.detach().std()) - 0.13) < 0.01
    )
    assert adapter.digest == Adapter.random(embeddings, 500, 500, seed=3).digest


@pytest.mark.parametrize("shapes", [((2, 4), (2, 5)), ((2, 4), (4,)), ((1, 2, 4), (2, 4))])
def test_parts_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    with pytest.raises(AdapterError, match="do not fit"):
        Adapter(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(AdapterError, match="not finite"):
        Adapter(torch.full((1, 4), float("nan")), torch.zeros(1, 4))


def test_files_of_another_kind_are_refused(tmp_path: Path):
    save_file({"header": torch.zeros(1, 2), "trailer": torch.zeros(1, 2)}, tmp_path / "foreign.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    for name in ("foreign", "text", "absent"):
        with pytest.raises(AdapterError, match=name):
            Adapter.load(tmp_path / f"{name}.safetensors")


PARTS = {"header": torch.randn(1, 8, 16).bfloat16(), "trailer": torch.randn(1, 4, 16).bfloat16()}
OLD = PARTS | {
    "header_len": 8,
    "trailer_len": 4,
    "dim": 16,
    "mean": 0.0,
    "std": 0.01,
    "train_config": {"total_epoch": 20},
}


@pytest.mark.parametrize("content", [PARTS | {"train_config": {}}, OLD])
def test_both_generations_of_the_papers_files_are_read(tmp_path: Path, content: dict[str, Any]):
    leaf = {k: v.requires_grad_(True) if isinstance(v, torch.Tensor) else v for k, v in content.items()}
    torch.save(leaf, tmp_path / "8_8.pt")
    adapter = import_paper_adapter(tmp_path / "8_8.pt")
    assert torch.equal(adapter.header, PARTS["header"][0].float())
    assert torch.equal(adapter.trailer, PARTS["trailer"][0].float())


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"header": torch.zeros(1, 2, 4)},
        {"header": torch.zeros(2, 4), "trailer": torch.zeros(2, 4)},
        {"header": torch.zeros(2, 2, 4), "trailer": torch.zeros(2, 2, 4)},
        {"header": torch.zeros(1, 2, 4), "trailer": torch.zeros(1, 2, 5)},
        {"header": torch.zeros(1, 2, 4), "trailer": torch.zeros(1, 2, 4).half()},
        {"header": torch.zeros(1, 2, 4), "trailer": torch.zeros(1, 2, 4), "header_len": 3},
    ],
)
def test_anything_else_is_refused_by_the_importer(tmp_path: Path, content: Any):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(AdapterError):
        import_paper_adapter(tmp_path / "x.pt")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path):
    torch.save(PARTS | {"train_config": Bomb(tmp_path / "ran")}, tmp_path / "bomb.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    for name in ("bomb.pt", "raw.pt", "absent.pt"):
        with pytest.raises(AdapterError):
            import_paper_adapter(tmp_path / name)
    assert not (tmp_path / "ran").exists()
