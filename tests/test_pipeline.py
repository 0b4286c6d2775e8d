"""Documents in, answers out; and an index that is opened with something else than it was built with."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from pipeline_samples import LEASE, NEW_LEASE, WordEmbedder, documents, encoded_texts, loader, packet_files, pipeline

from kvpacket_rag import pipeline as pipeline_module
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.demo import corpus_folder
from kvpacket_rag.documents import Document, read_documents
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import (
    ContextTooLongError,
    DocumentError,
    PacketMismatchError,
    PromptError,
    StoreError,
    StoreFormatError,
)
from kvpacket_rag.pipeline import KVPacketRAG

SHORT = GenerationSettings(max_new_tokens=8)


@pytest.fixture
def rag(backbone: Any, tmp_path: Path) -> Iterator[KVPacketRAG]:
    with pipeline(backbone, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def other(make_model: Any, tokenizer: Any) -> Backbone:
    """The same architecture with other weights."""
    return Backbone(make_model(seed=1), tokenizer, "other")


@pytest.fixture(scope="module")
def double(make_model: Any, tokenizer: Any) -> Backbone:
    """The same weights in another dtype."""
    return Backbone(make_model(dtype=torch.float64), tokenizer, "tiny")


@pytest.fixture
def openable(backbone: Any, other: Backbone, double: Backbone, monkeypatch: Any) -> None:
    """``KVPacketRAG.open`` with tiny models: "other" by name, float64 by dtype."""
    monkeypatch.setattr(KVPacketEngine, "load", loader(backbone, other=other, float64=double))
    monkeypatch.setattr(pipeline_module, "SentenceTransformerEmbedder", WordEmbedder)


def test_a_question_is_answered_from_the_packets_of_all_its_hits(rag: KVPacketRAG):
    rag.add(documents())
    found = rag.ask("Who signed the lease of the harbour office?", 3, SHORT)
    assert found.hits[0].chunk.document_id == "d1" and len(found.hits) == 3
    assert found.answer.usage.chunks_reused == 3 and found.answer.usage.misses == ()
    assert [hit.score for hit in found.hits] == sorted((hit.score for hit in found.hits), reverse=True)


def test_full_prefill_reads_the_same_prompt(rag: KVPacketRAG):
    rag.add(documents())
    packets, prefill = (rag.ask("When are refunds paid?", 2, SHORT, policy=p).answer for p in ("packets", "prefill"))
    assert prefill.usage.prefilled_tokens == packets.usage.prompt_tokens and prefill.usage.packet_tokens == 0


def test_streamed_pieces_are_the_answer(rag: KVPacketRAG):
    rag.add(documents())
    stream, hits = rag.stream("When are refunds paid?", 2, SHORT)
    whole = rag.ask("When are refunds paid?", 2, SHORT)
    assert "".join(stream) == whole.answer.text == stream.answer.text and hits == whole.hits


def test_more_chunks_than_there_are_gives_all_and_each_text_once(rag: KVPacketRAG):
    rag.add([*documents(), *(Document(f"copy{n}", CHUNKS[0]) for n in range(5))])
    assert len(rag.retrieve("cold room", k=99)) == 4
    assert rag.retrieve(CHUNKS[0], k=2)[0].chunk.text == CHUNKS[0]
    assert len({hit.packet_id for hit in rag.retrieve(CHUNKS[0], k=3)}) == 3
    assert rag.ask("cold room", 99, SHORT).answer.usage.chunks_reused == 4


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused(rag: KVPacketRAG, question: str):
    rag.add(documents())
    with pytest.raises(PromptError, match="the question is empty"):
        rag.ask(question)


def test_an_empty_index_says_that_documents_are_missing(rag: KVPacketRAG):
    with pytest.raises(StoreError, match="holds no chunks; add documents"):
        rag.ask("Who?")


@pytest.mark.parametrize("k", [0, -1])
def test_fewer_than_one_chunk_is_refused(rag: KVPacketRAG, k: int):
    rag.add(documents())
    with pytest.raises(StoreError, match=f"k is {k}"):
        rag.ask("Who?", k)


def test_a_question_longer_than_the_window_is_refused_before_any_work(rag: KVPacketRAG, monkeypatch: Any):
    rag.add(documents())
    monkeypatch.setattr(rag.engine.backbone, "prefill", lambda *_: pytest.fail("computed"))
    with pytest.raises(ContextTooLongError, match="of tiny"):
        rag.ask("Who signed it? " * 2000)


def test_a_document_that_changed_is_answered_from_its_new_text_only(rag: KVPacketRAG):
    rag.add([Document("lease", LEASE)])
    rag.add([Document("lease", NEW_LEASE)])
    found = rag.ask("Who signed the lease?", 4, SHORT)
    assert [hit.chunk.text for hit in found.hits] == [NEW_LEASE] and found.answer.usage.chunks_reused == 1
    assert rag.engine.generate(f"{LEASE} So", SHORT).usage.chunks_reused == 0


def test_a_deleted_document_is_neither_found_nor_reused(rag: KVPacketRAG):
    rag.add(documents())
    rag.delete("d1")
    assert "d1" not in {hit.chunk.document_id for hit in rag.retrieve("Who signed the lease?", 9)}
    assert rag.engine.generate(f"{CHUNKS[1]} So", SHORT).usage.chunks_reused == 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_packet_is_made_again_counted_and_the_answer_is_the_same(
    rag: KVPacketRAG, tmp_path: Path, damage: str
):
    rag.add(documents())
    right = rag.ask("Who signed the lease?", 3, SHORT)
    (file,) = (tmp_path / "packets").rglob(f"{right.hits[0].packet_id}.safetensors")
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(data[:-100] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    found = rag.ask("Who signed the lease?", 3, SHORT)
    assert found.answer.text == right.answer.text and found.answer.usage.chunks_reused == 2
    assert [miss.packet_id for miss in found.answer.usage.misses] == [right.hits[0].packet_id]
    assert rag.ask("Who signed the lease?", 3, SHORT).answer.usage.chunks_reused == 3


@pytest.mark.usefixtures("openable")
def test_an_index_is_reopened_as_it_was_built(tmp_path: Path):
    with KVPacketRAG.open(tmp_path, "other", embedder=WordEmbedder("mine"), chunk_tokens=50) as rag:
        rag.add(documents())
    with KVPacketRAG.open(tmp_path, embedder=WordEmbedder("mine")) as rag:
        seen = encoded_texts(rag)
        assert rag.engine.model_name == "other" and rag.chunk_tokens == 50
        assert rag.ask("Who signed the lease?", 2, SHORT).answer.usage.chunks_reused == 2
        assert rag.add(documents()).unchanged == 4 and seen == []


@pytest.mark.usefixtures("openable")
@pytest.mark.parametrize(("change", "field"), [({"model": "other"}, "weights"), ({"dtype": "float64"}, "dtype")])
def test_an_index_of_another_model_or_dtype_is_refused_and_can_be_encoded_again(
    tmp_path: Path, change: dict[str, str], field: str
):
    with KVPacketRAG.open(tmp_path) as rag:
        rag.add(documents())
    old = packet_files(tmp_path)
    with pytest.raises(PacketMismatchError, match=rf"{field}.* differ.*--reencode"):
        KVPacketRAG.open(tmp_path, **change)
    with KVPacketRAG.open(tmp_path, **change, reencode=True) as rag:
        assert rag.ask("Who signed the lease?", 3, SHORT).answer.usage.chunks_reused == 3
        assert not old & packet_files(tmp_path) and len(packet_files(tmp_path)) == 4
    with KVPacketRAG.open(tmp_path) as rag:
        assert rag.engine.signature.to_json() in rag.engine.store.signatures()


@pytest.mark.usefixtures("openable")
def test_an_adapter_is_kept_with_the_index_and_another_one_is_refused(tmp_path: Path, adapter: Adapter):
    adapter.save(tmp_path / "mine.safetensors")
    with KVPacketRAG.open(tmp_path / "index", adapter=Adapter.load(tmp_path / "mine.safetensors")) as rag:
        rag.add(documents())
    (tmp_path / "index").rename(tmp_path / "moved")
    with KVPacketRAG.open(tmp_path / "moved") as rag:
        assert rag.engine.signature.adapter == adapter.digest
        assert rag.ask("Who signed the lease?", 3, SHORT).answer.usage.chunks_reused == 3
    with pytest.raises(PacketMismatchError, match="adapter differ"):
        KVPacketRAG.open(tmp_path / "moved", adapter=None)
    with KVPacketRAG.open(tmp_path / "moved", adapter=None, reencode=True):
        pass
    with KVPacketRAG.open(tmp_path / "moved") as rag:
        assert rag.engine.signature.adapter == "none"


@pytest.mark.usefixtures("openable")
def test_encoding_again_that_was_interrupted_has_to_be_finished_first(tmp_path: Path):
    with KVPacketRAG.open(tmp_path) as rag:
        rag.add(documents())
    with pytest.raises(KeyboardInterrupt):
        KVPacketRAG.open(tmp_path, "other", reencode=True, progress=lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(PacketMismatchError, match=r"was interrupted; to finish, .*--reencode"):
        KVPacketRAG.open(tmp_path)
    with KVPacketRAG.open(tmp_path, reencode=True) as rag:
        assert rag.engine.model_name == "other" and len(packet_files(tmp_path)) == 4
        assert rag.ask("Who signed the lease?", 3, SHORT).answer.usage.chunks_reused == 3


@pytest.mark.usefixtures("openable")
def test_a_model_whose_window_is_too_small_leaves_the_index_as_it_was(tmp_path: Path, monkeypatch: Any):
    with KVPacketRAG.open(tmp_path) as rag:
        rag.add(documents())
    monkeypatch.setattr(Backbone, "context_window", property(lambda self: 8 if self.name == "other" else 2048))
    with pytest.raises(DocumentError, match="has room for 8"):
        KVPacketRAG.open(tmp_path, "other", reencode=True)
    with KVPacketRAG.open(tmp_path) as rag:
        assert rag.ask("Who signed the lease?", 3, SHORT).answer.usage.chunks_reused == 3


@pytest.mark.usefixtures("openable")
def test_an_empty_index_may_be_opened_with_anything(tmp_path: Path):
    KVPacketRAG.open(tmp_path).close()
    with KVPacketRAG.open(tmp_path, "other", embedder=WordEmbedder("mine", 8)) as rag:
        assert rag.add(documents()).added == 4


@pytest.mark.usefixtures("openable")
def test_an_index_of_another_embedder_is_refused(tmp_path: Path):
    with KVPacketRAG.open(tmp_path) as rag:
        rag.add(documents())
    with pytest.raises(StoreError, match="built with the embedder 'all-MiniLM-L6-v2', not 'mine'"):
        KVPacketRAG.open(tmp_path, embedder=WordEmbedder("mine"))


@pytest.mark.usefixtures("openable")
def test_a_refused_index_is_closed_again(tmp_path: Path, monkeypatch: Any):
    with KVPacketRAG.open(tmp_path) as rag:
        rag.add(documents())
    closed: list[str] = []
    monkeypatch.setattr(KVPacketEngine, "close", lambda self: closed.append(self.model_name) or self.store.close())
    with pytest.raises(PacketMismatchError):
        KVPacketRAG.open(tmp_path, "other")
    gc.collect()
    assert closed == ["other"]


@pytest.mark.usefixtures("openable")
def test_a_path_that_is_a_file_and_a_foreign_format_are_refused(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="it is a file"):
        KVPacketRAG.open(tmp_path / "file")
    KVPacketRAG.open(tmp_path / "index").close()
    (tmp_path / "index" / "index.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(StoreFormatError):
        KVPacketRAG.open(tmp_path / "index")


@pytest.mark.usefixtures("openable")
def test_a_model_folder_is_remembered_by_its_absolute_path(tmp_path: Path, monkeypatch: Any):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with KVPacketRAG.open("index", "weights") as rag:
        assert rag.index.get_setting("model") == str(tmp_path / "weights")


@pytest.mark.model
def test_the_real_model_answers_from_packets_what_stands_in_a_file(tmp_path: Path):
    file = corpus_folder() / "manual_firmware_update.md"
    with KVPacketRAG.open(tmp_path / "index", dtype="float32") as rag:
        rag.add(read_documents(file, lambda *_: pytest.fail("skipped")))
        found = rag.ask("How long does a firmware update take?", settings=GenerationSettings(max_new_tokens=24))
    assert "7 minutes" in found.answer.text
    assert found.answer.usage.chunks_reused == len(found.hits) and found.answer.usage.misses == ()


def test_namespaces_of_a_folder_share_no_document(openable: None, tmp_path: Path):
    with KVPacketRAG.open(tmp_path, "tiny", namespace="a") as one, KVPacketRAG.open(tmp_path, "tiny") as all_others:
        one.add(documents())
        assert len(one.index) == 4 and len(one.engine.store) == 4
        assert len(all_others.index) == len(all_others.engine.store) == 0
    with KVPacketRAG.open(tmp_path, namespace="a") as again:
        assert again.ask("Who signed the lease?", 1, SHORT).answer.usage.chunks_reused == 1
