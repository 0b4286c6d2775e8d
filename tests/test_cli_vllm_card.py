"""``kvpacket vllm-card`` writes the card of an index, and says how vLLM is started with it."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401
from conftest import CHUNKS

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.cli import vllm_card
from kvpacket_rag.cli.vllm_card import start_command
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.packet import packet_id
from kvpacket_rag.serving.vllm_admit import Settings
from kvpacket_rag.serving.vllm_card import ServingCard


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model lies in no folder."""
    monkeypatch.setattr("kvpacket_rag.models.resolve_model", lambda name: f"/models/{name} 1")


def options_of(out: str) -> dict[str, str]:
    """Of the command it prints."""
    words = shlex.split(out.partition("Start vLLM with:")[2].replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    return dict(zip(words[3::2], words[4::2], strict=True))


def test_the_card_names_the_packets_of_the_index(kv: Run, index: Path, tmp_path: Path, backbone: Any):
    code, _, _ = kv("vllm-card", "--index", index, "--out", tmp_path / "card.json")
    card = ServingCard.load(tmp_path / "card.json")
    assert code == 0 and card.model == "smollm2-135m-instruct"
    wanted = {packet_id(backbone.token_ids(text), card.signature) for text in CHUNKS}
    assert wanted == {path.stem for path in (index / "packets").rglob("*.safetensors")}


def test_the_command_it_prints_holds_settings_that_the_connector_takes(kv: Run, index: Path, tmp_path: Path):
    _, out, _ = kv("vllm-card", "--index", index, "--out", tmp_path / "my card.json")
    options = options_of(out)
    transfer = json.loads(options["--kv-transfer-config"])
    settings = Settings.of(transfer["kv_connector_extra_config"])
    assert ServingCard.load(settings.card).signature.dtype == options["--dtype"] == "float32"
    assert options["--model"] == "/models/smollm2-135m-instruct 1" and options["--max-model-len"] == "2048"
    assert transfer["kv_connector_module_path"] == options["--logits-processors"].partition(":")[0]
    with closing(settings.open_store()) as store:
        assert len(store) == 4


def test_an_index_of_another_adapter_has_another_card(kv: Run, docs: Path, tmp_path: Path, adapter: Adapter):
    adapter.save(tmp_path / "own.safetensors")
    for number, options in enumerate([(), ("--adapter", tmp_path / "own.safetensors")]):
        assert kv("ingest", docs, "--index", tmp_path / str(number), *options)[0] == 0
        assert kv("vllm-card", "--index", tmp_path / str(number), "--out", tmp_path / f"{number}.json")[0] == 0
    bare, soft = (ServingCard.load(tmp_path / f"{number}.json") for number in (0, 1))
    assert (soft.header, soft.trailer) == (3, 2) and (bare.header, bare.trailer) == (0, 0)
    assert bare.signature.digest != soft.signature.digest


def test_a_namespace_has_a_card_of_its_own(kv: Run, docs: Path, tmp_path: Path):
    own = namespace_folder(tmp_path / "index", "them")
    assert kv("ingest", docs, "--index", own)[0] == 0
    code, out, _ = kv(
        "vllm-card", "--index", tmp_path / "index", "--namespace", "them", "--out", tmp_path / "card.json"
    )
    transfer = json.loads(options_of(out)["--kv-transfer-config"])
    assert code == 0 and transfer["kv_connector_extra_config"]["store"] == str(own)


def test_a_file_that_is_there_is_replaced_only_if_asked_to(kv: Run, index: Path, tmp_path: Path, monkeypatch: Any):
    (tmp_path / "card.json").write_text("mine")
    monkeypatch.setattr(vllm_card, "say", lambda _: pytest.fail("loaded a model"))
    code, _, err = kv("vllm-card", "--index", index, "--out", tmp_path / "card.json")
    assert code == 1 and "--force" in err and (tmp_path / "card.json").read_text() == "mine"
    monkeypatch.setattr(vllm_card, "say", lambda _: None)
    assert kv("vllm-card", "--index", index, "--out", tmp_path / "card.json", "--force")[0] == 0
    assert ServingCard.load(tmp_path / "card.json").model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "other"), "--reencode"),
        (("--adapter", "none.safetensors"), "none.safetensors"),
        (("--out", "nowhere/card.json"), "cannot be written"),
        (("--index", "nowhere"), "holds no index"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(
    kv: Run, index: Path, tmp_path: Path, options: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, _, err = kv("vllm-card", "--index", index, "--out", "card.json", *options)
    assert code == 1 and said in err and not (tmp_path / "card.json").exists()


def test_packets_that_a_paged_cache_cannot_hold_have_no_card(kv: Run, docs: Path, tmp_path: Path):
    index = tmp_path / "small"
    assert kv("ingest", docs, "--index", index, "--compress", "random:0.5")[0] == 0
    code, _, err = kv("vllm-card", "--index", index, "--out", tmp_path / "card.json")
    assert code == 1 and "without compress" in err and not (tmp_path / "card.json").exists()


def test_every_setting_that_is_no_default_is_in_the_command(tmp_path: Path, soft_prompter: Any):
    settings = Settings("c", "s3://b/p", cache="near", cache_bytes=7, async_load=True)
    command = start_command("m", soft_prompter.card, settings)
    transfer = json.loads(shlex.split(command.replace("\\\n", " "))[-1])
    assert Settings.of(transfer["kv_connector_extra_config"]) == settings
