"""Rows and adapters for the tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import CHUNKS

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.training.recipe import Recipe
from kvpacket_rag.training.row import Row, make_row
from kvpacket_rag.training.trainer import Trainer

VARIANTS: dict[str, dict[str, Any]] = {
    "soft": {"rank": 0},
    "deep": {"rank": 0, "deep": True},
    "low rank": {},
    "low rank alone": {"header": 0, "trailer": 0},
    "all": {"deep": True},
    "header left out": {"keep_header": False, "trailer": 0},
    "separators read": {"separators": "read"},
    "from the template": {"start": "tokens"},
}
SMALL: dict[str, Any] = {
    "header": 3,
    "trailer": 2,
    "keep_header": True,
    "rank": 2,
    "batch_rows": 2,
    "steps": 6,
    "validate_every": 2,
}


def chat(question: str, chunks: list[str]) -> list[Message]:
    """Chunks with white space and with text between them, then a question."""
    first, *others = chunks
    return [
        Message("system", "Read."),
        Message("user", "\n\n".join([first, *others[:-1]]) + f"\nTitle: last\n{others[-1]}\n\n{question}"),
    ]


def row(backbone: Backbone, number: int = 0, questions: tuple[str, ...] = ("Who signed it?", "What is E41?")) -> Row:
    """A row of three chunks; others by number."""
    chunks = [CHUNKS[(number + k) % len(CHUNKS)] for k in range(3)]
    encoder = PacketEncoder(backbone, Adapter.empty(backbone.hidden_size))
    return make_row(encoder, [chat(question, chunks) for question in questions], chunks, f"domain {number % 2}")


def touched(recipe: Recipe, backbone: Backbone, seed: int = 0) -> Adapter:
    """An adapter of which every part does something."""
    adapter = recipe.build(backbone)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapter


def make_trainer(backbone: Backbone, folder: Path, *, warm_start: Adapter | None = None, **settings: Any) -> Trainer:
    recipe = Recipe(**(SMALL | settings))
    held_out = [row(backbone, 7), row(backbone, 8)]
    return Trainer(
        backbone, lambda number: row(backbone, number), held_out, recipe, folder, "four chunks", warm_start=warm_start
    )


def values(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in adapter.named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
