"""Documents that come to a transform in several batches, and in several versions."""

from __future__ import annotations

import threading

import pytest
from conftest import CHUNKS
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from llama_index_kvpacket import KVPacketTransform, drop_packets
from llama_index_samples import no_stray_loop, nodes  # noqa: F401

from kvpacket_rag import KVPacketEngine

DOCUMENT = Document(text="\n\n\n".join(CHUNKS), id_="doc")


def known(engine: KVPacketEngine) -> set[str]:
    return {chunk.text for chunk in engine.store.known(engine.signature)}


def cut(document: Document) -> list[BaseNode]:
    split = SentenceSplitter(chunk_size=40, chunk_overlap=0)
    found = list(split([document]))
    assert [node.get_content() for node in found] == document.text.split("\n\n\n")
    return found


@pytest.mark.parametrize("given", [nodes(), cut(DOCUMENT)], ids=["without hash", "with hash"])
def test_a_document_in_two_batches_keeps_all_its_packets(engine: KVPacketEngine, given: list[BaseNode]):
    for part in (given[:2], given[2:]):
        run = IngestionPipeline(transformations=[KVPacketTransform(engine)], disable_cache=True)
        run.run(nodes=part)
    assert known(engine) == set(CHUNKS)


def test_batches_of_another_version_take_the_place_of_the_first_as_a_whole(engine: KVPacketEngine):
    changed = Document(text="\n\n\n".join([CHUNKS[0], CHUNKS[3]]), id_="doc")
    for given in (cut(DOCUMENT), cut(changed)):
        for node in given:
            KVPacketTransform(engine)([node])
    assert known(engine) == {CHUNKS[0], CHUNKS[3]}
    for node in cut(DOCUMENT):
        KVPacketTransform(engine)([node])
    assert known(engine) == set(CHUNKS)


def test_what_was_dropped_comes_again_and_a_node_without_document_is_its_own(engine: KVPacketEngine):
    KVPacketTransform(engine)(cut(DOCUMENT))
    assert len(drop_packets(engine, ["doc"])) == 4
    for node in cut(DOCUMENT)[1:]:
        KVPacketTransform(engine)([node])
    assert known(engine) == set(CHUNKS[1:])
    for text in CHUNKS[:2]:
        KVPacketTransform(engine)([Document(text=text, id_="other")])
    assert known(engine) == set(CHUNKS[1:])


def test_threads_that_bring_parts_of_one_document_lose_none(engine: KVPacketEngine):
    step, given = KVPacketTransform(engine), cut(DOCUMENT)
    threads = [threading.Thread(target=step, args=[[node]]) for node in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert known(engine) == set(CHUNKS)
