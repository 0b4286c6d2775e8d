"""A question behind packets copies no keys, gets the same answer, and leaves no switch behind."""

from __future__ import annotations

import os

import pytest
import torch
from conftest import CHUNKS
from transformers.integrations import sdpa_attention

from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.shared_keys import shared_keys

SWITCH = "TRANSFORMERS_SDPA_FORCE_GQA"
CPU = torch.device("cpu")


def test_a_question_behind_packets_copies_no_keys(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch):
    engine.encode(CHUNKS)
    prompt, settings = "\n\n".join(CHUNKS) + "\n\nWho?", GenerationSettings(max_new_tokens=8)
    copies, repeat = [], sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *given: copies.append(1) or repeat(*given))
    answers = []
    for switch in ("0", None):  # as transformers does by itself, then as it is served
        engine.backbone.pool.drop_idle()
        with monkeypatch.context() as patch:
            patch.setenv(SWITCH, switch) if switch else patch.delenv(SWITCH, raising=False)
            answers.append(engine.generate(prompt, settings).token_ids)
        assert bool(copies) is (switch == "0")
        copies.clear()
    assert answers[0] == answers[1]


def test_the_switch_is_off_again_when_the_last_user_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SWITCH, raising=False)
    first, second = shared_keys(CPU), shared_keys(CPU)
    with first:
        second.__enter__()
    assert os.environ[SWITCH] == "1"
    with pytest.raises(ZeroDivisionError):
        second.__exit__(None, None, None)
        with shared_keys(CPU):
            _ = 1 / 0
    assert SWITCH not in os.environ


def test_a_switch_of_the_users_own_and_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SWITCH, "0")
    with shared_keys(CPU):
        assert os.environ[SWITCH] == "0"
    assert os.environ[SWITCH] == "0"
    monkeypatch.delenv(SWITCH)
    with shared_keys(torch.device("cuda")):
        assert SWITCH not in os.environ
