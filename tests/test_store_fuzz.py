"""What stores and indexes keep as JSON, exchanged at random: read as it was written, or refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import SIGNATURE, closing, make_packet  # noqa: F401 (closing is a fixture)
from test_store_hostile import PACKET, fuzz, json_values

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import StoreError, StoreFormatError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal
from kvpacket_rag.ownership import finish_changes
from kvpacket_rag.store import MemoryStore
from kvpacket_rag.store.remote_record import ChunkRecord

RECORD = ChunkRecord(PACKET.packet_id, SIGNATURE.to_json(), "the lease", 2, 1)
edges = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 3), st.binary(max_size=3)), max_size=4)


@fuzz
@given(edges, st.dictionaries(st.sampled_from([*asdict(RECORD), "digest"]), json_values, max_size=3))
def test_any_record_of_an_object_store_is_whole_or_refused(
    damage: list[tuple[int, int, bytes]], changes: dict[str, Any]
) -> None:
    """Bytes exchanged, fields exchanged, and fields exchanged by who can seal them again."""
    content = bytearray(RECORD.to_json())
    for start, length, piece in damage:
        content[start : start + length] = piece
    with contextlib.suppress(StoreFormatError):
        told = ChunkRecord.from_json(bytes(content), PACKET.packet_id)
        assert replace(told, stored_ns=1) == RECORD  # nothing hangs on when
    changed = json.loads(RECORD.to_json()) | changes
    with contextlib.suppress(StoreFormatError):
        told = ChunkRecord.from_json(json.dumps(changed).encode(), PACKET.packet_id)
        assert replace(told, stored_ns=1) == RECORD
    forged = ChunkRecord(**{key: value for key, value in changed.items() if key != "digest"})
    with contextlib.suppress(AttributeError):  # of what is no text, no seal can be made
        forged.to_json()
        with contextlib.suppress(StoreFormatError):
            told = ChunkRecord.from_json(forged.to_json(), PACKET.packet_id)
            assert told == forged and told.packet_id == PACKET.packet_id


names = st.sampled_from(["d0", "d1", "c0", "c1", "gone", ""])


@settings(fuzz, max_examples=40)
@given(
    st.sampled_from(["unsettled", "deleting", "unsettled_nodes"]),
    json_values
    | st.lists(names)
    | st.dictionaries(names, json_values | st.lists(names | json_values, max_size=3), max_size=3),
)
def test_any_journal_is_followed_or_refused_and_costs_no_row_it_does_not_name(key: str, journal: Any) -> None:
    index, store = PacketIndex.open(None), MemoryStore()
    chunks = [Chunk(f"c{n}", f"text {n}", f"d{n}") for n in range(2)]
    index.add(chunks, np.eye(2), [make_packet(n).packet_id for n in range(2)])
    for n in range(2):
        store.put(make_packet(n), f"text {n}", f"c{n}")
    index.set_setting(key, json.dumps(journal))
    with contextlib.suppress(StoreError):
        own = OwnerJournal(index, store)
        own.finish_deletions()
        own.settle(own.documents())
        finish_changes(index, store)
    left = {chunk.chunk_id for chunk, _ in index.rows()}
    assert left == {"c0", "c1"}  # without the other half of the journal no row goes
    assert all(make_packet(n).packet_id in store for n in range(2))
    index.close()
