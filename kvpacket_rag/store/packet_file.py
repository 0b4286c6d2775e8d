"""One packet as one safetensors file: what its bytes are, and the proof that they are whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvpacket_rag.errors import PacketCorruptError, PacketError, StoreError
from kvpacket_rag.packet import FORMAT_VERSION, Packet, PacketSignature

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_METADATA_KEYS = {"format_version", "packet_id", "signature", "span", "num_tokens", "sha256"}
_MAX_HEADER_BYTES = 1 << 20  # ours take about 2 kB; a forged length must not make the reader allocate
_ALIGNMENT = 64
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_SETTLED_NS = 100_000_000  # file times move in ticks of up to 10 ms; within one, a second write would not show


class FileStamp(NamedTuple):
    """What a file looks like from outside; any later write to it, or exchange of it, changes the stamp."""

    mode: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """The stamp of what lies at ``path`` itself, a link not followed.

        Raises:
            FileNotFoundError: nothing is there.
        """
        try:
            found = os.lstat(path)
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error
        return cls(found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def is_regular(self) -> bool:
        """A plain file: no folder, link, pipe or device."""
        return stat.S_ISREG(self.mode)

    def is_settled(self) -> bool:
        """Whether a write from now on is certain to change the stamp."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > _SETTLED_NS


def packet_parts(packet: Packet) -> list[bytes | memoryview]:
    """The bytes of a packet's file, header first, then each tensor's own memory without a copy.

    Written here and not by the safetensors library because its errors do not tell a full disk
    from any other fault; the library reads what this writes.

    Raises:
        PacketError: the file format has no name for the dtype.
    """
    tensors = [tensor.detach().cpu().contiguous() for tensor in packet.tensors]
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "packet_id": packet.packet_id,
        "signature": packet.signature.to_json(),
        "span": str(packet.span),
        "num_tokens": str(packet.num_tokens),
    }
    header: dict[str, object] = {"__metadata__": {**metadata, "sha256": _checksum(metadata, tensors)}}
    start = 0
    by_alignment = sorted(enumerate(tensors), key=lambda numbered: -numbered[1].element_size())
    for name, tensor in by_alignment:  # the widest numbers first, so that all lie on their own boundaries
        if tensor.dtype not in _DTYPE_NAMES:
            raise PacketError(f"packet {packet.packet_id!r} holds {tensor.dtype}, which a packet file cannot; cast it")
        offsets = [start, start + tensor.nbytes]
        header[str(name)] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        start = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # so that the mapped tensors start on a boundary
    return [len(text).to_bytes(8, "little") + text, *(_bytes_of(tensor) for _, tensor in by_alignment)]


def read_packet(path: Path, packet_id: str, signature: PacketSignature, *, verify: bool) -> Packet:
    """The packet in a file, its tensors mapped copy-on-write: writing one cannot change the file.

    Reading the file into memory instead takes two to three times as long when it is warm, with the copy into a
    context: 5.4 ms against 1.8 for 5.6 MB, 51 against 26 for 23 MB. The price of a map: whoever cuts the file short
    while a request reads it ends the process by SIGBUS. Nothing here does so, files are replaced and unlinked whole.

    Args:
        path: the file.
        packet_id: the packet it must hold.
        signature: what it must have been made with; checked before any tensor is touched.
        verify: also recompute the checksum, which reads every byte.

    Raises:
        FileNotFoundError: nothing is at ``path``.
        PacketCorruptError: it is not the whole file of this packet.
        StoreError: the system would not let it be read.
    """
    try:
        _require_sane_header(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            _require_metadata(metadata, packet_id, signature)
            names = [str(number) for number in range(len(file.keys()))]
            if set(names) != set(file.keys()):
                raise PacketCorruptError(f"it holds tensors named {sorted(file.keys())[:8]}, expected {names[:8]}")
            tensors = tuple(file.get_tensor(name) for name in names)
        return _packet_of(metadata, signature, tensors, verify)
    except FileNotFoundError:
        if os.path.lexists(path):  # the library reports every failure to open as a missing file
            raise StoreError(
                f"packet file {str(path)!r} cannot be opened; check the permissions and the open files (ulimit -n)"
            ) from None
        raise
    except SafetensorError as error:
        raise PacketCorruptError(f"it is no whole safetensors file ({error})") from error
    except (OSError, RuntimeError) as error:
        advice = (
            remedy(error) if isinstance(error, OSError) else "check the disk, free memory and open files (ulimit -n)"
        )
        raise StoreError(f"packet file {str(path)!r} cannot be read: {error}; {advice}") from error


def remedy(error: OSError, otherwise: str = "check the permissions") -> str:
    """What to do about what the system refused."""
    return "too many files are open: raise ulimit -n, or close stores" if error.errno in _TOO_MANY else otherwise


def _require_sane_header(path: Path) -> None:
    if not FileStamp.of(path).is_regular:
        raise PacketCorruptError("it is a folder, a link or a device, expected a file")
    with open(path, "rb", buffering=0) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise PacketCorruptError(f"its header claims {header_bytes} bytes, expected at most {_MAX_HEADER_BYTES}")


def _require_metadata(metadata: Mapping[str, str], packet_id: str, signature: PacketSignature) -> None:
    if metadata.keys() != _METADATA_KEYS:
        raise PacketCorruptError(f"its metadata has keys {sorted(metadata)[:8]}, expected {sorted(_METADATA_KEYS)}")
    expected = {
        "format_version": str(FORMAT_VERSION),
        "packet_id": packet_id,
        "signature": signature.to_json(),
    }
    for key, value in expected.items():
        if metadata[key] != value:
            raise PacketCorruptError(f"its {key} is {metadata[key][:600]!r}, expected {value!r}")


def _packet_of(
    metadata: Mapping[str, str], signature: PacketSignature, tensors: tuple[Tensor, ...], verify: bool
) -> Packet:
    covered = {key: value for key, value in metadata.items() if key != "sha256"}
    if verify and _checksum(covered, tensors) != metadata["sha256"]:
        raise PacketCorruptError("its checksum does not match its content")
    try:
        span, num_tokens = int(metadata["span"]), int(metadata["num_tokens"])
        return Packet(metadata["packet_id"], signature, tensors, span, num_tokens)
    except (PacketError, ValueError) as error:
        raise PacketCorruptError(f"it holds no packet ({error})") from error


def _checksum(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> str:
    """SHA-256 over metadata, dtypes, shapes and bytes, so that an edited header shows like an edited tensor."""
    shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors]
    digest = hashlib.sha256(json.dumps([metadata, shapes], sort_keys=True, separators=(",", ":")).encode())
    for tensor in tensors:
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
