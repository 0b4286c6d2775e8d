"""The bench on a tiny model: every part gives its figures, and the fair sides do the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvpacket_rag.bench import bare, memory
from kvpacket_rag.bench.run import PARTS, BenchOptions, run_bench
from kvpacket_rag.bench.texts import chunks_of, in_turns, prompt, prompt_ids
from kvpacket_rag.cli import main
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.store import DiskStore


@pytest.mark.parametrize("part", ["first-token", "preamble", "assembly", "memory", "ingest", "decoding", "batch"])
def test_a_part_gives_figures_above_zero(backbone, adapter, part: str):
    options = BenchOptions((part,), chunks=1, repeats=1, tokens=4)
    found = dict(run_bench(lambda folder: KVPacketEngine(backbone, DiskStore(folder), adapter), options))
    assert list(found) == ["machine", part] and "threads" in str(found["machine"]["machine"])
    assert all(value > 0 for key, value in found[part].items() if key != "preamble_seconds")


def test_texts_differ_and_have_the_tokens_that_were_asked_for(engine: KVPacketEngine):
    texts = chunks_of(engine, 40, 300)
    assert len(set(texts)) == 40
    assert all(abs(engine.count_tokens(text) - 300) < 12 for text in texts)


def test_no_two_prompts_in_turn_begin_alike():
    turns = in_turns(["a", "b", "c"])
    assert [next(turns)[0].content[:1] for _ in range(4)] == ["b", "c", "a", "b"]


def test_the_plain_loop_writes_what_the_engine_writes_by_full_prefill(engine: KVPacketEngine):
    messages = prompt(["A short text."])
    answer = engine.generate(messages, GenerationSettings(max_new_tokens=1), policy="prefill")
    cache = bare.prefill(engine.backbone, prompt_ids(engine, messages)[:-1])
    assert bare.prefill_behind(engine.backbone, cache, prompt_ids(engine, messages)[-1:]).tolist() == list(
        answer.token_ids
    )


def test_the_peak_is_what_was_held_at_once():
    def work() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        del first
        second, third = torch.empty(1 << 20, dtype=torch.uint8), torch.empty(1 << 19, dtype=torch.uint8)
        del second, third

    assert memory._peak_bytes(work, torch.device("cpu")) == (1 << 20) + (1 << 19)


def test_an_unknown_part_is_refused_with_the_list():
    with pytest.raises(KVPacketError, match="no part speed; the parts are first-token, preamble"):
        BenchOptions(("speed",))
    assert "speedup" in PARTS


def test_the_command_prints_and_writes_the_figures(tmp_path: Path, monkeypatch, capsys, engine: KVPacketEngine):
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: engine)
    assert main(["bench", "--parts", "assembly", "--chunks", "1", "--repeats", "1", "--json", str(tmp_path / "f")]) == 0
    found = json.loads((tmp_path / "f").read_text())
    assert found["assembly_over_memcpy"] > 0 and "assembly_over_memcpy" in capsys.readouterr().out
