"""What an object store says of a packet beside its tensors: the chunk's text, and when it was stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from kvpacket_rag.errors import PacketError, StoreFormatError
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.store.protocol import is_packet_id
from kvpacket_rag.store.schema import row_digest

MAX_RECORD_BYTES = 2 << 20  # a chunk of 300,000 characters takes less, each escaped


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk whose packet is stored; its object is put after the packet's, so a packet with a record is whole.

    Attributes:
        packet_id: of the packet.
        signature: it was made with, as canonical JSON.
        text: of the chunk, edges stripped.
        num_tokens: of the text.
        stored_ns: when, in nanoseconds since 1970.
    """

    packet_id: str
    signature: str
    text: str
    num_tokens: int
    stored_ns: int

    @property
    def digest(self) -> str:
        """Seals what a chunk must never be mistaken in."""
        return row_digest(self.packet_id, self.signature, self.text, self.num_tokens).hex()

    def to_json(self) -> bytes:
        """The content of its object."""
        return json.dumps(asdict(self) | {"digest": self.digest}).encode()

    @classmethod
    def from_json(cls, content: bytes, packet_id: str) -> ChunkRecord:
        """The inverse of :meth:`to_json`.

        Raises:
            StoreFormatError: it is no record, is damaged, or is of another packet.
        """
        told = f"the record of packet {packet_id}"
        try:
            values = json.loads(content)
            record = cls(**{field.name: values[field.name] for field in fields(cls)})
            intact = is_packet_id(packet_id) and record._has_types() and record.packet_id == packet_id
            intact = intact and values["digest"] == record.digest
            record.text.encode()
            PacketSignature.from_json(record.signature)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PacketError) as error:
            raise StoreFormatError(f"{told} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
        if not intact:
            raise StoreFormatError(f"{told} is damaged; it is written anew with the packet")
        return record

    def _has_types(self) -> bool:
        """Whether the fields are what they are said to be, and a catalogue takes them."""
        numbers, texts = (self.num_tokens, self.stored_ns), (self.packet_id, self.signature, self.text)
        return all(type(value) is int and 0 <= value < 2**63 for value in numbers) and all(
            type(value) is str for value in texts
        )


def record_key(packet_id: str) -> str:
    """Where a packet's record lies."""
    return f"chunks/{packet_id}.json"


def packet_key(packet_id: str) -> str:
    """Where its tensors lie."""
    return f"packets/{packet_id[:2]}/{packet_id}.safetensors"


def quarantine_key(packet_id: str) -> str:
    """Where they are put when they are damaged."""
    return f"quarantine/{packet_id}.safetensors"
