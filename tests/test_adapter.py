from __future__ import annotations

import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvpacket_rag import adapter_file
from kvpacket_rag.adapter import Adapter, LowRank, import_paper_adapter
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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_place_of_an_adapter_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "adapter.safetensors")
    for place in (tmp_path / "adapter.safetensors", tmp_path):
        with pytest.raises(AdapterError, match="a folder, a pipe or a device"):
            Adapter.load(place)


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


def test_a_file_that_would_unfold_is_refused(tmp_path: Path):
    torch.save({"header": torch.zeros(1, 1 << 20, 8), "trailer": torch.zeros(1, 2, 8)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "a.pt", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    torch.save(
        {"header": torch.zeros(1, 1, 8).expand(1, 1 << 40, 8), "trailer": torch.zeros(1, 2, 8)}, tmp_path / "b.pt"
    )
    for name, reason in (("a.pt", "is compressed"), ("b.pt", "fewer numbers")):
        assert (tmp_path / name).stat().st_size < 1 << 20
        with pytest.raises(AdapterError, match=reason):
            import_paper_adapter(tmp_path / name)


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path):
    torch.save(PARTS | {"train_config": Bomb(tmp_path / "ran")}, tmp_path / "bomb.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    for name in ("bomb.pt", "raw.pt", "absent.pt"):
        with pytest.raises(AdapterError):
            import_paper_adapter(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def _full(seed: int = 0, **metadata: str) -> Adapter:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    low_rank = LowRank({"layers.0.q": (draw(2, 8), draw(6, 2)), "layers.1.q": (draw(2, 8), draw(6, 2))})
    return Adapter(draw(3, 8), draw(2, 8), metadata, deep=draw(4, 5, 8), low_rank=low_rank)


def test_deep_parts_read_back_as_they_were_saved(tmp_path: Path):
    adapter = _full(recipe="a")
    adapter.save(tmp_path / "a.safetensors")
    again = Adapter.load(tmp_path / "a.safetensors")
    assert again.digest == adapter.digest and again.tensors().keys() == adapter.tensors().keys()
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in adapter.tensors().items())


def test_every_part_changes_the_digest():
    digests = {_full().digest, _full(header="left out").digest}
    for name in _full().tensors():
        changed = _full()
        with torch.no_grad():
            dict(changed.tensors())[name].add_(1)  # tensors share memory with the parameters
        digests.add(changed.digest)
    assert len(digests) == 2 + len(_full().tensors())


def test_a_low_rank_update_alone_is_no_empty_adapter():
    low_rank = LowRank({"q": (torch.ones(1, 4), torch.ones(4, 1))})
    adapter = Adapter(torch.zeros(0, 4), torch.zeros(0, 4), low_rank=low_rank)
    assert not adapter.is_empty and adapter.digest != "none" and adapter.absorbs


def test_updates_that_change_nothing_are_not_saved():
    fresh = LowRank.fresh({"q": (6, 8), "k": (2, 8)}, rank=3)
    assert not fresh.tensors()
    fresh.up[0].data.add_(1)
    assert set(fresh.tensors()) == {"k"}


def test_bfloat16_halves_the_file_and_is_stable_from_then_on(tmp_path: Path):
    adapter = _full()
    adapter.save(tmp_path / "half.safetensors", torch.bfloat16)
    half = Adapter.load(tmp_path / "half.safetensors")
    assert torch.equal(half.header, adapter.header.bfloat16().float())
    half.save(tmp_path / "again.safetensors", torch.bfloat16)
    assert Adapter.load(tmp_path / "again.safetensors").digest == half.digest


def test_roles_number_the_soft_tokens_around_the_chunk():
    assert _full().roles(3).tolist() == [0, 1, 2, 5, 5, 5, 3, 4]


def test_a_header_that_is_left_out_takes_no_place_in_a_packet():
    assert (_full().stored_tokens, _full(header="left out").stored_tokens) == (5, 2)


def test_separators_are_absorbed_unless_training_read_them():
    assert _full().absorbs and not _full(separators="read").absorbs and not Adapter.empty(4).absorbs


@pytest.mark.parametrize("parts", [{"deep": torch.zeros(4, 5, 9)}, {"deep": torch.zeros(4, 6, 8)}])
def test_deep_vectors_that_do_not_fit_are_refused(parts: dict[str, torch.Tensor]):
    with pytest.raises(AdapterError, match="deep vectors have shape"):
        Adapter(torch.zeros(3, 8), torch.zeros(2, 8), **parts)


def test_a_low_rank_pair_of_two_ranks_is_refused():
    with pytest.raises(AdapterError, match=r"update of q has shapes \(2, 8\) and \(6, 3\)"):
        LowRank({"q": (torch.zeros(2, 8), torch.zeros(6, 3))})


def test_tensors_no_adapter_has_are_refused_by_name(tmp_path: Path):
    adapter_file.save(
        {"header": torch.zeros(1, 2), "trailer": torch.zeros(1, 2), "q.down": torch.zeros(1, 2)}, {}, tmp_path / "a"
    )
    with pytest.raises(AdapterError, match=r"no adapter has: q\.down"):
        Adapter.load(tmp_path / "a")


def test_a_saved_adapter_may_be_read_by_whom_the_umask_lets(tmp_path: Path):
    adapter = Adapter(torch.zeros(1, 2), torch.zeros(1, 2))
    before = os.umask(0o027)
    try:
        adapter.save(tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640


def test_an_adapter_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path, monkeypatch: Any):
    path = tmp_path / "a.safetensors"
    Adapter(torch.zeros(1, 2), torch.zeros(1, 2)).save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(AdapterError, match=r"no space left.*make room"):
        Adapter(torch.ones(1, 2), torch.ones(1, 2)).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_an_adapter_is_called_by_its_file_and_digest(tmp_path: Path):
    adapter = Adapter(torch.ones(1, 2), torch.ones(1, 2))
    adapter.save(tmp_path / "a.safetensors")
    found = Adapter.load(tmp_path / "a.safetensors").label
    assert found == f"adapter {tmp_path / 'a.safetensors'} (SHA-256 {adapter.digest[:12]}…)"
    assert adapter.label == f"adapter in memory (SHA-256 {adapter.digest[:12]}…)"
    assert Adapter.empty(2).label == "no adapter"


def test_saving_an_adapter_follows_no_planted_link(tmp_path: Path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".{os.getpid()}.own.safetensors").symlink_to(tmp_path / "victim")
    adapter_file.save({"header": torch.zeros(1, 2)}, {}, tmp_path / "own.safetensors")
    assert (tmp_path / "victim").read_text() == "precious"
