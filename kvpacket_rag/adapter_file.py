"""Adapters as files: one safetensors file of ours, and the ``.pt`` files of the paper."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from kvpacket_rag.errors import AdapterError

_FORMAT = "kvpacket-adapter-1"


def save(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: str | Path) -> None:
    """Write one safetensors file, with the metadata in its header; complete or not at all.

    Raises:
        AdapterError: it cannot be written; a file that was there is as it was.
    """
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    about = {"format": _FORMAT, "about": json.dumps(dict(metadata), sort_keys=True)}
    try:  # not by safetensors' own writer, whose files only their owner may read
        write_whole(Path(path), serialise(held, about))
    except OSError as error:
        raise AdapterError(f"cannot write the adapter {path}: {error}; make room or name another place") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there complete or, even after a power cut, as it was; OSError if it cannot be written."""
    half = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
    try:
        with half.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)


def load(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name and metadata, as :func:`save` wrote them; ``header`` and ``trailer`` are among them.

    Raises:
        AdapterError: no such file, or it is no adapter of this format.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise AdapterError(f"{path} is a folder, a pipe or a device; expected the file of an adapter")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT or not {"header", "trailer"} <= set(file.keys()):
                raise AdapterError(
                    f"{path} is no adapter of format {_FORMAT!r} (found format {about.get('format')!r}); "
                    "for a .pt file of the paper use 'kvpacket import-adapter'"
                )
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(about.get("about", "{}"))  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"cannot read the adapter {path}: {error}") from error


def read_paper_file(path: str | Path) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Header, trailer and metadata of a ``.pt`` adapter of the paper's repository, of either generation.

    Both hold ``header`` and ``trailer`` of shape (1, tokens, hidden); the older one also their lengths,
    ``dim``, ``mean`` and ``std``. Unpickling is restricted to tensors and plain values.

    Raises:
        AdapterError: the file is anything else.
    """
    if not zipfile.is_zipfile(path):
        raise AdapterError(f"{path} is no torch file (or does not exist); expected a .pt adapter of the paper")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise AdapterError(f"{path} is compressed, which torch never does, and may unfold to any size")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise AdapterError(f"cannot read {path} as tensors and plain values: {error}") from error
    if not isinstance(content, dict):
        raise AdapterError(f"{path} holds a {type(content).__name__}; expected a dictionary with header and trailer")
    header, trailer = (_paper_part(content.get(name), f"{name} of {path}") for name in ("header", "trailer"))
    if header.dtype != trailer.dtype:
        raise AdapterError(f"{path} holds header in {header.dtype} and trailer in {trailer.dtype}; expected one type")
    stated = {"header_len": header.shape[1], "trailer_len": trailer.shape[1], "dim": header.shape[2]}
    for name, value in stated.items():
        if content.get(name, value) != value:
            raise AdapterError(f"{path} states {name} = {content[name]!r}, but its tensors have {value}")
    recipe = content.get("train_config")
    epochs = recipe.get("total_epoch") if isinstance(recipe, dict) else None
    about = {"recipe": "imported from the KV Packet repository"} | ({"epochs": str(epochs)} if epochs else {})
    return header[0], trailer[0], about


def _paper_part(part: object, what: str) -> Tensor:
    if not isinstance(part, Tensor) or part.dim() != 3 or part.shape[0] != 1 or not part.is_floating_point():
        found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise AdapterError(f"{what} is {found}; expected floats of shape (1, tokens, hidden)")
    if part.nbytes > part.untyped_storage().nbytes():
        raise AdapterError(f"{what} is {tuple(part.shape)}, but the file holds fewer numbers, to be repeated")
    return part
