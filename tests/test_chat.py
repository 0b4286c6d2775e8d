from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from templates import ALL, CHATML, GEMMA2, LLAMA31, MISTRAL, PHI3, QWEN3, tokenizer_with

from kvpacket_rag.chat import Message, ToolCall, fit_roles, renderer
from kvpacket_rag.errors import PromptError

SYSTEM, USER, ASSISTANT, TOOL = (
    Message(role, f"text of the {role}") for role in ("system", "user", "assistant", "tool")
)
NOT_TEXT: list[Any] = [None, [{"type": "image"}]]


def fitted(template: str | None, *messages: Message) -> list[Message]:
    return fit_roles(messages, renderer(tokenizer_with(template), {}))


@pytest.mark.parametrize("template", [*ALL.values(), None], ids=[*ALL, "none"])
def test_messages_that_the_template_takes_are_left_alone(template: str | None) -> None:
    messages = [USER, ASSISTANT, USER]
    assert fitted(template, *messages) == messages


@pytest.mark.parametrize("template", [GEMMA2, PHI3])
def test_a_system_text_that_the_template_refuses_or_drops_goes_to_the_user(template: str) -> None:
    assert fitted(template, SYSTEM, USER) == [Message("user", "text of the system\n\ntext of the user")]


def test_neighbours_of_one_role_are_merged_where_roles_must_alternate() -> None:
    merged = Message("user", "text of the user\n\ntext of the user")
    assert fitted(GEMMA2, USER, USER, ASSISTANT) == [merged, ASSISTANT]
    assert fitted(MISTRAL, SYSTEM, USER, USER) == [SYSTEM, merged]
    assert fitted(CHATML, USER, USER) == [USER, USER]


@pytest.mark.parametrize("template", [GEMMA2, MISTRAL, PHI3])
def test_what_a_tool_answered_goes_to_the_user_where_there_is_no_tool_role(template: str) -> None:
    assert fitted(template, USER, ASSISTANT, TOOL) == [USER, ASSISTANT, Message("user", TOOL.content)]


@pytest.mark.parametrize("template", [LLAMA31, QWEN3])
def test_a_template_with_a_tool_role_gets_it(template: str) -> None:
    assert fitted(template, USER, ASSISTANT, TOOL) == [USER, ASSISTANT, TOOL]


def test_merging_adds_no_empty_lines_for_empty_messages() -> None:
    assert fitted(GEMMA2, Message("system", ""), USER) == [USER]


def test_what_a_template_refuses_in_every_arrangement_is_reported_in_its_own_words() -> None:
    with pytest.raises(PromptError, match="must alternate"):
        fitted(GEMMA2, ASSISTANT, USER)


def test_a_template_that_leaves_a_message_out_whatever_is_done_is_reported() -> None:
    with pytest.raises(PromptError, match="leaves out a message of role 'user'"):
        fitted("{{ messages[-1].content }}", USER, ASSISTANT, USER)


@pytest.mark.parametrize("template", ALL.values(), ids=ALL)
def test_rendering_equals_the_tokenizers_own(template: str) -> None:
    tokenizer = tokenizer_with(template)
    chat = [
        {"role": "user", "content": " Hi. "},
        {"role": "assistant", "content": "Ho."},
        {"role": "user", "content": "?"},
    ]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert renderer(tokenizer, {})([Message(**turn) for turn in chat]) == expected


@pytest.mark.parametrize("template", ALL.values(), ids=ALL)
def test_a_last_message_of_the_assistant_stays_open(template: str) -> None:
    messages = [USER, Message("assistant", "The ferry leaves at")]
    assert renderer(tokenizer_with(template), {})(messages).endswith("The ferry leaves at")


def test_a_last_message_of_the_assistant_is_closed_on_request() -> None:
    render = renderer(tokenizer_with(CHATML), {"add_generation_prompt": True})
    assert render([USER, ASSISTANT]).endswith("text of the assistant<|im_end|>\n<|im_start|>assistant\n")


def test_white_space_before_the_models_turn_is_kept_unless_the_template_trims_it() -> None:
    messages = [USER, Message("assistant", "At \n")]
    assert renderer(tokenizer_with(CHATML), {})(messages).endswith("assistant\nAt \n")
    assert renderer(tokenizer_with(GEMMA2), {})(messages).endswith("model\nAt")


def test_an_answer_begun_that_the_template_cuts_off_is_reported() -> None:
    render = renderer(tokenizer_with("{{ messages[0].content }}"), {})
    with pytest.raises(PromptError, match="leaves out the end of the last message"):
        render([USER, ASSISTANT])


def test_the_answers_of_tools_are_never_merged_and_neither_are_calls_lost_in_a_merger() -> None:
    calls = [Message("assistant", text, (ToolCall("look", {}, id),)) for text, id in (("A", "1"), ("", "2"))]
    answers = [Message("tool", "x", tool_call_id="1"), Message("tool", "y", tool_call_id="2")]
    no_neighbours = (
        "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role == 'assistant' %}"
        "{{ raise_exception('!') }}{% endif %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    merged = Message("assistant", "A", (*calls[0].tool_calls, *calls[1].tool_calls))
    assert fitted(no_neighbours, USER, *calls, *answers) == [USER, merged, *answers]


def test_template_arguments_pass_through() -> None:
    thinking, quick = (renderer(tokenizer_with(QWEN3), {"enable_thinking": on})([USER]) for on in (True, False))
    assert quick == thinking + "<think>\n\n</think>\n\n"


def test_a_template_may_be_passed_for_one_call() -> None:
    render = renderer(tokenizer_with(None), {"chat_template": CHATML})
    assert render([SYSTEM]) == renderer(tokenizer_with(CHATML), {})([SYSTEM])


def test_without_a_template_messages_are_lines_that_end_where_the_assistant_speaks() -> None:
    render = renderer(tokenizer_with(None), {})
    assert render([SYSTEM, USER]) == "system: text of the system\nuser: text of the user\nassistant:"
    assert render([USER, ASSISTANT]) == "user: text of the user\nassistant: text of the assistant"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no messages"),
        ("a prompt", "a string"),
        ([{"role": "user", "content": "Hi."}], "message 0 is a dict"),
        ([USER, Message("narrator", "Hm.")], "message 1 has the role 'narrator'; the roles are system, user"),
        ([USER, replace(TOOL, tool_calls=(ToolCall("look", {}),))], "message 1 calls tools as 'tool'"),
        ([Message("user", NOT_TEXT[0])], "content of message 0 is a NoneType"),
        ([Message("user", NOT_TEXT[1])], "content of message 0 is a list"),
    ],
)
def test_a_malformed_chat_is_refused_with_what_is_wrong(messages: Any, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        fit_roles(messages, renderer(tokenizer_with(CHATML), {}))
