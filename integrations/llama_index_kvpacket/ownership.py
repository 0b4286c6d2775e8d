"""Whose packets are whose: nodes own the packets of their texts, in one engine's store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvpacket_rag import KVPacketEngine, PacketIndex, PacketMismatchError, PacketNotFoundError, PacketSignature

Progress = Callable[[int, int], None]
_BATCH_CHUNKS = 64


def encode_nodes(
    engine: KVPacketEngine, texts: Mapping[str, str], known: Mapping[str, str], progress: Progress | None
) -> list[str]:
    """Packet ids of nodes' texts, each owned by its node.

    Args:
        engine: encodes what is new.
        texts: by node id.
        known: texts that nodes had before; where one has changed, the node lets go of the old packet once the
            new one is stored.
        progress: as for ``KVPacketEngine.encode``.
    """
    moved = [name for name, text in texts.items() if name in known and known[name].strip() != text.strip()]
    if moved:
        engine.encode([texts[name] for name in moved], None, progress)
        engine.drop_owners(moved)
    return engine.encode(list(texts.values()), list(texts), progress)


def reencode_all(index: PacketIndex, engine: KVPacketEngine, progress: Progress | None) -> None:
    """Give every chunk of an index a packet of this engine; those that have one cost nothing."""
    rows = list(index.rows())
    for start in range(0, len(rows), _BATCH_CHUNKS):
        chunks = [chunk for chunk, _ in rows[start : start + _BATCH_CHUNKS]]
        names = [chunk.chunk_id for chunk in chunks]
        packet_ids = engine.encode([chunk.text for chunk in chunks], names, progress)
        index.set_packet_ids(dict(zip(names, packet_ids, strict=True)))
    current = {packet_id for _, packet_id in index.rows()}
    for packet_id in {old for _, old in rows} - current:
        engine.store.delete(packet_id)
    index.set_setting("signature", engine.signature.to_json())


def check_packets(index: PacketIndex, engine: KVPacketEngine, where: str | None) -> None:
    """See that the engine can read the packets of a stored index; note its signature in a new one.

    Raises:
        PacketMismatchError: they were made by another model, adapter or dtype.
        PacketNotFoundError: the engine's store has none of them.
    """
    signature = engine.signature.to_json()
    written = index.get_setting("signature")
    if len(index) and written is not None and written != signature:
        try:
            engine.signature.require(PacketSignature.from_json(written), "of any node")
        except PacketMismatchError as error:
            raise PacketMismatchError(f"the index in {where}: {error}, with reencode=True") from error
    if len(index) and not engine.store.signatures().get(signature):
        raise PacketNotFoundError(
            f"the index in {where} holds {len(index)} nodes, but the engine's store has no packet of its model; load "
            "the engine with the store that was used when the nodes were added, or pass reencode=True"
        )
    notes = {"signature": signature, "model": engine.model_name, "dtype": engine.signature.dtype}
    for key, value in notes.items():
        if index.get_setting(key) != value:
            index.set_setting(key, value)
