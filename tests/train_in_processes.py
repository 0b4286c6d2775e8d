"""Run by the test of several processes: ``torch.distributed.run --nproc_per_node 2 THIS MODEL_FOLDER OUT_FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from training_samples import SMALL, row

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.models import load_model
from kvpacket_rag.training.recipe import Recipe
from kvpacket_rag.training.trainer import Trainer
from kvpacket_rag.training.workers import Workers


def train(model_folder: Path, out: Path) -> Trainer:
    """Three steps of four rows, with an odd number of rows to validate on."""
    torch.set_num_threads(1)
    backbone = Backbone(*load_model(str(model_folder), torch.device("cpu"), torch.float32), "tiny")
    recipe = Recipe(**(SMALL | {"steps": 3, "batch_rows": 4, "validate_every": 3}))
    held_out = [row(backbone, number) for number in (7, 8, 9)]
    trainer = Trainer(backbone, lambda number: row(backbone, number), held_out, recipe, out, "")
    list(trainer.run())
    return trainer


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
    Workers().close()
