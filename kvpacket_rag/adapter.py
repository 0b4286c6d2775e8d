"""The adapter: what is trained, once a model, to let chunks be read alone. Shared by all chunks.

A packet is [header, chunk, trailer] prefilled alone (Chen et al., arXiv 2604.13226, section 3). Header
and trailer are free vectors in the space of input embeddings, the paper's *soft tokens*. Two more parts
may be trained beside them. Both act while a chunk is encoded and never afterwards, so what a packet
holds is all that serving sees of them:

- *deep* vectors, added to the soft tokens' hidden states in front of every layer but the first, as in
  prefix tuning (Li and Liang, arXiv 2101.00190);
- a *low-rank update* (LoRA, Hu et al., arXiv 2106.09685) of the model's projections, for the tokens of
  packets alone.

All parts may be absent: then a packet is the bare chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from kvpacket_rag import adapter_file
from kvpacket_rag.errors import AdapterError


class LowRank(nn.Module):
    """Updates of linear modules, by the modules' names.

    Args:
        updates: module name to (down, up), of shapes (rank, inputs) and (outputs, rank); kept in float32.
    """

    def __init__(self, updates: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        for name, (down, up) in updates.items():
            if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
                raise AdapterError(
                    f"the low-rank update of {name} has shapes {tuple(down.shape)} and {tuple(up.shape)}; "
                    "expected (rank, inputs) and (outputs, rank)"
                )
        self.names = tuple(sorted(updates))
        self.down = nn.ParameterList([updates[name][0].detach().float().clone() for name in self.names])
        self.up = nn.ParameterList([updates[name][1].detach().float().clone() for name in self.names])

    @classmethod
    def fresh(cls, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int = 0) -> LowRank:
        """Updates that change nothing yet: ``down`` is drawn, ``up`` is zero.

        Args:
            shapes: module name to (outputs, inputs).
            rank: of every update.
            seed: of the draw.
        """
        generator = torch.Generator().manual_seed(seed)
        return cls(
            {
                name: (torch.randn(rank, inputs, generator=generator) * inputs**-0.5, torch.zeros(outputs, rank))
                for name, (outputs, inputs) in shapes.items()
            }
        )

    def tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Module name to (down, up); those that change nothing are left out."""
        pairs = zip(self.names, self.down, self.up, strict=True)
        return {name: (down.detach(), up.detach()) for name, down, up in pairs if up.any()}


class Adapter(nn.Module):
    """Soft tokens, what else was trained with them, and what is known about them.

    Args:
        header: (header tokens, hidden), kept in float32.
        trailer: (trailer tokens, hidden), kept in float32.
        metadata: where it comes from, such as model, weights and tokenizer fingerprint, recipe; text to text.
        deep: (layers - 1, header + trailer tokens, hidden), added in front of layers 1, 2, … at the soft tokens.
        low_rank: updates of the model's projections.

    Raises:
        AdapterError: the parts do not share one hidden size, or hold numbers that are not finite.
    """

    def __init__(
        self,
        header: Tensor,
        trailer: Tensor,
        metadata: Mapping[str, str] | None = None,
        *,
        deep: Tensor | None = None,
        low_rank: LowRank | None = None,
    ) -> None:
        super().__init__()
        if header.dim() != 2 or trailer.dim() != 2 or header.shape[1] != trailer.shape[1]:
            raise AdapterError(
                f"header {tuple(header.shape)} and trailer {tuple(trailer.shape)} do not fit; "
                "expected (tokens, hidden) with one hidden size"
            )
        soft = (header.shape[0] + trailer.shape[0], header.shape[1])
        if deep is not None and (deep.dim() != 3 or tuple(deep.shape[1:]) != soft):
            raise AdapterError(f"the deep vectors have shape {tuple(deep.shape)}; expected (layers - 1, *{soft})")
        self.header = nn.Parameter(header.detach().float().clone())
        self.trailer = nn.Parameter(trailer.detach().float().clone())
        self.deep = None if deep is None else nn.Parameter(deep.detach().float().clone())
        self.low_rank = low_rank
        self.metadata = dict(metadata or {})
        self.file: Path | None = None  # that it was read from
        for name, parameter in self.named_parameters():
            if not parameter.isfinite().all():
                raise AdapterError(f"{name} holds numbers that are not finite; train or export the adapter again")

    @classmethod
    def empty(cls, hidden_size: int) -> Adapter:
        """Nothing trained at all: packets are the bare chunks."""
        return cls(torch.zeros(0, hidden_size), torch.zeros(0, hidden_size))

    @classmethod
    def random(cls, embeddings: Tensor, header: int = 8, trailer: int = 8, seed: int = 0) -> Adapter:
        """Untrained soft tokens, normal with the scalar mean and deviation of the model's embeddings.

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
    def stored_tokens(self) -> int:
        """Soft tokens that stay in a packet; those of an encode-only header are read and left out."""
        return self.num_tokens - self.left_out_tokens

    @property
    def left_out_tokens(self) -> int:
        """Soft tokens of the header that are no part of the packet."""
        return self.header.shape[0] if self.metadata.get("header") == "left out" else 0

    @property
    def summary(self) -> str:
        """Its parts in words."""
        if self.is_empty:
            return "none"
        left_out = " (left out of packets)" if self.left_out_tokens else ""
        parts = [f"{self.header.shape[0]}{left_out} + {self.trailer.shape[0]} soft tokens"] if self.num_tokens else []
        parts += ["deep vectors"] if self.deep is not None else []
        if self.low_rank is not None:
            parts.append(f"low-rank update of the encoder, rank {max(d.shape[0] for d in self.low_rank.down)}")
        return ", ".join(parts)

    @property
    def label(self) -> str:
        """By what a person tells it from another one: file and first characters of the digest."""
        if self.is_empty:
            return "no adapter"
        return f"adapter {self.file or 'in memory'} (SHA-256 {self.digest[:12]}…)"

    @property
    def is_empty(self) -> bool:
        """Whether packets are the bare chunks."""
        return not self.num_tokens and self.low_rank is None

    @property
    def absorbs(self) -> bool:
        """Whether white space alone between two packets is left out, as it was in training."""
        return not self.is_empty and self.metadata.get("separators", "absorbed") == "absorbed"

    @property
    def digest(self) -> str:
        """SHA-256 over all that changes a packet, in hex; ``"none"`` for an empty adapter."""
        if self.is_empty:
            return "none"
        digest = hashlib.sha256(b"left out" if self.left_out_tokens else b"")
        for name, tensor in self.tensors().items():
            if name not in ("header", "trailer"):
                digest.update(name.encode())
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor of every part, as they are saved: header, trailer, deep, low-rank pairs by module."""
        named = {"header": self.header.detach(), "trailer": self.trailer.detach()}
        if self.deep is not None:
            named["deep"] = self.deep.detach()
        for module, (down, up) in (self.low_rank.tensors() if self.low_rank else {}).items():
            named[f"{module}.down"], named[f"{module}.up"] = down, up
        return named

    def wrap(self, embeddings: Tensor) -> Tensor:
        """Put the soft tokens around a chunk; serving and training both come through here.

        Args:
            embeddings: (tokens, hidden), of the chunk alone.

        Returns:
            (header + tokens + trailer, hidden), in the dtype and on the device of ``embeddings``.
        """
        return torch.cat([self.header.to(embeddings), embeddings, self.trailer.to(embeddings)])

    def roles(self, num_tokens: int) -> Tensor:
        """What each token of a wrapped chunk is to the adapter.

        Returns:
            (header + num_tokens + trailer,): the number of a soft token, or :attr:`num_tokens` for the chunk's own.
        """
        numbers = torch.arange(self.num_tokens)
        own = torch.full((num_tokens,), self.num_tokens)
        return torch.cat([numbers[: self.header.shape[0]], own, numbers[self.header.shape[0] :]])

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write one safetensors file, with the metadata in its header.

        Args:
            path: of the file.
            dtype: numbers are rounded to it; bfloat16 halves the file, and what is loaded has another digest.
        """
        adapter_file.save({name: tensor.to(dtype) for name, tensor in self.tensors().items()}, self.metadata, path)

    @classmethod
    def load(cls, path: str | Path) -> Adapter:
        """Read what :meth:`save` wrote.

        Raises:
            AdapterError: no such file, or it is no adapter of this format.
        """
        tensors, metadata = adapter_file.load(path)
        header, trailer, deep = tensors.pop("header"), tensors.pop("trailer"), tensors.pop("deep", None)
        modules = sorted(name.removesuffix(".down") for name in tensors if name.endswith(".down"))
        if {f"{m}.{end}" for m in modules for end in ("down", "up")} != set(tensors):
            raise AdapterError(f"{path} holds tensors no adapter has: {', '.join(sorted(tensors))[:200]}")
        updates = {module: (tensors[f"{module}.down"], tensors[f"{module}.up"]) for module in modules}
        found = cls(header, trailer, metadata, deep=deep, low_rank=LowRank(updates) if updates else None)
        found.file = Path(path)
        return found


def import_paper_adapter(path: str | Path) -> Adapter:
    """Read a ``.pt`` adapter of the paper's repository, of either generation.

    Raises:
        AdapterError: the file is anything else.
    """
    return Adapter(*adapter_file.read_paper_file(path))
