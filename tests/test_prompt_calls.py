"""Chunks in the arguments of tool calls, which templates write as JSON."""

from __future__ import annotations

import pytest
from templates import QWEN3, QWEN25, tokenizer_with, uncut

from kvpacket_rag.chat import Message, ToolCall
from kvpacket_rag.prompt import ChunkFinder, ChunkPiece, segment_chat

PLAIN = "The ferry leaves Bergen at 07:15 and takes 58 minutes."
ESCAPED = 'He said "the lease\nof the ferry" runs until May, and no longer.'


@pytest.mark.parametrize("template", [QWEN25, QWEN3], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize(("chunk", "is_found"), [(PLAIN, True), (ESCAPED, False)])
def test_a_chunk_in_a_call_is_one_only_if_it_is_written_as_it_is(template: str, chunk: str, is_found: bool) -> None:
    finder = ChunkFinder()
    finder.add("x", chunk)
    call = ToolCall("save", {"text": f"Note: {chunk}"})
    chat = [Message("user", "Save it."), Message("assistant", "", (call,)), Message("tool", "ok"), Message("user", "?")]
    pieces = segment_chat(chat, finder, tokenizer_with(template))
    assert "".join(piece.text for piece in pieces) == uncut(template, chat)
    assert any(isinstance(piece, ChunkPiece) for piece in pieces) == is_found
