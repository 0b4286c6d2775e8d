"""Several prompts in one decode loop: every answer is the one its prompt gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import tiny
from conftest import CHUNKS
from reference import error, make_packet, own_logits, random_ids, slot_logits
from test_architectures import CASES, TAKE_NO_MASK

from kvpacket_rag.answer import Answer
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.batch import Rows, _groups
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import ContextTooLongError, DeviceError, PacketMissError, PromptError
from kvpacket_rag.reading import Prompt, Reuse

GREEDY = GenerationSettings(max_new_tokens=20)


def ask(chunks: Sequence[str], question: str) -> list[Message]:
    return [Message("system", "Be brief."), Message("user", "\n\n".join([*chunks, f"Question: {question}"]))]


PROMPTS: list[Prompt] = [
    ask(CHUNKS[:1], "Who?"),
    ask(CHUNKS, "Which of the four says the most about doors and sensors, and which about cards?"),
    ask([], "What is not in any chunk?"),
    f"{CHUNKS[2]} and then {CHUNKS[0]} So",
    ask(CHUNKS[1:3], "When?"),
]


@pytest.fixture(params=["bare", "soft"])
def engine(request: pytest.FixtureRequest, engine: KVPacketEngine, soft_engine: KVPacketEngine) -> KVPacketEngine:
    used = engine if request.param == "bare" else soft_engine
    used.encode(CHUNKS)
    return used


def told(answer: Answer) -> Any:
    usage = answer.usage
    counts = usage.packet_tokens, usage.prompt_tokens, usage.completion_tokens, usage.chunks_reused, usage.misses
    return answer.token_ids, answer.text, answer.finish_reason, answer.packet_ids, answer.policy, counts


def alone(engine: KVPacketEngine, settings: Sequence[GenerationSettings], **options: Any) -> list[Any]:
    return [told(engine.generate(p, s, **options)) for p, s in zip(PROMPTS, settings, strict=True)]


def test_prompts_of_unequal_context_are_answered_as_one_by_one(engine: KVPacketEngine):
    assert list(map(told, engine.generate_batch(PROMPTS, GREEDY))) == alone(engine, [GREEDY] * 5)


def test_every_answer_is_decoded_by_settings_of_its_own(engine: KVPacketEngine):
    drawn = GenerationSettings(max_new_tokens=12, temperature=0.9, top_p=0.9, top_k=40)
    text = engine.generate(PROMPTS[4], GREEDY).text
    settings = [
        replace(drawn, seed=1),
        replace(drawn, seed=2, max_new_tokens=3),
        replace(GREEDY, repetition_penalty=1.5),
        replace(drawn, seed=1, min_p=0.05, max_new_tokens=1),
        replace(GREEDY, stop=(text[2:5],)),
    ]
    found = engine.generate_batch(PROMPTS, settings)
    assert list(map(told, found)) == alone(engine, settings)
    assert found[4].finish_reason == "stop" and found[4].text == text[: text.find(text[2:5])]
    assert [answer.usage.completion_tokens for answer in found[1:4:2]] == [3, 1]


@pytest.mark.parametrize("policy", ["prefill", "auto"])
def test_the_policy_holds_for_all(engine: KVPacketEngine, policy: Any):
    engine.break_even_tokens = engine.count_tokens(CHUNKS[0]) + 1
    found = list(map(told, engine.generate_batch(PROMPTS, GREEDY, policy=policy)))
    assert found == alone(engine, [GREEDY] * 5, policy=policy)
    assert {row[4] for row in found} == ({"prefill"} if policy == "prefill" else {"prefill", "packets"})


@pytest.mark.parametrize("max_slots", [1, 300, 700])
def test_batches_are_split_by_tokens_and_keep_their_order(engine: KVPacketEngine, max_slots: int):
    assert list(map(told, engine.generate_batch(PROMPTS, GREEDY, max_slots=max_slots))) == alone(engine, [GREEDY] * 5)


def test_groups_are_of_like_length_and_within_slots_and_window(engine: KVPacketEngine):
    tasks = [engine._tasks.read(prompt, GREEDY, None, 0, None) for prompt in PROMPTS]
    prompts = [engine._prefiller.num_positions(task.parts) for task in tasks]
    groups = list(_groups(engine._prefiller, tasks, 500, engine.context_window))
    assert sorted(number for group in groups for number in group) == list(range(5)) and len(groups) > 1
    assert all(len(g) == 1 or (max(prompts[n] for n in g) + 20) * len(g) <= 500 for g in groups)
    assert [prompts[n] for g in groups for n in g] == sorted(prompts, reverse=True)
    tasks[2] = replace(tasks[2], settings=GenerationSettings(max_new_tokens=1000))
    longest = max(prompts[2] + 1000, max(prompts) + 20)
    narrow = list(_groups(engine._prefiller, tasks, 1 << 20, longest))
    together = next(group for group in narrow if 2 in group)
    assert len(narrow) > 1 and max(prompts[number] for number in together) + 1000 <= longest


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_left_padded_rows_equal_the_models_own_forward(name: str, tokenizer: Any):
    settings = dict(CASES[name])
    backbone = Backbone(tiny(settings.pop("model_type", name), **settings), tokenizer, name)
    packets = [random_ids(21, 1), random_ids(19, 2)]
    prompts = [(packets, random_ids(6, 3)), (packets[1:], random_ids(4, 4)), ([], random_ids(9, 5))]
    answers = [random_ids(4, seed) for seed in (6, 7, 8)]
    longest = sum(map(len, packets)) + 6
    context = backbone.pool.take(longest + 8, batch=3)
    for buffer in context.buffers:
        buffer.fill_(float("nan"))  # whatever was in that memory before
    filled = []
    for row, (chunks, question) in enumerate(prompts):
        start = longest - sum(map(len, chunks)) - len(question)
        own = context.row(row, start)
        stored = backbone.encode([torch.tensor(chunk) for chunk in chunks]) if chunks else []
        for chunk, tensors in zip(chunks, stored, strict=True):
            own.place(make_packet(backbone, tensors, len(chunk)))
        backbone.prefill(backbone.bind(own), [(own.reserve(len(question)), question)])
        filled.append(own)
    context.num_slots = longest
    rows = Rows(backbone, context, filled)
    order = [0, 1, 2]
    for number in range(4):
        if number == 2:  # the first row ends, and the last one moves into its place
            order = rows.keep([1, 2])
        logits = rows.step([answers[row][number] for row in order])
        for found, row in zip(logits, order, strict=True):
            chunks, question = prompts[row]
            pieces: Any = [*(("packet", c) for c in chunks), ("text", question + answers[row][: number + 1])]
            expected = (slot_logits if name in TAKE_NO_MASK else own_logits)(backbone.model, pieces)
            assert error(found, expected) < 1e-5  # float32
    assert sorted(order) == [1, 2]


def test_where_memory_runs_out_smaller_batches_give_the_same_answers(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    expected, sizes, take = alone(engine, [GREEDY] * 5), [], engine.backbone.pool.take

    def small(num_slots: int, batch: int = 1) -> Any:
        sizes.append(batch)
        if batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return take(num_slots, batch)

    monkeypatch.setattr(engine.backbone.pool, "take", small)
    assert list(map(told, engine.generate_batch(PROMPTS, GREEDY))) == expected
    assert sizes == [5, 2, 3, 1, 2] and "ran out for 5 prompts at once" in caplog.text


def test_a_device_that_disappears_is_named(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch):
    def lost(*_: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(Rows, "step", lost)
    with pytest.raises(DeviceError, match=r"cannot be used any more .CUDA error: unspecified launch failure.;"):
        engine.generate_batch(PROMPTS, GREEDY)


def test_a_miss_is_counted_with_its_own_answer_or_an_error_where_that_is_asked(engine: KVPacketEngine):
    (name,) = engine.encode(CHUNKS[1:2])
    hinted = [Reuse(hints=(name,)) if number == 2 else Reuse() for number in range(5)]
    found = engine.generate_batch(PROMPTS, GREEDY, reuse=hinted)
    assert [len(answer.usage.misses) for answer in found] == [0, 0, 1, 0, 0]
    with pytest.raises(PacketMissError):
        engine.generate_batch(PROMPTS, GREEDY, reuse=[replace(reuse, on_miss="error") for reuse in hinted])


def test_times_count_from_the_moment_all_were_handed_over(engine: KVPacketEngine):
    found = [answer.timings for answer in engine.generate_batch(PROMPTS, GREEDY, max_slots=1)]
    ends = sorted(times.total_seconds for times in found)
    assert all(0 < times.ttft_seconds <= times.total_seconds for times in found)
    assert all(any(times.ttft_seconds > end for end in ends) for times in found if times.total_seconds > ends[0])


def test_nothing_is_nothing_and_one_is_one(engine: KVPacketEngine):
    assert engine.generate_batch([]) == []
    assert told(engine.generate_batch(PROMPTS[:1], [GREEDY])[0]) == told(engine.generate(PROMPTS[0], GREEDY))


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "words"),
    [
        ("Who?", {}, PromptError, "prompts is a str; pass a list of prompts"),
        (PROMPTS[:2], {"settings": [GREEDY]}, PromptError, "1 settings for 2 prompts"),
        (PROMPTS[:2], {"reuse": [Reuse()] * 3}, PromptError, "3 reuse for 2 prompts"),
        (PROMPTS[:2], {"settings": 3}, PromptError, "settings is a int"),
        (["Who?", ""], {}, PromptError, "the prompt is an empty string"),
        (["Who?", "word " * 4000], {}, ContextTooLongError, "2048"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_any_work(
    soft_engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, prompts: Any, options: Any, kind: Any, words: str
):
    monkeypatch.setattr(soft_engine.backbone.runner, "forward", lambda *a, **k: pytest.fail("worked"))
    with pytest.raises(kind, match=words):
        soft_engine.generate_batch(prompts, **options)
