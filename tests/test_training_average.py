"""The mean of adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import CHUNKS
from training_samples import make_trainer

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.cli import main
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import TrainingError
from kvpacket_rag.training.average import average


def trained(backbone: Backbone, folder: Path, **options: object) -> Adapter:
    trainer = make_trainer(backbone, folder, **options)
    list(trainer.run())
    return Adapter.load(trainer.best_path)


def test_every_number_is_the_mean_and_figures_of_others_are_not_kept(backbone: Backbone, tmp_path: Path):
    one, two = (trained(backbone, tmp_path / str(seed), steps=2, seed=seed, deep=True, rank=2) for seed in (1, 2))
    mean = average([one, two])
    for name, tensor in mean.tensors().items():
        torch.testing.assert_close(tensor, (one.tensors()[name] + two.tensors()[name]) / 2)
    assert json.loads(mean.metadata["average_of"]) == [one.digest, two.digest]
    assert "validation_kl" not in mean.metadata and mean.metadata["weights"] == two.metadata["weights"]


def test_the_mean_of_one_adapter_with_itself_encodes_as_it_does(backbone: Backbone, tmp_path: Path):
    one = trained(backbone, tmp_path, steps=1, rank=2)
    packets = []
    for adapter in (one, average([one, one])):
        encoder = PacketEncoder(backbone, adapter)
        packets += encoder.encode([encoder.identify(CHUNKS[0])])
    for left, right in zip(packets[0].tensors, packets[1].tensors, strict=True):
        torch.testing.assert_close(left, right)


def test_an_update_that_is_left_out_counts_as_none(backbone: Backbone, tmp_path: Path):
    other = trained(backbone, tmp_path / "trained", steps=1, rank=2)
    start = make_trainer(backbone, tmp_path / "start", rank=2).adapter  # its update is zero still, so it is not saved
    start.metadata = other.metadata
    start.save(tmp_path / "start.safetensors")
    found = average([Adapter.load(tmp_path / "start.safetensors"), other]).tensors()
    updates = [name.removesuffix(".down") for name in found if name.endswith(".down")]
    assert updates
    for name in updates:
        down, up = (other.tensors()[f"{name}.{part}"] for part in ("down", "up"))
        torch.testing.assert_close(found[f"{name}.up"] @ found[f"{name}.down"], up @ down / 2)


def test_what_has_no_mean_is_refused(backbone: Backbone, tmp_path: Path):
    one = trained(backbone, tmp_path / "a", steps=1, rank=2)
    with pytest.raises(TrainingError, match="two adapters or more, found 1"):
        average([one])
    other = trained(backbone, tmp_path / "b", steps=1, rank=3)
    with pytest.raises(TrainingError, match=r"built otherwise.*down is \(2, \d+\) and \(3, \d+\).* and \d+ more"):
        average([one, one, other])
    other = trained(backbone, tmp_path / "c", steps=1, rank=2, header=1)
    with pytest.raises(TrainingError, match=r"header is \(3, 64\) and \(1, 64\)$"):
        average([one, other])


@pytest.mark.parametrize("key", ["weights", "tokenizer", "architecture"])
def test_adapters_of_other_weights_have_no_mean_whatever_the_name(key: str, backbone: Backbone, tmp_path: Path):
    one = trained(backbone, tmp_path, steps=1)
    same = Adapter.load(tmp_path / "adapter.safetensors")
    same.metadata["model"] = "the same model in a folder"
    assert average([one, same]).metadata["model"] == "the same model in a folder"
    same.metadata |= {"model": one.metadata["model"], key: "0" * 64}
    with pytest.raises(TrainingError, match=f"no mean: {key} is '.*…? and '0{{11}}…$"):
        average([one, same])


def test_without_a_fingerprint_the_name_tells_two_models_apart():
    one, other = (Adapter(torch.zeros(1, 4), torch.zeros(0, 4), {"model": name}) for name in ("one", "other"))
    with pytest.raises(TrainingError, match="model is 'one' and 'other'"):
        average([one, other])


def test_the_command_writes_it_and_says_what_it_is_of(backbone: Backbone, tmp_path: Path, capsys):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, file in enumerate(files):
        trained(backbone, tmp_path / str(seed), steps=1, seed=seed).save(file)
    out = tmp_path / "mean.safetensors"
    assert main(["average", *map(str, files), "--out", str(out)]) == 0
    assert Adapter.load(out).digest == average([Adapter.load(file) for file in files]).digest
    assert "mean of 2 adapters" in capsys.readouterr().out
    assert main(["average", str(files[0]), "--out", str(out)]) == 1
    before = files[0].read_bytes()
    assert main(["average", *map(str, files), "--out", str(files[0])]) == 1 and files[0].read_bytes() == before
    assert "exists; name another file, or replace it with --force" in capsys.readouterr().err
    assert main(["average", *map(str, files), "--out", str(files[0]), "--force"]) == 0
    assert Adapter.load(files[0]).digest == Adapter.load(out).digest
