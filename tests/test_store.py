"""What every packet store promises, on disk, in memory and in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_samples import REMOTE_KINDS, open_remote

from kvpacket_rag.errors import PacketError, PacketMismatchError, PacketNotFoundError, StoreError, StoreFullError
from kvpacket_rag.packet import Packet, PacketSignature, packet_id
from kvpacket_rag.store import DiskStore, MemoryStore, PacketStore, RemoteStore
from kvpacket_rag.store.packet_file import packet_parts

SIGNATURE = PacketSignature(weights="w" * 64, tokenizer="t" * 64, adapter="none", rope="r" * 64, dtype="float32")


def make_packet(seed: int, signature: PacketSignature = SIGNATURE, num_tokens: int = 5) -> Packet:
    """A random packet of keys (2, 3, tokens, 8) and values (2, 3, tokens, 4); the seed is its only token."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, signature.dtype)
    tensors = tuple(torch.randn(2, 3, num_tokens, width, generator=generator).to(dtype) for width in (8, 4))
    return Packet(packet_id([seed], signature), signature, tensors, num_tokens + 2, num_tokens)


def same(left: Packet, right: Packet) -> bool:
    """Equal in every field and in every bit."""
    pairs = zip(left.tensors, right.tensors, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs) and (
        replace(left, tensors=right.tensors) == right
    )


def stored_bytes(kind: str, packet: Packet) -> int:
    """What a packet takes in a store: on disk, the header of its file as well."""
    return sum(map(len, packet_parts(packet))) if kind == "disk" else packet.size_bytes


def open_store(kind: str, folder: Path, room: int | None = None) -> PacketStore:
    """A store with room for that many packets of :func:`make_packet`, or for any number."""
    if kind not in ("disk", "memory"):
        return open_remote(kind, folder)
    max_bytes = None if room is None else room * stored_bytes(kind, make_packet(0))
    return DiskStore(folder / "store", max_bytes) if kind == "disk" else MemoryStore(max_bytes)


@pytest.fixture(autouse=True)
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every store on disk that a test opened, and what runs beside it."""
    opened: list[DiskStore | RemoteStore] = []

    def remember(kind: type[DiskStore] | type[RemoteStore]) -> None:
        real = kind.__init__

        def remembering(self: Any, *arguments: Any, **options: Any) -> None:
            real(self, *arguments, **options)
            opened.append(self)

        monkeypatch.setattr(kind, "__init__", remembering)

    for each in (DiskStore, RemoteStore):
        remember(each)
    yield
    for store in reversed(opened):
        store.close()


@pytest.fixture(params=["disk", "memory", *REMOTE_KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["disk", "memory"])
def capped_kind(request: pytest.FixtureRequest) -> str:
    """Those whose byte cap is that of all their packets."""
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> PacketStore:
    return open_store(kind, tmp_path)


@pytest.fixture
def small_store(capped_kind: str, tmp_path: Path) -> PacketStore:
    """Room for three packets."""
    return open_store(capped_kind, tmp_path, room=3)


def test_every_store_follows_the_protocol(store: PacketStore) -> None:
    assert isinstance(store, PacketStore)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_packet_comes_back_bit_for_bit(store: PacketStore, dtype: str) -> None:
    packet = make_packet(1, replace(SIGNATURE, dtype=dtype))
    store.put(packet, "text")
    assert same(store.get(packet.packet_id, packet.signature), packet)


def test_not_a_number_and_negative_zero_keep_their_bits(store: PacketStore) -> None:
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]).reshape(1, 1, 2, 2)
    packet = Packet(packet_id([7], SIGNATURE), SIGNATURE, (tensor,), 2, 2)
    store.put(packet, "text")
    assert same(store.get(packet.packet_id, SIGNATURE), packet)


@pytest.mark.parametrize("name", [f.name for f in fields(PacketSignature)])
def test_each_field_of_the_signature_changed_alone_refuses(store: PacketStore, name: str) -> None:
    packet = make_packet(1)
    store.put(packet, "text")
    changed: dict[str, Any] = {name: 2 if name == "format_version" else "other"}
    other = replace(SIGNATURE, **changed)
    with pytest.raises(PacketMismatchError, match=name):
        store.get(packet.packet_id, other)
    assert packet_id([1], other) not in store


def test_an_unknown_packet_is_not_found(store: PacketStore) -> None:
    with pytest.raises(PacketNotFoundError, match="encode the chunk again"):
        store.get("0" * 64, SIGNATURE)
    with pytest.raises(PacketNotFoundError):
        store.add_owner("0" * 64, "owner")
    store.delete("0" * 64)
    assert "0" * 64 not in store


@pytest.mark.parametrize("name", ["../" * 20 + "etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", "/" + "0" * 63, ""])
def test_a_name_that_is_no_packet_id_is_refused(store: PacketStore, name: str) -> None:
    packet = replace(make_packet(1), packet_id=name)
    for act in (
        lambda: store.put(packet, "text"),
        lambda: store.get(name, SIGNATURE),
        lambda: store.delete(name),
        lambda: store.add_owner(name, "owner"),
    ):
        with pytest.raises(PacketError, match="no packet id"):
            act()
    assert name not in store and len(store) == 0


def test_the_same_text_under_two_owners_is_one_packet(store: PacketStore) -> None:
    store.put(make_packet(1), "text", "first")
    size = store.size_bytes
    store.put(make_packet(1), "text", "second")
    assert len(store) == 1 and store.size_bytes == size >= make_packet(1).size_bytes
    assert len(list(store.known(SIGNATURE))) == 1


def test_a_packet_goes_with_its_last_owner(store: PacketStore) -> None:
    shared, single = make_packet(1), make_packet(2)
    store.put(shared, "shared", "first")
    store.add_owner(shared.packet_id, "second")
    store.put(single, "single", "first")
    assert store.drop_owners(["first", "nobody"]) == [single.packet_id]
    assert shared.packet_id in store and single.packet_id not in store
    assert store.drop_owners(["second"]) == [shared.packet_id]
    assert (len(store), store.size_bytes, list(store.known(SIGNATURE))) == (0, 0, [])


def test_dropping_many_owners_at_once_deletes_in_the_order_of_putting(store: PacketStore) -> None:
    packets = [make_packet(seed) for seed in range(6)]
    for number, packet in enumerate(packets):
        store.put(packet, f"text {number}", f"owner {number}")
    dropped = store.drop_owners(f"owner {number}" for number in range(1200))
    assert dropped == [packet.packet_id for packet in packets]


def test_dropping_owners_leaves_a_packet_that_never_had_one(store: PacketStore) -> None:
    store.put(make_packet(1), "text")
    assert store.drop_owners(["owner"]) == [] and len(store) == 1


def test_a_deleted_packet_is_gone_with_its_text_and_can_be_put_again(store: PacketStore) -> None:
    packet = make_packet(1)
    store.put(packet, "old", "owner")
    store.delete(packet.packet_id)
    assert packet.packet_id not in store and list(store.known(SIGNATURE)) == []
    store.put(packet, "new")
    assert [chunk.text for chunk in store.known(SIGNATURE)] == ["new"]
    assert store.drop_owners(["owner"]) == []


def test_known_texts_and_counts_are_those_of_the_signature(store: PacketStore) -> None:
    other = replace(SIGNATURE, adapter="a" * 64)
    store.put(make_packet(1), "one")
    store.put(make_packet(2, num_tokens=9), "two")
    store.put(make_packet(3, other), "three")
    assert [(chunk.text, chunk.num_tokens) for chunk in store.known(SIGNATURE)] == [("one", 5), ("two", 9)]
    assert [chunk.packet_id for chunk in store.known(other)] == [packet_id([3], other)]
    assert store.signatures() == {SIGNATURE.to_json(): 2, other.to_json(): 1}


def test_the_revision_changes_with_the_known_texts_only(store: PacketStore) -> None:
    packet = make_packet(1)
    revisions = [store.revision()]
    store.put(packet, "text", "first")
    revisions.append(store.revision())
    store.put(packet, "text", "second")
    store.get(packet.packet_id, SIGNATURE)
    assert store.revision() == revisions[-1]
    store.delete(packet.packet_id)
    revisions.append(store.revision())
    assert len(set(revisions)) == 3


def test_the_byte_cap_holds_after_every_put(capped_kind: str, small_store: PacketStore) -> None:
    cap = 3 * stored_bytes(capped_kind, make_packet(0))
    for seed in range(12):
        small_store.put(make_packet(seed), f"text {seed}")
        assert small_store.size_bytes <= cap and packet_id([seed], SIGNATURE) in small_store
    assert len(small_store) == 3


def test_the_least_recently_used_packet_makes_room(small_store: PacketStore) -> None:
    packets = [make_packet(seed) for seed in range(4)]
    for packet in packets[:3]:
        small_store.put(packet, "text")
    small_store.get(packets[0].packet_id, SIGNATURE)
    small_store.put(packets[3], "text")
    assert [packet.packet_id in small_store for packet in packets] == [True, False, True, True]


def test_the_text_of_an_evicted_packet_stays_known_while_it_has_owners(small_store: PacketStore) -> None:
    owned, unowned = make_packet(0), make_packet(1)
    small_store.put(owned, "owned", "owner")
    small_store.put(unowned, "unowned")
    for seed in range(2, 5):
        small_store.put(make_packet(seed), "filler", "owner")
    assert [chunk.text for chunk in small_store.known(SIGNATURE)] == ["owned"] + ["filler"] * 3
    with pytest.raises(PacketNotFoundError, match="evicted"):
        small_store.get(owned.packet_id, SIGNATURE)
    small_store.put(owned, "owned")
    assert same(small_store.get(owned.packet_id, SIGNATURE), owned)


def test_a_held_packet_is_never_evicted(small_store: PacketStore) -> None:
    held = make_packet(0)
    small_store.put(held, "text")
    with small_store.hold([held.packet_id]), small_store.hold([held.packet_id, "0" * 64]):
        for seed in range(1, 9):
            small_store.put(make_packet(seed), "text")
            assert held.packet_id in small_store
    for seed in range(9, 12):
        small_store.put(make_packet(seed), "text")
    assert held.packet_id not in small_store


def test_a_store_full_of_held_packets_refuses_and_keeps_them(small_store: PacketStore) -> None:
    ids = [packet_id([seed], SIGNATURE) for seed in range(3)]
    for seed in range(3):
        small_store.put(make_packet(seed), "text")
    with pytest.raises(KeyError), small_store.hold(ids):
        with pytest.raises(StoreFullError, match="raise max_bytes"):
            small_store.put(make_packet(3), "text")
        assert all(name in small_store for name in ids) and len(small_store) == 3
        raise KeyError  # a request that fails lets go as well
    small_store.put(make_packet(3), "text")


def test_a_packet_larger_than_the_cap_is_refused_and_evicts_nothing(small_store: PacketStore) -> None:
    small_store.put(make_packet(0), "text")
    with pytest.raises(StoreFullError):
        small_store.put(make_packet(1, num_tokens=200), "text")
    assert len(small_store) == 1 and packet_id([0], SIGNATURE) in small_store


def test_a_cap_of_no_bytes_is_refused(tmp_path: Path) -> None:
    for opener in (lambda: MemoryStore(0), lambda: DiskStore(tmp_path, -1)):
        with pytest.raises(StoreError, match="max_bytes"):
            opener()


def test_eight_threads_get_what_was_put(kind: str, tmp_path: Path) -> None:
    store = open_store(kind, tmp_path)
    packets = [make_packet(seed) for seed in range(12)]

    def work(worker: int) -> bool:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(worker)).tolist()
        for number in order:
            store.put(packets[number], f"text {number}", f"worker {worker}")
        return all(same(store.get(packets[n].packet_id, SIGNATURE), packets[n]) for n in reversed(order))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert len(store) == 12
    assert len(store.drop_owners(f"worker {worker}" for worker in range(8))) == 12


def test_a_batch_is_not_kept_alive_by_one_of_its_packets() -> None:
    batch = torch.randn(2, 3, 64, 8)
    packet = Packet(packet_id([1], SIGNATURE), SIGNATURE, (batch[:, :, :4],), 4, 4)
    store = MemoryStore()
    store.put(packet, "text")
    (stored,) = store.get(packet.packet_id, SIGNATURE).tensors
    assert torch.equal(stored, batch[:, :, :4]) and stored.untyped_storage().nbytes() == packet.size_bytes
