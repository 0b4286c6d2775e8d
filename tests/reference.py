"""What a model answers by itself, with its own cache or none: the expected values of the two laws."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.packet import Packet, PacketSignature

Piece = tuple[Literal["text", "packet"], list[int]]  # a packet sees itself only, text sees all before it


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids above those that architectures give a meaning of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, 250, (num_tokens,), generator=generator).tolist()


def own_layers(model: Any, ids: Sequence[int], start: int) -> list[Any]:
    """The layers of the cache that the model itself builds for ``ids`` at positions from ``start``."""
    arguments: dict[str, Any] = {"input_ids": torch.tensor([list(ids)]), "use_cache": True}
    arguments["position_ids"] = torch.arange(start, start + len(ids))[None]
    output = model(**_accepted(model, arguments))
    found = getattr(output, "cache", None)
    return list((found if found is not None else output.past_key_values).layers)


def own_logits(model: Any, pieces: Sequence[Piece]) -> Tensor:
    """(vocabulary,): one forward over all pieces, without cache, under an explicit block mask."""
    ids = [token for _, tokens in pieces for token in tokens]
    arguments = {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.arange(len(ids))[None],
        "use_cache": False,
    }
    if any(kind == "packet" for kind, _ in pieces):
        arguments["attention_mask"] = block_masks(model.config, pieces)
    return model(**_accepted(model, arguments)).logits[0, -1]


def block_masks(config: Any, pieces: Sequence[Piece]) -> Tensor | dict[str, Tensor]:
    """Additive masks of the block-diagonal forward: one, or one a layer type where types differ in reach."""
    firsts, done = [], 0
    for kind, tokens in pieces:
        firsts += [done if kind == "packet" else 0] * len(tokens)
        done += len(tokens)
    numbers = torch.arange(done)
    distance = numbers[:, None] - numbers[None, :]
    seen = (distance >= 0) & (numbers[None, :] >= torch.tensor(firsts)[:, None])
    window = _window(config)
    near = seen & (distance < (window or done))
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if len(kinds) == 1:
        return _additive(near if "sliding_attention" in kinds else seen)
    return {kind: _additive(near if kind == "sliding_attention" else seen) for kind in kinds}


def _window(config: Any) -> int | None:
    for name in ("sliding_window", "local_attention"):
        if getattr(config, name, None) and getattr(config, "use_sliding_window", True):
            return int(getattr(config, name))
    return None


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def slot_logits(model: Any, pieces: Sequence[Piece]) -> Tensor:
    """(vocabulary,): piece by piece into the model's own cache, with a 2D mask that hides what a packet may not see.

    For architectures that take no mask of their own making.
    """
    cache, done = None, 0
    for kind, tokens in pieces:
        seen = torch.ones(1, done + len(tokens), dtype=torch.long)
        if kind == "packet":
            seen[:, :done] = 0
        arguments = {"input_ids": torch.tensor([tokens]), "attention_mask": seen, "use_cache": True}
        arguments["position_ids"] = torch.arange(done, done + len(tokens))[None]
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        output = model(**_accepted(model, arguments | {name: cache}))
        cache = getattr(output, "cache", None) or output.past_key_values
        done += len(tokens)
    return output.logits[0, -1]


def served_logits(backbone: Backbone, pieces: Sequence[Piece]) -> Tensor:
    """(vocabulary,): what the library answers; packets encoded in one batch, realigned, text in one pass."""
    rows = [torch.tensor(tokens) for kind, tokens in pieces if kind == "packet"]
    packets = iter(backbone.encode(rows) if rows else [])
    context = backbone.pool.take(sum(len(tokens) for _, tokens in pieces))
    texts = []
    for kind, tokens in pieces:
        if kind == "packet":
            context.place(make_packet(backbone, next(packets), len(tokens)))
        else:
            texts.append((context.reserve(len(tokens)), tokens))
    logits = backbone.prefill(backbone.bind(context), texts)[0]
    backbone.pool.give_back(context)
    return logits


def make_packet(backbone: Backbone, tensors: tuple[Tensor, ...], num_tokens: int) -> Packet:
    """A packet around tensors, with a signature that names nothing but the dtype."""
    signature = PacketSignature("w", "t", "none", backbone.plan.digest, str(backbone.dtype).removeprefix("torch."))
    return Packet("test", signature, tensors, num_tokens, num_tokens)


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


def _accepted(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the arguments the model does not know."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
