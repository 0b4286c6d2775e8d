"""Every error this package raises on purpose.

KVPacketError
├── ModelNotFoundError         no such model, here or on the hub
├── UnsupportedModelError      the model cannot be served from packets
├── AdapterError               an adapter file is malformed or does not fit the model
├── PromptError                the prompt cannot be answered as it stands
│   └── ContextTooLongError    prompt, packets and answer exceed the model's window
├── PacketError
│   ├── PacketNotFoundError    the store holds no such packet
│   ├── PacketMismatchError    the packet was made by another model, adapter or dtype
│   ├── PacketCorruptError     the packet's file is damaged
│   └── PacketMissError        a chunk had to be read again, and the caller wants that to be an error
├── StoreError                 a store or index cannot be opened, read or written
│   ├── StoreFormatError       it was written in a format this version does not read
│   └── StoreFullError         no room is left for another packet
├── DeviceError                memory ran out, or a device cannot be used any more
├── DocumentError              a document cannot be read or cut into chunks
├── DatasetError               a data set is malformed or unknown
├── TrainingError              an adapter cannot be trained as asked, or its training went wrong
└── MissingExtraError          an optional package is needed and not installed
"""

from __future__ import annotations


class KVPacketError(Exception):
    """Base of every error this package raises on purpose."""


class ModelNotFoundError(KVPacketError):
    """No model of that name is installed, stored on disk, or reachable on the hub."""


class UnsupportedModelError(KVPacketError):
    """The model's attention depends on more than relative positions, so packets would be wrong."""


class AdapterError(KVPacketError):
    """An adapter file is malformed or was trained for another model."""


class PromptError(KVPacketError):
    """The prompt cannot be answered as it stands."""


class ContextTooLongError(PromptError):
    """Prompt, packets and requested answer exceed the model's window.

    Attributes:
        room: tokens that an answer to this prompt may have; 0 where that is not known, or none.
    """

    def __init__(self, message: str, room: int = 0) -> None:
        super().__init__(message)
        self.room = max(room, 0)


class PacketError(KVPacketError):
    """Base of what can be wrong with one packet."""


class PacketNotFoundError(PacketError):
    """The store holds no packet of that id."""


class PacketMismatchError(PacketError):
    """The packet was made by another model, adapter, dtype or format than the reader's."""


class PacketCorruptError(PacketError):
    """The packet's file is damaged and has been set aside."""


class PacketMissError(PacketError):
    """A chunk could not be taken from a packet, and the request asked for an error in that case."""


class StoreError(KVPacketError):
    """A store or an index cannot be opened, read or written."""


class StoreFormatError(StoreError):
    """A store or an index was written in a format this version does not read."""


class StoreFullError(StoreError):
    """No room is left for another packet, on the disk or under the byte cap."""


class DeviceError(KVPacketError):
    """The memory of the host or of a device ran out, or the device cannot be used any more."""


class DocumentError(KVPacketError):
    """A document cannot be read or cut into chunks."""


class DatasetError(KVPacketError):
    """A data set is malformed or unknown."""


class TrainingError(KVPacketError):
    """An adapter cannot be trained as asked, or its training went wrong."""


class MissingExtraError(KVPacketError):
    """An optional package is needed for this and is not installed."""
