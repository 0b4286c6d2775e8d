from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import Run, docs_fixture, kv_fixture, tiny_fixture
from conftest import CHUNKS

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import DocumentError
from kvpacket_rag.estimate import Estimate, estimate
from kvpacket_rag.store import DiskStore

__all__ = ["docs_fixture", "kv_fixture", "tiny_fixture"]


@pytest.mark.parametrize(("compress", "quantize"), [("none", "none"), ("none", "k8v4"), ("random:0.5", "int4")])
def test_bytes_are_those_of_the_files_that_ingesting_writes(
    compress: str, quantize: str, backbone: Backbone, adapter: Adapter, tmp_path: Path
):
    from kvpacket_rag.compress.reduction import Reduction

    found = estimate(KVPacketEngine(backbone, adapter=adapter), CHUNKS, sample=4)
    removed = 0.5 if "0.5" in compress else 0.0
    (size,) = [entry for entry in found.sizes if (entry.quantize, entry.removed) == (quantize, removed)]
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), adapter, reduction=Reduction.of(compress, quantize))
    engine.encode(CHUNKS)
    assert engine.store.size_bytes == pytest.approx(size.num_bytes, abs=4 * 64)  # headers end on a boundary
    assert size.bytes_per_token == pytest.approx(size.num_bytes / found.tokens, rel=0.01)
    engine.close()


def test_a_sample_speaks_for_all_and_equal_chunks_count_once(engine: KVPacketEngine):
    texts = [f"{number}: {CHUNKS[number % 4]}" for number in range(40)]
    found = estimate(engine, [*texts, *texts[:5]], hits=3, sample=8)
    assert (found.chunks, found.sample_chunks, found.hits, len(engine.store)) == (40, 8, 3, 8)
    assert found.tokens == sum(map(engine.count_tokens, texts))
    assert found.encode_seconds == pytest.approx(found.tokens / found.tokens_per_second)


def test_encoding_pays_when_the_time_saved_is_the_time_it_took():
    figures = {"chunks": 1, "tokens": 9, "sample_chunks": 1, "tokens_per_second": 1.0, "hits": 1, "sizes": ()}
    fast = Estimate(encode_seconds=30.0, packet_seconds=0.5, prefill_seconds=2.0, **figures)
    slow = Estimate(encode_seconds=30.0, packet_seconds=0.5, prefill_seconds=0.4, **figures)
    assert fast.break_even_questions == pytest.approx(20) and slow.break_even_questions is None
    assert fast.to_dict()["break_even_questions"] == pytest.approx(20)


def test_nothing_to_read_is_an_error(engine: KVPacketEngine):
    with pytest.raises(DocumentError, match="no text"):
        estimate(engine, [" "])


def test_the_command_tells_of_all_settings_and_stores_nothing(kv: Run, docs: Path, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    code, told, _ = kv("estimate", docs, "--hits", "2", "--sample", "3")
    assert code == 0 and sorted(tmp_path.rglob("*")) == before
    assert all(word in told for word in ("Chunks", "Encoding", "Pays", "int8", "k8v4", "int4", "50% removed"))


def test_figures_are_one_json_object(kv: Run, docs: Path):
    code, told, _ = kv("estimate", docs, "--json", "--model", "tiny")
    found = json.loads(told)
    assert code == 0 and found["documents"] == found["chunks"] == 4 and len(found["sizes"]) == 12


def test_no_document_is_one_line(kv: Run, tmp_path: Path):
    code, _, said = kv("estimate", tmp_path)
    assert code == 1 and "no document can be read" in said


def test_what_an_index_is_made_smaller_by_is_remembered(kv: Run, docs: Path, tmp_path: Path):
    folder = tmp_path / "index"
    made = ("ingest", docs, "--index", folder, "--compress", "random:0.5", "--quantize", "int8")
    assert kv(*made)[0] == 0
    code, told, _ = kv("ask", "Who signed the lease?", "--index", folder, "--json")
    assert code == 0 and json.loads(told)["usage"]["chunks_reused"] > 0
    code, told, _ = kv("inspect", folder, "--json")
    (signature,) = json.loads(told)["signatures"]
    assert signature["compression"] == "random, ratio 0.5" and signature["quantization"].startswith("int8")


def test_another_size_needs_encoding_again(kv: Run, docs: Path, tmp_path: Path):
    folder = tmp_path / "index"
    assert kv("ingest", docs, "--index", folder)[0] == 0
    code, _, said = kv("ingest", docs, "--index", folder, "--quantize", "k8v4")
    assert code == 1 and "quantization" in said and "--reencode" in said
    code, _, _ = kv("ingest", "--index", folder, "--quantize", "k8v4", "--reencode")
    assert code == 0 and "k8v4" in kv("inspect", folder, "--json")[1]


@pytest.mark.parametrize("asked", ["best:0.3", "random", "random:2"])
def test_a_compression_that_is_not_known_is_wrong_usage(asked: str, kv: Run, docs: Path, tmp_path: Path):
    code, _, said = kv("ingest", docs, "--index", tmp_path / "index", "--compress", asked)
    assert code == 2 and "--compress" in said
