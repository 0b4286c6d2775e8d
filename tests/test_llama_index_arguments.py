"""Arguments of the wrong kind: each is named, with what to pass in its place, and nothing is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core.schema import NodeWithScore
from llama_index_kvpacket import (
    KVPacketLLM,
    KVPacketPostprocessor,
    KVPacketTransform,
    KVPacketVectorStore,
    drop_packets,
)
from llama_index_samples import node, nodes

from kvpacket_rag import KVPacketEngine, KVPacketError


@pytest.mark.parametrize(
    "make",
    [
        KVPacketTransform,
        KVPacketPostprocessor,
        KVPacketVectorStore,
        lambda engine: KVPacketLLM(engine=engine),
        lambda engine: drop_packets(engine, ["d1"]),
    ],
)
def test_what_is_no_engine_is_refused(engine: KVPacketEngine, make: Callable[[Any], Any]):
    for wrong in ("library", KVPacketLLM(engine=engine)):
        with pytest.raises(KVPacketError, match=rf"needs a KVPacketEngine.* got a {type(wrong).__name__}; pass"):
            make(wrong)


def test_one_id_is_not_taken_for_its_letters(engine: KVPacketEngine):
    store, llm = KVPacketVectorStore(engine), KVPacketLLM(engine=engine, max_new_tokens=1)
    store.add([node(name, text) for name, text in zip("abcd", CHUNKS, strict=True)])
    KVPacketTransform(engine)(nodes(CHUNKS[:1], "x"))
    calls: list[Callable[[], Any]] = [
        lambda: store.delete_nodes("abc"),  # type: ignore[arg-type]
        lambda: store.get_nodes("abc"),  # type: ignore[arg-type]
        lambda: drop_packets(engine, "x"),
        lambda: drop_packets(engine, [1]),  # type: ignore[list-item]
        lambda: llm.hinted("abc"),
        lambda: llm.complete("Who?", hints="abc"),
        lambda: llm.complete("Who?", stop=5),
    ]
    for call in calls:
        with pytest.raises(KVPacketError, match=r"is ('abc'|'x'|\[1\]|5); pass a list of strings"):
            call()
    assert len(store.client) == len(engine.store) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt2"}, "model is 'gpt2', a name; pass it as model_name"),
        ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2', a name; pass it as tokenizer_name"),
        ({"store": 5}, "store is a int; pass a folder"),
        ({"model_kwargs": "float16"}, "model_kwargs is 'float16'; pass a dictionary"),
        ({"generate_kwargs": [1]}, r"generate_kwargs is \[1\]; pass a dictionary"),
    ],
)
def test_a_name_in_place_of_an_object_is_told_apart(fields: dict[str, Any], message: str):
    with pytest.raises(KVPacketError, match=message):
        KVPacketLLM(**fields)


def test_what_is_no_text_and_no_node_is_refused(engine: KVPacketEngine):
    store, llm = KVPacketVectorStore(engine), KVPacketLLM(engine=engine)
    for prompt in (None, 5, ["Who?"]):
        with pytest.raises(KVPacketError, match=f"the prompt is a {type(prompt).__name__}; pass a string"):
            llm.complete(prompt)  # type: ignore[arg-type]
    with pytest.raises(KVPacketError, match="chat_template_kwargs is 'x'; pass a dictionary"):
        llm.complete("Who?", chat_template_kwargs="x")
    with pytest.raises(KVPacketError, match="nodes holds a NodeWithScore; pass a list of nodes"):
        store.add([NodeWithScore(node=node("a", CHUNKS[0]))])  # type: ignore[list-item]
