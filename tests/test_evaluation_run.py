"""Runs on a tiny model: figures against other computations, and a run that goes on where it was stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from record_samples import record, samples

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.datasets.sample import SourceText
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError, PromptError
from kvpacket_rag.evaluation import run as run_module
from kvpacket_rag.evaluation.case import decode
from kvpacket_rag.evaluation.measure import measure, prefilled, tell
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.evaluation.questions import PromptSettings, make_questions
from kvpacket_rag.evaluation.records import RecordFile
from kvpacket_rag.evaluation.results import summarise
from kvpacket_rag.evaluation.run import Evaluation, Variant

SETTINGS = PromptSettings(max_chunks=3, chunk_tokens=40, max_new_tokens=8)


def evaluation(backbone: Backbone, path: Path, *methods: str, adapter: Adapter | None = None) -> Evaluation:
    variants = [Variant(method, method, adapter) for method in methods]
    return Evaluation(backbone, variants, RecordFile(path / "records.jsonl"))


def test_every_question_is_measured_with_every_method(backbone: Backbone, adapter: Adapter, tmp_path: Path):
    told: list[tuple[int, int]] = []
    run = evaluation(backbone, tmp_path, "full", "packet", "plain", "none", adapter=adapter)
    found = run.run("tiny", samples(), SETTINGS, lambda p: told.append((p.done, p.measured)))
    assert [(r.sample_id, r.method) for r in found.records[:5]] == [
        *(("q0", method) for method in ("full", "packet", "plain", "none")),
        ("q1", "full"),
    ]
    assert len(found.records) == 12 and not found.skipped and told == [(1, 1), (2, 2), (3, 3)]
    assert [r.yes_no for r in found.records[::4]] == [False, False, True]
    full, packet, plain, none = found.records[:4]
    assert (full.kl, full.agreement, full.recompute_ratio, full.bytes_per_token) == (0, 1, 1, 0)
    assert packet.kl > 0 and plain.kl > 0 and none.kl > 0 and packet.recompute_ratio == none.recompute_ratio == 0
    assert packet.bytes_per_token > plain.bytes_per_token == backbone_bytes(backbone)


def backbone_bytes(backbone: Backbone) -> int:
    """Of keys and values of one token."""
    config = backbone.model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * backbone.dtype.itemsize


def test_answers_and_divergence_are_those_of_the_engine_and_of_single_steps(
    backbone: Backbone, soft_engine: KVPacketEngine, adapter: Adapter, tmp_path: Path
):
    settings = replace(SETTINGS, max_chunks=None)
    records = evaluation(backbone, tmp_path, "full", "packet", adapter=adapter).run("t", samples(1), settings).records
    question = next(make_questions(backbone, samples(1), settings))
    prompt = backbone.tokenizer.decode(question.case.ids)
    user = prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    messages = [Message("system", "You are a helpful assistant who answers questions from documents.")]
    messages.append(Message("user", user))
    soft_engine.encode(CHUNKS)
    answers = [
        soft_engine.generate(messages, GenerationSettings(max_new_tokens=8), policy=policy).text.strip()
        for policy in ("prefill", "packets")
    ]
    assert [r.answer for r in records] == answers
    bench, case = Bench(backbone, adapter), question.case
    with prefilled(backbone, parse_method("full", bench), case) as full:
        ids = decode(backbone, full, 8)
        full.rewind()
        expected = by_steps(backbone, full, ids)
    with prefilled(backbone, parse_method("packet", bench), case) as packet:
        found = by_steps(backbone, packet, ids)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    assert records[1].kl == pytest.approx(float(kl), rel=1e-3)  # float32
    assert records[1].agreement == pytest.approx(float((expected.argmax(-1) == found.argmax(-1)).float().mean()))


def by_steps(backbone: Backbone, state: Any, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary) log-probabilities, one token at a time."""
    rows = [state.logits]
    rows += [backbone.step(state.bound, state.context, token) for token in ids[:-1]]
    return torch.log_softmax(torch.cat(rows).double(), -1)


def test_the_answer_after_scoring_equals_greedy_decoding(backbone: Backbone, adapter: Adapter):
    bench = Bench(backbone, adapter)
    differ = 0
    for question in make_questions(backbone, samples(), SETTINGS):
        with prefilled(backbone, parse_method("full", bench), question.case) as state:
            told = tell(backbone, state, question.case)
        for name in ("plain", "packet", "none", "epic-2"):
            with prefilled(backbone, parse_method(name, bench), question.case) as state:
                found = measure(backbone, question.case, state, told, False).answer
                ids = decode(backbone, state, question.case.max_new_tokens)
                assert found == backbone.decode(ids).strip()
                differ += ids != told.ids
    assert differ > 0


def test_a_stopped_run_goes_on_and_measures_nothing_twice(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = evaluation(backbone, tmp_path / "whole", "full", "plain", "none").run("t", samples(), SETTINGS)
    evaluation(backbone, tmp_path, "full", "plain").run("t", samples(2), SETTINGS)
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"key": "cut short')
    measured: list[str] = []
    counted = lambda b, method, case: measured.append(method.name) or prefilled(b, method, case)  # noqa: E731
    monkeypatch.setattr(run_module, "prefilled", counted)
    again = evaluation(backbone, tmp_path, "full", "plain", "none").run("t", samples(), SETTINGS)
    assert [(r.key, r.answer, r.kl) for r in again.records] == [(r.key, r.answer, r.kl) for r in whole.records]
    assert measured.count("plain") == 1 and measured.count("none") == 4  # one of them to warm up
    measured.clear()
    evaluation(backbone, tmp_path, "full", "plain", "none").run("t", samples(), SETTINGS)
    assert measured == []


def test_whatever_changes_a_figure_changes_the_key(backbone: Backbone, adapter: Adapter, tmp_path: Path):
    other = Adapter.random(backbone.embed(range(500)), 3, 2, seed=9)
    keys = set()
    settings = [
        SETTINGS,
        replace(SETTINGS, seed=1),
        replace(SETTINGS, max_new_tokens=4),
        replace(SETTINGS, style="bare"),
    ]
    for soft, setting in [(adapter, s) for s in settings] + [(other, SETTINGS)]:
        records = evaluation(backbone, tmp_path, "plain", "packet", adapter=soft).run("t", samples(1), setting).records
        keys.update(record.key for record in records)
    assert len(keys) == 9  # plain concatenation does not depend on the adapter


def test_other_threads_and_other_ends_of_an_answer_are_measured_again(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keys = {evaluation(backbone, tmp_path, "full").run("t", samples(1), SETTINGS).records[0].key}
    with monkeypatch.context() as other:
        other.setattr(torch, "get_num_threads", lambda: 77)
        keys.add(evaluation(backbone, tmp_path, "full").run("t", samples(1), SETTINGS).records[0].key)
    monkeypatch.setattr(Backbone, "eos_ids", frozenset({3}))
    keys.add(evaluation(backbone, tmp_path, "full").run("t", samples(1), SETTINGS).records[0].key)
    assert len(keys) == 3


def test_the_supporting_chunk_is_put_where_it_is_asked_for(backbone: Backbone):
    swept = list(make_questions(backbone, samples(2), replace(SETTINGS, gold_positions=(0, 2, 3))))
    assert [(q.sample.sample_id, q.gold_position) for q in swept] == [("q0", 0), ("q0", 2), ("q1", 0), ("q1", 2)]
    for question in swept:
        chunks = [part.text for part in question.case.parts if part.packet_id]
        gold = next(d.text for d in question.sample.documents if d.is_supporting)
        assert chunks.index(gold) == question.gold_position and len(chunks) == 3


def test_chunks_are_cut_to_their_budget_and_the_seed_decides_on_the_rest(backbone: Backbone):
    settings = replace(SETTINGS, chunk_tokens=20)
    first, again, other = (
        [part.ids for part in next(make_questions(backbone, samples(1), s)).case.parts if part.packet_id]
        for s in (settings, settings, replace(settings, seed=5))
    )
    assert first == again != other and all(len(ids or []) <= 20 for ids in first)


def test_prompts_that_do_not_fit_are_left_out_for_all_methods(backbone: Backbone, adapter: Adapter, tmp_path: Path):
    huge = replace(samples(1)[0].documents[0], text=CHUNKS[0] * 200)
    long = [
        replace(samples(1)[0], question="Who? " * 2000, sample_id="long"),
        replace(samples(1)[0], documents=(huge,), sample_id="huge"),
        *samples(1),
    ]
    found = evaluation(backbone, tmp_path, "full", "packet", adapter=adapter).run(
        "t", long, replace(SETTINGS, chunk_tokens=None)
    )
    assert {r.sample_id for r in found.records} == {"q0"}
    assert list(found.skipped) == ["long", "huge"] and "more than the 2048 positions" in found.skipped["long"]
    assert "room for 2048" in found.skipped["huge"]


def test_without_context_no_document_is_read_however_short(backbone: Backbone, tmp_path: Path):
    (sample,) = samples(1)
    short = (SourceText("", "Ada Marlow.", True), *sample.documents[1:3])
    asked = replace(sample, question="Who is Ada Marlow.?", documents=short)
    (question,) = make_questions(backbone, [asked], SETTINGS)
    assert (question.num_chunks, question.num_short) == (2, 1)
    (longer,) = make_questions(backbone, [replace(asked, documents=sample.documents[1:4])], SETTINGS)
    read = ["".join(part.text for part in asked.case.bare) for asked in (question, longer)]
    assert read[0] == read[1] and read[0].count("Ada Marlow.") == 1 and "signed" not in read[0]
    with prefilled(backbone, parse_method("none", Bench(backbone)), question.case) as state:
        assert state.num_slots == sum(len(part.ids or []) for part in question.case.bare)
    found = evaluation(backbone, tmp_path, "full").run("t", [asked, replace(asked, documents=short[:1])], SETTINGS)
    assert (len(found.records), found.short_documents) == (1, 1) and "16 tokens" in found.skipped["q0"]


def test_samples_with_one_question_count_each(backbone: Backbone, tmp_path: Path):
    twice = [replace(sample, sample_id=f"s{number}") for number, sample in enumerate(samples(1) * 2)]
    found = evaluation(backbone, tmp_path, "full", "plain").run("t", twice, SETTINGS)
    assert [row["n"] for row in summarise(found.records)] == [2, 2]


def test_records_with_figures_that_are_none_are_measured_again(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    RecordFile(path).append(record(sample_id="good"))
    line = path.read_text()
    path.write_text(line + line.replace("0.5", "null").replace("good", "bad") + line.replace("0.5", "NaN"))
    assert RecordFile(path).find(record(sample_id="bad").key) is None
    assert RecordFile(path).find(record(sample_id="good").key) is not None


def test_wrong_requests_say_what_is_wrong(backbone: Backbone, tmp_path: Path):
    with pytest.raises(KVPacketError, match="known are full"):
        evaluation(backbone, tmp_path, "ful")
    with pytest.raises(KVPacketError, match="each once"):
        evaluation(backbone, tmp_path, "full", "full")
    with pytest.raises(PromptError, match="known are pipeline"):
        PromptSettings(style="none of these")


def test_records_survive_their_file_and_foreign_lines_do_not_count(tmp_path: Path):
    path = tmp_path / "deep" / "records.jsonl"
    file = RecordFile(path)
    file.append(record(answer="Zoë\u2028said\nyes"))
    with path.open("a") as lines:
        lines.write('[1]\n{"key": "old", "f1": 1}\n\nnot json\n')
    file = RecordFile(path)
    assert file.find("old") is None and file.find(record().key) == record(answer="Zoë\u2028said\nyes")
