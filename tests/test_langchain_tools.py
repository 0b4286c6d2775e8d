"""Tool calls in the words of the model's own chat template, and refusal where it has none."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CHUNKS
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_kvpacket import ChatKVPacket
from langchain_kvpacket.tools import CallSyntax, to_tools
from langchain_samples import LLAMA_TOOLS, QUESTION, QWEN_TOOLS, script
from templates import tokenizer_with

from kvpacket_rag import KVPacketEngine, PromptError
from kvpacket_rag.backbone import Backbone

TEMPLATES = {"qwen": QWEN_TOOLS, "llama": LLAMA_TOOLS}
CALLS = {
    "qwen": '<tool_call>\n{"name": "search", "arguments": {"query": "lease"}}\n</tool_call>',
    "llama": '{"name": "search", "parameters": {"query": "lease"}}',
}


@tool
def search(query: str) -> str:
    """Look something up."""
    return CHUNKS[1]


@pytest.fixture(params=TEMPLATES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chat(engine: KVPacketEngine, kind: str) -> ChatKVPacket:
    engine.encode(CHUNKS)
    return ChatKVPacket(engine=engine, chat_template_kwargs={"chat_template": TEMPLATES[kind]})


def asked(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


async def test_a_call_is_read_in_every_way_to_ask(chat: ChatKVPacket, kind: str, monkeypatch: pytest.MonkeyPatch):
    script(monkeypatch, chat.engine, *[CALLS[kind]] * 4)
    model = chat.bind_tools([search])
    streamed = list(model.stream(QUESTION))
    astreamed = [chunk async for chunk in model.astream(QUESTION)]
    messages = [model.invoke(QUESTION), await model.ainvoke(QUESTION)]
    for message in [*messages, sum(streamed[1:], streamed[0]), sum(astreamed[1:], astreamed[0])]:
        assert asked(message) == [("search", {"query": "lease"})] and message.text == ""
        assert message.tool_calls[0]["id"].startswith("call_")


async def test_text_before_a_call_is_told_and_the_call_is_not(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch):
    text = f"Let me look <that> up.\n{CALLS['qwen']}\n{CALLS['qwen'][:-4]}"  # the end does not matter
    script(monkeypatch, engine, text, text)
    chat = ChatKVPacket(engine=engine, chat_template_kwargs={"chat_template": QWEN_TOOLS}).bind_tools([search])
    message, chunks = chat.invoke(QUESTION), list(chat.stream(QUESTION))
    assert message.text == "Let me look <that> up." == "".join(chunk.text for chunk in chunks)
    assert len(chunks) > 4 and asked(message) == [("search", {"query": "lease"})] * 2


@pytest.mark.parametrize(
    "answer",
    [
        "No need: Ada signed it.\n",
        '<tool_call>\n{"name": "search", "arguments": {"query": \n</tool_call>',
        '<tool_call>\n{"title": "search"}\n</tool_call> so',
        '{"name": "search"}',
        "An end that looks like one <tool_",
    ],
)
def test_what_is_no_whole_call_stays_text(answer: str, chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    script(monkeypatch, chat.engine, answer, answer)
    model = chat.bind_tools([search])
    message = model.invoke(QUESTION)
    assert message.text == answer == "".join(chunk.text for chunk in model.stream(QUESTION))
    assert not message.tool_calls


def test_an_answer_without_calls_is_streamed_as_it_is_written(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    answer = "Ada Marlow signed it in March 2021 for a term of seven years."
    script(monkeypatch, chat.engine, answer)
    pieces = [chunk.text for chunk in chat.bind_tools([search]).stream(QUESTION)]
    assert "".join(pieces) == answer and len([piece for piece in pieces if piece]) > 5


def test_a_chat_with_calls_reads_as_the_template_writes_it(kind: str, make_model: Any):
    tokenizer = tokenizer_with(TEMPLATES[kind])  # of single bytes, so that equal counts mean equal lengths of text
    engine = KVPacketEngine(Backbone(make_model(vocab_size=len(tokenizer)), tokenizer, "bytes"))
    engine.encode(CHUNKS)
    call = {"name": "search", "args": {"query": "Miete, bitte: é"}, "id": "1"}
    turns = [HumanMessage("Who?"), AIMessage("", tool_calls=[call]), ToolMessage(CHUNKS[1], tool_call_id="1")]
    message = ChatKVPacket(engine=engine, max_tokens=1).bind_tools([search]).invoke(turns)
    own_call = {"type": "function", "function": {"name": "search", "arguments": call["args"]}}
    conversation = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "", "tool_calls": [own_call]},
        {"role": "tool", "content": "chunk"},
    ]
    text = tokenizer.apply_chat_template(
        conversation, tools=to_tools([search], None), tokenize=False, add_generation_prompt=True
    )
    ids = engine.backbone.token_ids(text.replace("chunk", CHUNKS[1]), plain=False)
    assert message.response_metadata["chunks_reused"] == 1
    assert message.usage_metadata["input_tokens"] == len(ids)


def test_a_call_is_read_as_the_template_writes_it(chat: ChatKVPacket, kind: str):
    backbone, options = chat.engine.backbone, {"chat_template": TEMPLATES[kind], "tools": to_tools([search], None)}
    arguments = {"query": 'a "quote" }{ ü', "most": 3}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Who?"}]
    asking = backbone.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
    written = backbone.tokenizer.apply_chat_template(turns, tokenize=False, **options).removeprefix(asking)
    answer = backbone.decode(backbone.token_ids(written, plain=False)).strip()
    text, read = CallSyntax.of(chat.engine, options).read(answer)
    assert text == "" and [(call["name"], call["args"]) for call in read] == [("search", arguments)]


def test_tools_withheld_are_not_shown(chat: ChatKVPacket):
    bare, shown = (chat.bind_tools([search], tool_choice=choice) for choice in ("none", "auto"))
    counts = [m.invoke("Hi", max_tokens=1).usage_metadata["input_tokens"] for m in (chat, bare, shown)]
    assert counts[0] == counts[1] < counts[2]


def test_a_template_without_tools_says_what_to_do_instead(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NotImplementedError, match=r"'tiny' shows the model no tools.*@dynamic_prompt"):
        ChatKVPacket(engine=engine).bind_tools([search])
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: engine)
    later = ChatKVPacket(model="not-loaded").bind_tools([search])
    with pytest.raises(PromptError, match="shows the model no tools"):
        later.invoke("Hi")


def test_a_template_that_writes_calls_in_another_form_is_refused(engine: KVPacketEngine):
    odd = QWEN_TOOLS.replace('{"name": "', "call:").replace('", "arguments": ', " with ").replace("'}\\n<", "'\\n<")
    with pytest.raises(NotImplementedError, match="in another form than JSON"):
        ChatKVPacket(engine=engine, chat_template_kwargs={"chat_template": odd}).bind_tools([search])


@pytest.mark.parametrize("choice", ["any", "search", True, "required"])
def test_a_call_cannot_be_forced(chat: ChatKVPacket, choice: Any):
    with pytest.raises(NotImplementedError, match="cannot be forced"):
        chat.bind_tools([search], tool_choice=choice)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"in": value}
    return value


def test_what_nests_too_deeply_to_be_read_is_told_or_stays_text(chat: ChatKVPacket, kind: str):
    deep: Any = {"title": "deep", "type": "object", "description": "Deep.", "properties": {"a": nested(9999)}}
    with pytest.raises(NotImplementedError, match="the arguments that a tool takes nest too deeply"):
        chat.bind_tools([deep])
    call = {"name": "search", "args": nested(9999), "id": "1"}
    with pytest.raises(PromptError, match="the arguments of the call of 'search' nest too deeply"):
        chat.invoke([HumanMessage("Hi"), AIMessage("", tool_calls=[call]), ToolMessage("a", tool_call_id="1")])
    answer = CALLS[kind].replace('"lease"', '{"in":' * 9999 + "1" + "}" * 9999)
    assert CallSyntax(answer[: answer.index("{")], "").read(answer) == (answer, [])


def test_structured_output_says_what_to_do_instead(chat: ChatKVPacket):
    with pytest.raises(NotImplementedError, match="JsonOutputParser"):
        chat.with_structured_output({"title": "answer", "description": "An answer.", "type": "object"})
