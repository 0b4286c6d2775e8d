"""The adapter: trained soft tokens around a chunk, shared by all chunks.

A packet is [header, chunk, trailer] prefilled alone (Chen et al., arXiv 2604.13226, section 3).
Header and trailer are free vectors in the space of input embeddings. Both may have zero length:
then a packet is the bare chunk.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvpacket_rag.errors import AdapterError

_FORMAT = "kvpacket-adapter-1"


class Adapter(nn.Module):
    """Header and trailer, and what is known about them.

    Args:
        header: (header tokens, hidden), kept in float32.
        trailer: (trailer tokens, hidden), kept in float32.
        metadata: where it comes from, such as model, weights and tokenizer fingerprint, recipe; text to text.

    Raises:
        AdapterError: the two do not share one hidden size, or hold numbers that are not finite.
    """

    def __init__(self, header: Tensor, trailer: Tensor, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__()
        if header.dim() != 2 or trailer.dim() != 2 or header.shape[1] != trailer.shape[1]:
            raise AdapterError(
                f"header {tuple(header.shape)} and trailer {tuple(trailer.shape)} do not fit; "
                "expected (tokens, hidden) with one hidden size"
            )
        if not (header.isfinite().all() and trailer.isfinite().all()):
            raise AdapterError("header or trailer holds numbers that are not finite; train or export it again")
        self.header = nn.Parameter(header.detach().float().clone())
        self.trailer = nn.Parameter(trailer.detach().float().clone())
        self.metadata = dict(metadata or {})

    @classmethod
    def empty(cls, hidden_size: int) -> Adapter:
        """No soft tokens at all: packets are the bare chunks."""
        return cls(torch.zeros(0, hidden_size), torch.zeros(0, hidden_size))

    @classmethod
    def random(cls, embeddings: Tensor, header: int = 8, trailer: int = 8, seed: int = 0) -> Adapter:
        """An untrained adapter, normal with the scalar mean and deviation of the model's embeddings.

        Args:
            embeddings: (vocabulary, hidden), the model's input embeddings.
            header: soft tokens before a chunk.
            trailer: soft tokens behind it.
            seed: of the draw.
        """
        values = embeddings.detach().float()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(header + trailer, values.shape[1], generator=generator)
        drawn = drawn * values.std().cpu() + values.mean().cpu()
        return cls(drawn[:header], drawn[header:])

    @property
    def hidden_size(self) -> int:
        """Width of a soft token."""
        return self.header.shape[1]

    @property
    def num_tokens(self) -> int:
        """Soft tokens added to every chunk."""
        return self.header.shape[0] + self.trailer.shape[0]

    @property
    def digest(self) -> str:
        """SHA-256 over both parts, in hex; ``"none"`` when there are no soft tokens."""
        if not self.num_tokens:
            return "none"
        digest = hashlib.sha256()
        for part in (self.header, self.trailer):
            digest.update(str(tuple(part.shape)).encode())
            digest.update(part.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def wrap(self, embeddings: Tensor) -> Tensor:
        """Put the soft tokens around a chunk; serving and training both come through here.

        Args:
            embeddings: (tokens, hidden), of the chunk alone.

        Returns:
            (header + tokens + trailer, hidden), in the dtype and on the device of ``embeddings``.
        """
        return torch.cat([self.header.to(embeddings), embeddings, self.trailer.to(embeddings)])

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, with the metadata in its header."""
        tensors = {"header": self.header.detach().contiguous(), "trailer": self.trailer.detach().contiguous()}
        save_file(tensors, path, metadata={"format": _FORMAT, "about": json.dumps(self.metadata, sort_keys=True)})

    @classmethod
    def load(cls, path: str | Path) -> Adapter:
        """Read what :meth:`save` wrote.

        Raises:
            AdapterError: no such file, or it is no adapter of this format.
        """
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT or set(file.keys()) != {"header", "trailer"}:
                    raise AdapterError(
                        f"{path} is no adapter of format {_FORMAT!r} (found format {about.get('format')!r}); "
                        "for a .pt file of the paper use 'kvpacket import-adapter'"
                    )
                return cls(file.get_tensor("header"), file.get_tensor("trailer"), json.loads(about.get("about", "{}")))
        except (OSError, SafetensorError, ValueError) as error:
            raise AdapterError(f"cannot read the adapter {path}: {error}") from error


def import_paper_adapter(path: str | Path) -> Adapter:
    """Read a ``.pt`` adapter of the paper's repository, of either generation.

    Both hold ``header`` and ``trailer`` of shape (1, tokens, hidden); the older one also their lengths,
    ``dim``, ``mean`` and ``std``. Unpickling is restricted to tensors and plain values.

    Raises:
        AdapterError: the file is anything else.
    """
    if not zipfile.is_zipfile(path):
        raise AdapterError(f"{path} is no torch file (or does not exist); expected a .pt adapter of the paper")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
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
    return Adapter(header[0], trailer[0], about)


def _paper_part(part: object, what: str) -> Tensor:
    if not isinstance(part, Tensor) or part.dim() != 3 or part.shape[0] != 1 or not part.is_floating_point():
        found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise AdapterError(f"{what} is {found}; expected floats of shape (1, tokens, hidden)")
    return part
