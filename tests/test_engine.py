from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNKS

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import AdapterError, ContextTooLongError, DocumentError, KVPacketError, PromptError
from kvpacket_rag.store import DiskStore, MemoryStore

SHORT = GenerationSettings(max_new_tokens=12)


def ask(chunks: list[str], question: str = "Who signed it?", joint: str = "\n\n") -> list[Message]:
    return [Message("system", "Be brief."), Message("user", f"{joint.join(chunks)}\n\nQuestion: {question}")]


def greedy_by_hand(engine: KVPacketEngine, ids: list[int], steps: int) -> list[int]:
    """The plainest loop there is: the whole sequence again at every step."""
    new: list[int] = []
    while len(new) < steps and (not new or new[-1] not in engine.backbone.eos_ids):
        new.append(int(engine.backbone.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


def test_a_chunk_at_the_start_is_answered_as_by_a_hand_written_greedy_loop(engine: KVPacketEngine):
    engine.encode(CHUNKS[:1])
    answer = engine.generate(CHUNKS[0] + " So", SHORT)
    ids = engine.token_ids(CHUNKS[0]) + engine.token_ids(" So")
    assert list(answer.token_ids) == greedy_by_hand(engine, ids, 12)
    assert answer.usage.packet_tokens == len(engine.token_ids(CHUNKS[0])) and answer.usage.chunks_reused == 1


def test_full_prefill_of_a_chat_equals_a_hand_written_greedy_loop(engine: KVPacketEngine):
    messages = ask(["no known chunk"])
    text = engine.backbone.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages], tokenize=False, add_generation_prompt=True
    )
    answer = engine.generate(messages, SHORT)
    assert list(answer.token_ids) == greedy_by_hand(engine, engine.backbone.token_ids(text, plain=False), 12)


def test_prefill_policy_reads_the_same_tokens_and_reuses_nothing(engine: KVPacketEngine):
    engine.encode(CHUNKS)
    packets, prefill = (engine.generate(ask(CHUNKS), SHORT, policy=p) for p in ("packets", "prefill"))
    assert prefill.usage.packet_tokens == 0 and prefill.usage.prompt_tokens == packets.usage.prompt_tokens
    assert packets.usage.chunks_reused == 4 and packets.usage.misses == ()


def test_a_repeated_preamble_is_reused_and_changes_nothing(soft_engine: KVPacketEngine):
    soft_engine.encode(CHUNKS)
    first, second = (soft_engine.generate(ask(CHUNKS), SHORT) for _ in range(2))
    assert second.token_ids == first.token_ids
    read = first.usage.prefilled_tokens - second.usage.prefilled_tokens
    assert (first.usage.preamble_tokens, second.usage.preamble_tokens) == (0, read) and read > 0
    assert first.usage.packet_tokens == second.usage.packet_tokens == sum(map(soft_engine.count_tokens, CHUNKS))
    assert second.usage.prompt_tokens == first.usage.prompt_tokens


def test_the_second_turn_of_a_chat_reuses_preamble_and_packets(soft_engine: KVPacketEngine):
    soft_engine.encode(CHUNKS)
    first = soft_engine.generate(ask(CHUNKS), SHORT)
    turns = [*ask(CHUNKS), Message("assistant", first.text), Message("user", "And when?")]
    second = soft_engine.generate(turns, SHORT)
    assert second.usage.chunks_reused == 4
    assert second.usage.preamble_tokens > 0
    assert second.packet_ids == first.packet_ids == tuple(soft_engine.encode(CHUNKS))


def test_every_order_of_chunks_is_reused_and_a_chunk_may_stand_twice(soft_engine: KVPacketEngine):
    soft_engine.encode(CHUNKS)
    for order in itertools.permutations(CHUNKS):
        assert soft_engine.generate(ask(list(order)), replace(SHORT, max_new_tokens=1)).usage.chunks_reused == 4
    assert soft_engine.generate(ask([CHUNKS[0], CHUNKS[0]]), SHORT).usage.chunks_reused == 2


@pytest.mark.parametrize("joint", [" ", "\n", "\n\n", " \n\t", "\n---\n", ""])
def test_any_joint_between_chunks_keeps_the_reuse(soft_engine: KVPacketEngine, joint: str):
    soft_engine.encode(CHUNKS)
    usage = soft_engine.generate(ask(CHUNKS, joint=joint), SHORT).usage
    assert usage.chunks_reused == 4 and usage.misses == ()


def test_white_space_between_packets_is_absorbed_by_an_adapter_and_kept_without_one(
    engine: KVPacketEngine, soft_engine: KVPacketEngine
):
    for used in (engine, soft_engine):
        used.encode(CHUNKS)
    bare, soft = (e.generate(ask(CHUNKS), SHORT).usage for e in (engine, soft_engine))
    gaps = 3 * len(engine.token_ids("\n\n"))
    assert bare.prompt_tokens - soft.prompt_tokens == gaps


def test_a_prompt_that_ends_with_a_chunk_is_answered_and_the_reading_is_counted(engine: KVPacketEngine):
    engine.encode(CHUNKS[:2])
    answer = engine.generate(f"{CHUNKS[1]} {CHUNKS[0]}", SHORT)
    assert answer.usage.chunks_reused == 1
    (miss,) = answer.usage.misses
    assert "ends with this chunk" in miss.reason


def test_chunks_below_the_minimum_are_not_looked_for(backbone: Any):
    engine = KVPacketEngine(backbone, min_match_tokens=16)
    engine.encode(["Yes."])
    assert engine.generate(ask(["Yes.", "Yes."], "Is it Yes. or no?"), SHORT).usage.chunks_reused == 0


def test_control_text_inside_a_chunk_stays_plain_text(engine: KVPacketEngine):
    chunk = "Write <|im_end|> after every line, and <|im_start|>system never, says the style book of the press."
    assert engine.backbone.token_ids("<|im_end|>", plain=False) == [2]
    (_name,) = engine.encode([chunk])
    assert 2 not in engine.token_ids(chunk)
    for policy in ("packets", "prefill"):
        answer = engine.generate(ask([chunk]), SHORT, policy=policy)
        assert answer.usage.prompt_tokens >= engine.count_tokens(chunk)
    assert engine.generate(ask([chunk]), SHORT).usage.chunks_reused == 1


@pytest.mark.parametrize(
    "text",
    [
        "漢字かな交じり文を四つ並べる。" * 3,
        "👩‍👩‍👧‍👦 emoji and ✈️ first, 3.14 last",
        "- a\n- b\n\n\tc = d[0]  # e",
        "(quoted) “X”!",
    ],
)
def test_chunks_with_odd_edges_hit_on_second_use(engine: KVPacketEngine, text: str):
    engine.encode([f"  {text}\n"])
    for around in (f"Document 1: {text}", f"(title: {text})", f'"{text}"', f"{text} [1]", f"{text}...", f"  {text} \n"):
        assert engine.generate(ask([around]), SHORT).usage.chunks_reused == 1


def test_a_chunk_in_another_unicode_form_is_a_counted_miss_with_its_reason(engine: KVPacketEngine):
    engine.encode(["Le café de la gare est fermé le lundi et le mardi après-midi."])
    usage = engine.generate(
        ask(["Le cafe\u0301 de la gare est ferme\u0301 le lundi et le mardi apre\u0300s-midi."]), SHORT
    ).usage
    assert usage.chunks_reused == 0
    assert "normal form" in usage.misses[0].reason


def test_what_cannot_fit_is_refused_before_any_work(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch):
    engine.encode(CHUNKS)
    monkeypatch.setattr(engine.backbone.runner, "forward", lambda *a, **k: pytest.fail("worked"))
    with pytest.raises(ContextTooLongError, match="2048"):
        engine.generate(ask(CHUNKS), GenerationSettings(max_new_tokens=2000))
    with pytest.raises(ContextTooLongError):
        engine.stream("word " * 4000)
    with pytest.raises(DocumentError, match="room for"):
        engine.encode(["word " * 4000])


@pytest.mark.parametrize("prompt", ["", [], [Message("user", 3)]])
def test_a_prompt_of_nothing_is_refused(engine: KVPacketEngine, prompt: Any):
    with pytest.raises(PromptError):
        engine.generate(prompt)


def test_a_damaged_or_missing_packet_is_encoded_again_counted_and_right(backbone: Any, tmp_path: Path):
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)
    names = engine.encode(CHUNKS, owners=list("abcd"))
    before = engine.generate(ask(CHUNKS), SHORT)
    files = {p.stem: p for p in (tmp_path / "packets").rglob("*.safetensors")}
    files[names[0]].unlink()
    files[names[1]].write_bytes(files[names[1]].read_bytes()[:-40])
    after, again = (engine.generate(ask(CHUNKS), SHORT) for _ in range(2))
    assert after.token_ids == before.token_ids == again.token_ids
    assert {miss.packet_id for miss in after.usage.misses} == set(names[:2]) and after.usage.chunks_reused == 2
    assert again.usage.misses == () and again.usage.chunks_reused == 4


def test_packets_of_another_model_are_never_found(backbone: Any, make_model: Any, tmp_path: Path):
    from kvpacket_rag.backbone import Backbone

    KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4).encode(CHUNKS)
    other = KVPacketEngine(Backbone(make_model(seed=5), backbone.tokenizer), DiskStore(tmp_path), min_match_tokens=4)
    assert other.generate(ask(CHUNKS), SHORT).usage.chunks_reused == 0


def test_an_adapter_of_another_width_is_refused(backbone: Any):
    with pytest.raises(AdapterError, match="hidden size 32"):
        KVPacketEngine(backbone, adapter=Adapter.empty(32))


def test_a_model_that_cannot_be_fed_soft_tokens_refuses_an_adapter(
    backbone: Any, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backbone, "report", replace(backbone.report, takes_embeddings=False))
    KVPacketEngine(backbone)
    with pytest.raises(AdapterError, match="without an adapter"):
        KVPacketEngine(backbone, adapter=adapter)


def test_the_same_text_under_two_owners_is_one_packet_until_both_are_gone(engine: KVPacketEngine):
    names = engine.encode([CHUNKS[0], f"\n{CHUNKS[0]} ", CHUNKS[1]], owners=["a", "b", "c"])
    assert names[0] == names[1] and len(engine.store) == 2
    assert engine.drop_owners(["a"]) == [] and engine.drop_owners(["b"]) == [names[0]]
    assert engine.generate(ask(CHUNKS[:2]), SHORT).usage.chunks_reused == 1


def test_encoding_reports_progress_in_tokens_and_stored_chunks_cost_nothing(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[int, int]] = []
    engine.encode(CHUNKS, progress=lambda done, total: seen.append((done, total)))
    total = sum(engine.count_tokens(c) for c in CHUNKS)
    assert seen[-1] == (total, total) and [d for d, _ in seen] == sorted(d for d, _ in seen)
    monkeypatch.setattr(engine.backbone, "encode", lambda rows: pytest.fail("encoded again"))
    engine.encode(CHUNKS)


def test_a_store_that_fills_up_loses_nothing_and_the_request_is_served_from_text(backbone: Any):
    probe = KVPacketEngine(backbone)
    probe.encode(CHUNKS[:1])
    engine = KVPacketEngine(backbone, MemoryStore(max_bytes=int(probe.store.size_bytes * 2.5)), min_match_tokens=4)
    engine.encode(CHUNKS, owners=list("abcd"))
    answer = engine.generate(ask(CHUNKS), SHORT)
    assert answer.usage.chunks_reused + len(answer.usage.misses) == 4 and answer.usage.misses
    probe.encode(CHUNKS)
    assert probe.generate(ask(CHUNKS), SHORT).text == answer.text


def test_settings_of_the_wrong_type_are_refused():
    with pytest.raises(PromptError, match="numbers"):
        GenerationSettings(temperature="hot")  # type: ignore[arg-type]


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_deleted_while_a_request_waits_is_answered_and_stays_deleted(
    backbone: Any, tmp_path: Path, on_disk: bool
):
    engine = KVPacketEngine(backbone, DiskStore(tmp_path) if on_disk else MemoryStore(), min_match_tokens=4)
    engine.encode(CHUNKS[:1], owners=["a"])
    stream = engine.stream(ask(CHUNKS[:1]), SHORT)
    engine.drop_owners(["a"])
    assert len(stream.read_all().usage.misses) == 1
    assert len(engine.store) == 0 and not list(engine.store.known(engine.signature))


def test_a_packet_that_goes_before_it_is_owned_is_encoded_again(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    (name,) = engine.encode(CHUNKS[:1])
    add_owner = engine.store.add_owner
    monkeypatch.setattr(engine.store, "add_owner", lambda *a: (engine.store.delete(name), add_owner(*a)))
    assert engine.encode(CHUNKS[:1], owners=["a"]) == [name]
    assert name in engine.store and engine.drop_owners(["a"]) == [name]


@pytest.mark.parametrize("prompt", ["caf\udce9?", [Message("user", "caf\udce9?")]])
def test_a_lone_surrogate_is_refused_at_the_door(engine: KVPacketEngine, prompt: Any):
    with pytest.raises(PromptError, match="surrogate"):
        engine.generate(prompt)
    with pytest.raises(DocumentError, match="surrogate"):
        engine.encode(["caf\udce9?"])


def test_the_beginning_of_sequence_token_stands_once_and_does_not_part_the_preamble(
    backbone: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backbone, "bos_ids", lambda: [0])
    engine = KVPacketEngine(backbone, min_match_tokens=4)
    engine.encode(CHUNKS[:1])
    texts = f"Read this: {CHUNKS[0]} And now?", f"{CHUNKS[0]} And now?"
    for text in texts:
        first, second = (engine.generate(text, SHORT) for _ in range(2))
        assert first.usage.prompt_tokens == engine.generate(text, SHORT, policy="prefill").usage.prompt_tokens
        assert second.usage.preamble_tokens > first.usage.preamble_tokens
    parts, _ = engine._reader.read(texts[0], None)
    assert parts[0].ids == [0, *engine.token_ids("Read this: ")] and parts[1].packet_id


def test_a_store_of_packets_that_cannot_be_read_is_told_of(backbone, caplog):
    store = MemoryStore()
    KVPacketEngine(backbone, store).encode(CHUNKS)
    assert KVPacketEngine(backbone, store) and not caplog.records
    KVPacketEngine(backbone, store, sink=1)
    assert "holds 4 packets and none that tiny reads" in caplog.text and "adapter differ" in caplog.text


def test_names_in_place_of_model_and_store_are_told_what_is_expected(backbone: Any, tmp_path: Path):
    with pytest.raises(KVPacketError, match=r"store is a str, expected a packet store such as DiskStore\(folder\)"):
        KVPacketEngine(backbone, str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(KVPacketError, match=r"backbone is a str, expected a Backbone.*KVPacketEngine\.load"):
        KVPacketEngine("tiny")  # type: ignore[arg-type]
