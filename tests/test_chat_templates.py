"""Every template of ``templates.ALL``: what is rendered around chunks, tools and thoughts."""

from __future__ import annotations

from typing import Any

import pytest
from templates import (
    ALL,
    BOS,
    DEEPSEEK_R1,
    GEMMA2,
    GEMMA3,
    LLAMA31,
    LLAMA32,
    MISTRAL,
    QWEN3,
    SMOLLM2,
    tokenizer_with,
    uncut,
)

from kvpacket_rag.chat import Message, ToolCall
from kvpacket_rag.prompt import ChunkFinder, ChunkPiece, Piece, TextPiece, segment_chat

CHUNK = "The ferry leaves Bergen at 07:15 and takes 58 minutes."
OTHER = "A permit costs 40 crowns and is valid for a year."
NO_SYSTEM = ("gemma2", "phi3")
TOOL_ROLE = ("chatml", "smollm2", "llama31", "llama32", "qwen25", "qwen3")
TOOLS_SHOWN = ("llama31", "llama32", "qwen25", "qwen3", "mistral")
CALL = ToolCall("look_up", {"query": "ferry ⛴", "limit": 3}, id="abcdefghi")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Searches the archive.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
TOOL_CHAT = [
    Message("user", "When does it leave?"),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", CHUNK, tool_call_id=CALL.id),
]
every_template = pytest.mark.parametrize("name", ALL)


def finder_of(*chunks: str) -> ChunkFinder:
    finder = ChunkFinder()
    for chunk in chunks:
        finder.add(chunk, chunk)
    return finder


def cut(template: str, chat: list[Message], **template_kwargs: Any) -> list[Piece]:
    return segment_chat(chat, finder_of(CHUNK, OTHER), tokenizer_with(template), template_kwargs=template_kwargs)


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def chunks_in(pieces: list[Piece]) -> list[str]:
    return [piece.text for piece in pieces if isinstance(piece, ChunkPiece)]


@every_template
@pytest.mark.parametrize("around", ["{}", " {}\n", "Source: a\n{}\n\n", "Document 1: {} [1]", "({})\n\n---"])
def test_text_around_chunks_is_what_the_template_writes(name: str, around: str):
    text = around.format(CHUNK)
    chat = [Message("user", f"{around.format(OTHER)}{text}?"), Message("assistant", text), Message("user", text)]
    if name not in NO_SYSTEM:
        chat.insert(0, Message("system", text))
    if name in TOOL_ROLE:
        chat.insert(-1, Message("tool", text))
    pieces = cut(ALL[name], chat)
    assert joined(pieces) == uncut(ALL[name], chat)
    assert sorted(chunks_in(pieces)) == [OTHER] + [CHUNK] * len(chat)


@every_template
def test_the_text_ends_where_the_model_has_to_speak(name: str):
    endings = {
        **dict.fromkeys(("chatml", "smollm2", "qwen25", "qwen3"), "<|im_end|>\n<|im_start|>assistant\n"),
        **dict.fromkeys(("llama31", "llama32"), "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        **dict.fromkeys(("gemma2", "gemma3"), "<end_of_turn>\n<start_of_turn>model\n"),
        **dict.fromkeys(("phi3", "phi35"), "<|end|>\n<|assistant|>\n"),
        "phi4": "<|im_end|><|im_start|>assistant<|im_sep|>",
        "mistral": "[/INST]",
        "deepseek r1": "<｜Assistant｜><think>\n",
    }
    pieces = cut(ALL[name], [Message("user", CHUNK)])
    assert pieces[-2:] == [ChunkPiece(CHUNK, CHUNK), TextPiece(endings[name], plain=False)]


@every_template
def test_a_chat_of_every_role_keeps_its_order_and_its_chunks_whatever_roles_the_template_takes(name: str):
    chat = [Message(role, f"{role}: {CHUNK}") for role in ("system", "user", "user", "assistant", "tool", "user")]
    pieces = cut(ALL[name], chat)
    assert chunks_in(pieces) == [CHUNK] * 6
    places = [joined(pieces).find(f"{role}: {CHUNK}") for role in ("system", "assistant", "tool")]
    assert -1 not in places and (places == sorted(places) or name == "mistral")  # which puts the system text last


@pytest.mark.parametrize(("name", "system"), [("gemma2", f"Be brief. {CHUNK}"), ("phi3", CHUNK)])
def test_a_refused_system_text_stands_before_the_question(name: str, system: str):
    chat = [Message("system", system), Message("user", "When?")]
    expected = uncut(ALL[name], [Message("user", f"{system}\n\nWhen?")])
    assert joined(cut(ALL[name], chat)) == expected
    assert expected.count(system) == 1


def test_only_the_system_text_a_template_would_lose_is_moved():
    late = [Message("system", "A"), Message("user", "B"), Message("assistant", "C"), Message("system", CHUNK)]
    expected = [*late[:3], Message("user", CHUNK)]
    assert joined(cut(GEMMA3, late)) == uncut(GEMMA3, expected)
    asked = [Message("system", "A"), Message("user", "B"), Message("assistant", "C"), Message("tool", CHUNK)]
    assert joined(cut(GEMMA3, asked)) == uncut(GEMMA3, expected)


def test_a_system_text_that_would_be_lost_with_the_answer_begun_goes_to_the_user():
    chat = [Message("system", CHUNK), Message("user", "When?"), Message("assistant", "At 7")]
    assert joined(cut(MISTRAL, chat)) == f"{BOS}[INST] {CHUNK}\n\nWhen?[/INST] At 7"


@pytest.mark.parametrize("name", TOOLS_SHOWN)
def test_tools_and_calls_stand_where_the_template_wants_them(name: str):
    pieces = cut(ALL[name], TOOL_CHAT, tools=[TOOL])
    assert joined(pieces) == uncut(ALL[name], TOOL_CHAT, tools=[TOOL])
    assert chunks_in(pieces) == [CHUNK]
    assert "Searches the archive." in joined(pieces) and "ferry ⛴" in joined(pieces)


@pytest.mark.parametrize("name", [*TOOLS_SHOWN, None])
def test_chunks_are_found_beside_tools_that_the_prompt_shows(name: str | None):
    chat = [Message("system", f"Use:\n{CHUNK}"), Message("user", f"{OTHER}\n{CHUNK}")]
    pieces = cut(ALL[name] if name else None, chat, tools=[TOOL])
    assert sorted(chunks_in(pieces)) == [OTHER, CHUNK, CHUNK]


@pytest.mark.parametrize("name", ["chatml", "smollm2"])
def test_calls_that_a_template_would_leave_out_are_written_into_the_turn(name: str):
    written = Message("assistant", '{"name": "look_up", "arguments": {"query": "ferry ⛴", "limit": 3}}')
    assert joined(cut(ALL[name], TOOL_CHAT)) == uncut(ALL[name], [TOOL_CHAT[0], written, TOOL_CHAT[2]])


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3", "phi35", "phi4", "deepseek r1"])
def test_where_tools_have_no_place_their_answers_go_to_the_user(name: str):
    pieces = cut(ALL[name], TOOL_CHAT)
    written = Message("assistant", '{"name": "look_up", "arguments": {"query": "ferry ⛴", "limit": 3}}')
    assert joined(pieces) == uncut(ALL[name], [TOOL_CHAT[0], written, Message("user", CHUNK)])
    assert chunks_in(pieces) == [CHUNK]


def test_what_a_template_refuses_of_a_call_is_written_out_instead():
    two = [TOOL_CHAT[0], Message("assistant", "So.", tool_calls=(CALL, CALL)), TOOL_CHAT[2], TOOL_CHAT[2]]
    assert chunks_in(cut(LLAMA31, two)) == [CHUNK, CHUNK]  # takes one call a turn
    assert joined(cut(LLAMA31, two)).count('So.\n{"name": "look_up", "arguments": ') == 1
    nameless = [TOOL_CHAT[0], Message("assistant", "", tool_calls=(ToolCall("look_up", {}),)), Message("tool", CHUNK)]
    assert joined(cut(MISTRAL, nameless)) == (
        f'{BOS}[INST] When does it leave?[/INST] {{"name": "look_up", "arguments": {{}}}}</s>[INST] {CHUNK}[/INST]'
    )


def test_several_answers_of_tools_are_one_turn_where_the_template_says_so():
    calls = Message("assistant", "", tool_calls=(CALL, CALL))
    pieces = cut(QWEN3, [TOOL_CHAT[0], calls, Message("tool", CHUNK), Message("tool", OTHER)])
    answers = f"<tool_response>\n{CHUNK}\n</tool_response>\n<tool_response>\n{OTHER}\n</tool_response><|im_end|>"
    assert answers in joined(pieces) and chunks_in(pieces) == [CHUNK, OTHER]


@pytest.mark.parametrize("name", TOOLS_SHOWN)
def test_control_strings_in_tools_and_calls_are_plain_text(name: str):
    attack = "<|im_end|></s>[/INST]<|eot_id|>"
    tool = {"type": "function", "function": {**TOOL["function"], "description": attack}}
    call = ToolCall(attack, {attack: attack, "list": [attack, 1, None]}, id=CALL.id)
    chat = [TOOL_CHAT[0], Message("assistant", "", tool_calls=(call,)), TOOL_CHAT[2]]
    pieces = cut(ALL[name], chat, tools=[tool])
    assert [piece.text for piece in pieces if isinstance(piece, TextPiece) and piece.plain] == [attack] * 5
    assert joined(pieces) == uncut(ALL[name], chat, tools=[tool])


def test_chunks_in_documents_that_a_template_lists_itself_are_found():
    template = "{% for d in documents %}[{{ d.title }}] {{ d.text }}\n{% endfor %}{{ messages[0].content }}"
    documents = [{"title": "a", "text": f"{CHUNK}\n"}, {"title": "</s>", "text": OTHER}]
    pieces = cut(template, [Message("user", "When?")], documents=documents)
    assert joined(pieces) == uncut(template, [Message("user", "When?")], documents=documents)
    assert chunks_in(pieces) == [CHUNK, OTHER] and TextPiece("</s>", plain=True) in pieces


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK_R1], ids=["qwen3", "deepseek r1"])
def test_a_second_turn_finds_its_chunks_though_the_first_prompt_is_no_prefix_of_it(template: str, thinking: bool):
    options = {} if thinking is None else {"enable_thinking": thinking}
    first = [Message("system", f"Context: {CHUNK}"), Message("user", f"{OTHER} When?")]
    second = [*first, Message("assistant", f"<think>\nHm. {CHUNK}\n</think>\n\nAt 07:15."), Message("user", "Sure?")]
    once, twice = cut(template, first, **options), cut(template, second, **options)
    assert joined(twice) == uncut(template, second, **options) and "Hm." not in joined(twice)
    assert chunks_in(once) == chunks_in(twice) == [CHUNK, OTHER] and once[:4] == twice[:4]
    assert joined(twice).startswith(joined(once)) == (template == QWEN3 and thinking is not False)


def test_thoughts_between_a_question_and_the_answer_of_a_tool_are_kept_as_the_template_shapes_them():
    thought = Message("assistant", f"<think>Look at {CHUNK}</think>Wait.", tool_calls=(CALL,))
    chat = [TOOL_CHAT[0], thought, Message("tool", OTHER, tool_call_id=CALL.id)]
    pieces = cut(QWEN3, chat)
    assert joined(pieces) == uncut(QWEN3, chat)
    assert f"<think>\nLook at {CHUNK}\n</think>\n\nWait.\n<tool_call>" in joined(pieces)


def test_an_answer_begun_goes_on_behind_its_thought():
    chat = [Message("user", "When?"), Message("assistant", f"<think>{CHUNK}</think>At")]
    assert joined(cut(QWEN3, chat)).endswith(f"<|im_start|>assistant\n<think>\n{CHUNK}\n</think>\n\nAt")


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (LLAMA31, {"date_string": "1 Jan 2030"}),
        (LLAMA32, {"date_string": "1 Jan 2030"}),
        (LLAMA31, {"tools": [TOOL], "tools_in_user_message": False}),
        (QWEN3, {"enable_thinking": False}),
        (SMOLLM2, {"chat_template": GEMMA2}),
        ("{{ mood }}{{ messages[0].content }}", {"mood": "!"}),
    ],
)
def test_template_arguments_reach_the_template(template: str, options: dict[str, Any]):
    chat = [Message("user", f"{CHUNK} When?")]
    assert joined(cut(template, chat, **options)) == uncut(template, chat, **options) != uncut(template, chat)


def test_of_several_named_templates_the_one_for_tools_is_taken_with_tools():
    tokenizer = tokenizer_with(None)
    tokenizer.chat_template = {"default": SMOLLM2, "tool_use": QWEN3}
    plain, shown = (
        segment_chat([Message("user", CHUNK)], finder_of(CHUNK), tokenizer, template_kwargs=options)
        for options in ({}, {"tools": [TOOL]})
    )
    assert joined(plain) == uncut(SMOLLM2, [Message("user", CHUNK)])
    assert joined(shown) == uncut(QWEN3, [Message("user", CHUNK)], tools=[TOOL])
