"""Seconds of a training step, and what attention by blocks saves against the mask that says the same.

    python benchmarks/training.py [--rows 4] [--steps 3] [--dtype bfloat16] [--device cpu]

Rows are made of generated needles and biographies. Teacher and student are timed apart: the teacher's answers
are remembered, so later epochs pay for the student alone. Both ways of attending are measured in turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from kvpacket_rag import backbone as backbone_module
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.bench.clock import describe, median_of_turns, seconds
from kvpacket_rag.datasets import open_dataset
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.hardware import pick_device, pick_dtype
from kvpacket_rag.models import load_model
from kvpacket_rag.training.mixture import Domain, Mixture
from kvpacket_rag.training.recipe import Recipe
from kvpacket_rag.training.teacher import Teacher
from kvpacket_rag.training.trainer import Trainer

MODEL = "smollm2-135m-instruct"


def masked() -> AbstractContextManager[object]:
    """Attention over the whole row, under the mask."""
    return mock.patch.object(backbone_module, "attends_by_blocks", lambda model: False)


def stepper(trainer: Trainer, around: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    """One step of the optimiser on the first rows."""

    def step() -> None:
        trainer.progress.step = 0
        with around():
            trainer._step()

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = pick_device(options.device)
    model, tokenizer = load_model(MODEL, device, pick_dtype(options.dtype, device))
    backbone = Backbone(model, tokenizer, MODEL)
    encoder = PacketEncoder(backbone, Adapter.empty(backbone.hidden_size))
    domains = [Domain(name, open_dataset(name, "train", limit=40)) for name in ("niah", "biography")]
    mixture = Mixture(encoder, domains)
    rows = [mixture.row(number) for number in range(options.rows)]
    with tempfile.TemporaryDirectory() as folder:
        teacher = Teacher(backbone, Path(folder) / "teacher")
        (asking,) = seconds(lambda: [teacher.answer(row) for row in rows], 1)
        recipe = Recipe(batch_rows=options.rows, steps=10**6)
        trainer = Trainer(backbone, mixture.row, rows[:1], recipe, Path(folder), "", teacher)
        blocks, mask = median_of_turns([stepper(trainer, nullcontext), stepper(trainer, masked)], options.steps)
    tokens = sum(row.num_tokens for row in rows)
    print(describe(backbone.dtype, device))
    print(f"{options.rows} rows, {tokens:,} tokens, {sum(len(row.suffixes) for row in rows)} questions")
    print(f"teacher, once a row       {asking:.2f} s")
    print(f"student step, by blocks   {blocks:.2f} s, {tokens / blocks:,.0f} tokens/s")
    print(f"student step, by the mask {mask:.2f} s, {mask / blocks:.2f} times as long")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
