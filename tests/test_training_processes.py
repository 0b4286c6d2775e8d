"""Several processes train what one process trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close
from train_in_processes import train

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import MissingExtraError
from kvpacket_rag.training import workers


def test_two_processes_give_the_adapter_of_one(backbone: Backbone, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = tmp_path / "model"
    backbone.model.save_pretrained(model)
    backbone.tokenizer.save_pretrained(model)
    alone = train(model, tmp_path / "one")
    script = Path(__file__).with_name("train_in_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, script, model, tmp_path / "two"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    together = Adapter.load(tmp_path / "two" / "adapter.safetensors")
    for name, tensor in Adapter.load(alone.best_path).tensors().items():
        assert_close(together.tensors()[name], tensor, atol=1e-4, rtol=1e-3)


def test_several_processes_without_accelerate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(workers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"kvpacket-rag\[train\]"):
        workers.Workers()


def test_rows_are_shared_out_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.Workers, "count", 3)
    shares = []
    for number in range(3):
        monkeypatch.setattr(workers.Workers, "number", number)
        shares += workers.Workers().mine(range(10, 20))
    assert sorted(shares) == list(range(10, 20))
