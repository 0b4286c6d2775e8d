"""The prompts that users send: our own and the defaults of LlamaIndex and LangChain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpacket_rag.chat import Message
from kvpacket_rag.errors import PromptError


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How chunks and a question are laid out as a chat.

    Attributes:
        name: unique among the styles.
        user: text of the user's message, with ``{question}`` and, unless ``system`` has it, ``{chunks}``.
        system: text of the system message; empty for none.
        heading: what stands before a chunk that has a title, with ``{title}``.
        separator: between chunks.
    """

    name: str
    user: str
    system: str = ""
    heading: str = ""
    separator: str = "\n\n"

    def messages(self, chunks: Sequence[str], question: str, titles: Sequence[str] = ()) -> list[Message]:
        """The chat: chunks verbatim and in the order given, the question after them.

        Args:
            chunks: texts.
            question: in natural language.
            titles: one a chunk, used by the styles that have a heading; an empty one gives no heading.

        Raises:
            PromptError: there are titles, but not one for each chunk.
        """
        if titles and len(titles) != len(chunks):
            raise PromptError(f"there are {len(titles)} titles for {len(chunks)} chunks; give one a chunk, or none")
        headings = [self.heading.format(title=title) if title else "" for title in titles] or [""] * len(chunks)
        body = self.separator.join(heading + chunk for heading, chunk in zip(headings, chunks, strict=True))
        texts = [("system", self.system), ("user", self.user)]
        return [Message(role, text.format(chunks=body, question=question)) for role, text in texts if text]


_LLAMA_INDEX_SYSTEM = (
    "You are an expert Q&A system that is trusted around the world.\n"
    "Always answer the query using the provided context information, and not prior knowledge.\n"
    "Some rules to follow:\n"
    "1. Never directly reference the given context in your answer.\n"
    "2. Avoid statements like 'Based on the context, ...' or 'The context information ...' or anything along "
    "those lines."
)
_LLAMA_INDEX_QA = (
    "Context information is below.\n"
    "---------------------\n"
    "{chunks}\n"
    "---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\n"
    "Query: {question}\n"
    "Answer: "
)
_LLAMA_INDEX_TREE = _LLAMA_INDEX_QA.replace(
    "Context information is", "Context information from multiple sources is"
).replace("Given the context information", "Given the information from multiple sources")
_LLAMA_INDEX_CHAT = (
    "Use the context information below to assist the user.\n--------------------\n{chunks}\n--------------------\n"
)
_FILE_PATH = "file_path: /data/{title}.md\n\n"

_LANGCHAIN_STUFF = (
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
    "that you don't know, don't try to make up an answer.\n\n{chunks}\n\nQuestion: {question}\nHelpful Answer:"
)
_LANGCHAIN_STUFF_SYSTEM = (
    "Use the following pieces of context to answer the user's question. \n"
    "If you don't know the answer, just say that you don't know, don't try to make up an answer.\n"
    "----------------\n"
    "{chunks}"
)
_LANGCHAIN_RETRIEVAL = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\n\n{chunks}"
)

PIPELINE_STYLE = PromptStyle(
    "pipeline",
    user="{chunks}\n\nAnswer from the text above, in one short sentence. {question}",
    system="You are a helpful assistant who answers questions from documents.",
)

STYLES: tuple[PromptStyle, ...] = (
    PIPELINE_STYLE,
    PromptStyle("llama-index", user=_LLAMA_INDEX_QA, system=_LLAMA_INDEX_SYSTEM),
    PromptStyle("llama-index-paths", user=_LLAMA_INDEX_QA, system=_LLAMA_INDEX_SYSTEM, heading=_FILE_PATH),
    PromptStyle("llama-index-text", user=_LLAMA_INDEX_QA),
    PromptStyle("llama-index-tree", user=_LLAMA_INDEX_TREE, system=_LLAMA_INDEX_SYSTEM, heading=_FILE_PATH),
    PromptStyle("llama-index-chat", user="{question}", system=_LLAMA_INDEX_CHAT, heading=_FILE_PATH),
    PromptStyle("langchain-stuff", user=_LANGCHAIN_STUFF),
    PromptStyle("langchain-stuff-chat", user="{question}", system=_LANGCHAIN_STUFF_SYSTEM),
    PromptStyle("langchain-retrieval", user="{question}", system=_LANGCHAIN_RETRIEVAL),
    PromptStyle("bare", user="{chunks}\n\nQuestion: {question}\nShort answer:"),
    PromptStyle("bare-titles", user="{chunks}\n\nQuestion: {question}\nShort answer:", heading="Title: {title}\n"),
    PromptStyle("bare-lines", user="{chunks}\n{question}", separator="\n"),
    PromptStyle(
        "titles",
        user="Documents:\n\n{chunks}\n\nAnswer the question with a few words. Question: {question}",
        system="You are a helpful assistant.",
        heading="# {title}\n\n",
        separator="\n\n---\n\n",
    ),
)

# Asked about any document, by its title; their answers are the model's own, so no data set is needed.
QUESTIONS: tuple[str, ...] = (
    "What is said about {title}?",
    "Summarise the text about {title} in one sentence.",
    "What is {title}?",
    "Which facts does the text give about {title}?",
    "List the names mentioned in the text about {title}.",
    "Which dates or numbers are given for {title}?",
    "Write one question about {title} that the text answers, and its answer.",
    "Explain {title} to someone who has never heard of it.",
    "What is the most important thing to know about {title}?",
    "Repeat the first sentence of the text about {title}.",
    "Which places are mentioned in connection with {title}?",
    "Give three key points about {title}.",
)
