from __future__ import annotations

import pytest

from kvpacket_rag.chat import Message
from kvpacket_rag.chunk import Chunk, Hit
from kvpacket_rag.datasets.templates import PIPELINE_STYLE, QUESTIONS, STYLES, PromptStyle
from kvpacket_rag.errors import PromptError
from kvpacket_rag.pipeline import KVPacketRAG

CHUNKS = ["First {chunk} of\n two lines.", "Second {question} chunk.", "Third {0} chunk %s."]
QUESTION = "What {about} it?"
TITLES = ["One", "", "Th{r}ee"]


def by_name(name: str) -> PromptStyle:
    return next(style for style in STYLES if style.name == name)


def as_messages(messages: list[tuple[str, str]]) -> list[Message]:
    return [Message(role, content) for role, content in messages]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize("titles", [(), TITLES], ids=["bare", "titles"])
def test_chunks_stand_verbatim_in_order_and_the_question_after_them(style: PromptStyle, titles: list[str]) -> None:
    text = "\0".join(message.content for message in style.messages(CHUNKS, QUESTION, titles))
    at = [text.index(piece) for piece in (*CHUNKS, QUESTION)]
    assert at == sorted(at)
    assert [text.count(piece) for piece in (*CHUNKS, QUESTION)] == [1] * 4


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_a_heading_stands_before_the_chunks_that_have_a_title(style: PromptStyle) -> None:
    text = "".join(message.content for message in style.messages(CHUNKS, QUESTION, TITLES))
    if style.heading:
        assert style.heading.replace("{title}", "Th{r}ee") + CHUNKS[2] in text
        assert text.count(style.heading.partition("{title}")[0]) >= 2
        assert style.separator + CHUNKS[1] in text
    else:
        assert style.messages(CHUNKS, QUESTION, TITLES) == style.messages(CHUNKS, QUESTION)


def test_names_are_unique_and_there_are_styles_of_every_sort() -> None:
    assert len({style.name for style in STYLES}) == len(STYLES)
    for sort in (lambda s: s.system, lambda s: s.heading, lambda s: "{chunks}" in s.system):
        assert 2 <= sum(bool(sort(style)) for style in STYLES) <= len(STYLES) - 2


def test_a_number_of_titles_other_than_of_chunks_is_refused() -> None:
    with pytest.raises(PromptError, match="1 titles for 3 chunks"):
        PIPELINE_STYLE.messages(CHUNKS, QUESTION, ["One"])


def test_the_style_of_evaluation_is_the_pipelines_own_prompt() -> None:
    hits = [Hit(Chunk(str(i), text, "d", {}), 1.0 - i, str(i)) for i, text in enumerate(CHUNKS)]
    ours = KVPacketRAG.messages(None, QUESTION, hits)  # type: ignore[arg-type]  # it reads no attribute
    assert PIPELINE_STYLE.messages(CHUNKS[::-1], QUESTION) == ours  # the pipeline puts the best hit last


def test_the_llama_index_styles_are_its_default_prompts() -> None:
    from llama_index.core.chat_engine.context import DEFAULT_CONTEXT_TEMPLATE
    from llama_index.core.prompts import chat_prompts, default_prompts

    context = "\n\n".join(CHUNKS)
    for name, template in (
        ("llama-index", chat_prompts.CHAT_TEXT_QA_PROMPT),
        ("llama-index-tree", chat_prompts.CHAT_TREE_SUMMARIZE_PROMPT),
        ("llama-index-text", default_prompts.DEFAULT_TEXT_QA_PROMPT),
    ):
        theirs = template.format_messages(context_str=context, query_str=QUESTION)
        expected = as_messages([(message.role.value, message.content or "") for message in theirs])
        assert by_name(name).messages(CHUNKS, QUESTION) == expected
    (system, user) = by_name("llama-index-chat").messages(CHUNKS, QUESTION)
    assert (system.content, user.content) == (DEFAULT_CONTEXT_TEMPLATE.replace("{context_str}", context), QUESTION)


def test_the_file_path_stands_before_a_chunk_as_llama_index_writes_metadata() -> None:
    from llama_index.core.schema import MetadataMode, TextNode

    node = TextNode(text="Some text.", metadata={"file_path": "/data/Lease.md"})
    messages = by_name("llama-index-paths").messages(["Some text."], QUESTION, ["Lease"])
    assert f"\n{node.get_content(MetadataMode.LLM)}\n" in messages[1].content


def test_every_question_about_a_document_names_it_once() -> None:
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 12
    assert all(question.format(title="\0").count("\0") == 1 for question in QUESTIONS)
