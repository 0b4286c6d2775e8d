"""What a model reads in the end, under every template and from every way in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_kvpacket import ChatKVPacket
from langchain_kvpacket import KVPacketLLM as LangChainLLM
from llama_index.core.base.llms.types import ChatMessage
from llama_index_kvpacket import KVPacketLLM as LlamaIndexLLM
from templates import ALL, BOS, CHATML, DEEPSEEK_R1, GEMMA3, LLAMA31, MISTRAL, QWEN3, tokenizer_with, uncut

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.parts import parts_of
from kvpacket_rag.prefill import Prefiller

CHUNK = "The ferry leaves Bergen at 07:15 and takes 58 minutes."
OTHER = "A permit costs 40 crowns and is valid for a year."
SHORT = GenerationSettings(max_new_tokens=4)


@pytest.fixture(scope="module")
def engine(make_model: Callable[..., Any]) -> KVPacketEngine:
    """Over single bytes, with a tokenizer that puts a beginning-of-sequence token before every text."""
    tokenizer = tokenizer_with(LLAMA31, adds_bos=True)
    return KVPacketEngine(Backbone(make_model(vocab_size=len(tokenizer)), tokenizer, "bytes"))


@pytest.fixture
def read(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of every prompt that an engine reads."""
    prompts: list[list[int]] = []
    check = Prefiller.check_length

    def spy(self: Prefiller, parts: Any, *rest: Any) -> None:
        prompts.append(self.all_ids(parts))
        check(self, parts, *rest)

    monkeypatch.setattr(Prefiller, "check_length", spy)
    return prompts


ENTRIES: dict[str, Callable[[KVPacketEngine, str], Any]] = {
    "string": lambda engine, text: engine.generate(text, SHORT),
    "rendered": lambda engine, text: engine.generate(
        engine.backbone.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False), SHORT
    ),
    "messages": lambda engine, text: engine.generate([Message("user", text)], SHORT),
    "langchain chat": lambda engine, text: ChatKVPacket.from_engine(engine, max_tokens=4).invoke(text),
    "langchain completion": lambda engine, text: LangChainLLM.from_engine(engine, max_tokens=4).invoke(text),
    "llama index chat": lambda engine, text: LlamaIndexLLM(engine=engine, max_new_tokens=4).chat([ChatMessage(text)]),
    "llama index completion": lambda engine, text: LlamaIndexLLM(engine=engine, max_new_tokens=4).complete(text),
}
FINAL = ("string", "rendered")  # in which a control string is a control token


@pytest.mark.parametrize(
    "template", [LLAMA31, GEMMA3, MISTRAL, DEEPSEEK_R1, CHATML], ids=["llama", "gemma", "mistral", "r1", "chatml"]
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_prompt_begins_with_the_one_beginning_of_sequence(
    engine: KVPacketEngine, read: list[list[int]], monkeypatch: pytest.MonkeyPatch, entry: str, template: str
):
    monkeypatch.setattr(engine.backbone.tokenizer, "chat_template", template)
    engine.encode([f"{BOS} {CHUNK}"])
    for text in (f"{BOS} {CHUNK}\n\nWhen?", f"So {BOS} {CHUNK} When?", "When?" if entry in FINAL else f"When?{BOS}"):
        ENTRIES[entry](engine, text)
        bos = engine.backbone.tokenizer.bos_token_id
        assert read[-1][0] == bos and read[-1].count(bos) == 1


@pytest.mark.parametrize("name", ALL)
def test_the_tokens_read_are_the_templates_text_character_by_character(
    engine: KVPacketEngine, read: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setattr(engine.backbone.tokenizer, "chat_template", ALL[name])
    edges = [" x ", "\ny\n", "(z)", "渡し船。", "7 7", "🏳️‍🌈!"]
    engine.encode(chunks := [f"{edge}{CHUNK}{edge}" for edge in edges])
    chat = [Message("user", "\n".join(chunks) + "?"), Message("assistant", chunks[3]), Message("user", "So?")]
    reused = [engine.generate(chat, SHORT).usage.chunks_reused for _ in range(2)]
    assert reused == [len(chunks) + 1] * 2
    text = engine.backbone.tokenizer.decode(read[-1], clean_up_tokenization_spaces=False)
    assert text.removeprefix(BOS) == uncut(ALL[name], chat).removeprefix(BOS)


def test_a_prompt_to_train_on_is_the_prompt_to_answer(engine: KVPacketEngine, read: list[list[int]]):
    chat = [Message("system", "Be brief."), Message("user", f"{CHUNK}\n{OTHER}\nWhen?")]
    engine.encode([CHUNK, OTHER])
    engine.generate(chat, SHORT)
    parts = parts_of(engine.encoder, chat, [CHUNK, OTHER])
    assert [token for part in parts for token in part.ids or ()] == read[-1]
    assert read[-1].count(engine.backbone.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK_R1], ids=["qwen3", "deepseek r1"])
def test_a_second_turn_is_answered_from_packets_as_by_an_engine_that_saw_no_first(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, template: str, thinking: bool
):
    monkeypatch.setattr(engine.backbone.tokenizer, "chat_template", template)
    options = {"enable_thinking": thinking}
    warm, cold = KVPacketEngine(engine.backbone), KVPacketEngine(engine.backbone)
    for used in (warm, cold):
        used.encode([CHUNK, OTHER])
    first = [Message("system", "Be brief."), Message("user", f"{CHUNK}\n{OTHER}\nWhen?")]
    answer = warm.generate(first, SHORT, template_kwargs=options)
    turns = [*first, Message("assistant", f"<think>\nHm.\n</think>\n\n{answer.text}"), Message("user", f"{CHUNK}?")]
    again = warm.generate(turns, SHORT, template_kwargs=options)
    engine.backbone.pool.drop_idle()  # the two share a model, and with it the contexts it filled
    alone = cold.generate(turns, SHORT, template_kwargs=options)
    assert again.token_ids == alone.token_ids and again.usage.chunks_reused == alone.usage.chunks_reused == 3
    assert again.usage.preamble_tokens > alone.usage.preamble_tokens  # what stood before the first chunk, too
