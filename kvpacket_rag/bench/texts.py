"""Chunks of a wanted number of tokens, and the prompt they are asked in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvpacket_rag.chat import Message
from kvpacket_rag.demo import corpus_folder
from kvpacket_rag.engine import KVPacketEngine

QUESTION = "In which document is the calibration of a probe described?"


def chunks_of(engine: KVPacketEngine, number: int, tokens: int) -> list[str]:
    """``number`` different texts of about ``tokens`` tokens, cut from the demo's corpus, repeated where it ends."""
    corpus = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(corpus_folder().glob("*.md")))
    ids = engine.token_ids(corpus)
    texts: list[str] = []
    for lap in count():
        for start in range(lap * 7, len(ids) - tokens, tokens):  # another start each lap, so that texts differ
            texts.append(engine.backbone.decode(ids[start : start + tokens]).strip())
            if len(texts) == number:
                return texts
    raise AssertionError  # the loop has no end


def prompt(texts: list[str], system: str = "") -> list[Message]:
    """As a retrieval chain would send it."""
    head = [Message("system", system)] if system else []
    return [*head, Message("user", "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}")]


def in_turns(texts: list[str]) -> Iterator[list[Message]]:
    """The prompt again and again, each time with another chunk first, so that no context can be gone on with."""
    while True:
        texts = [*texts[1:], texts[0]]
        yield prompt(texts)


def prompt_ids(engine: KVPacketEngine, messages: list[Message]) -> list[int]:
    """The same prompt as tokens, for a loop of one's own."""
    tokenizer, turns = engine.backbone.tokenizer, [{"role": m.role, "content": m.content} for m in messages]
    if not engine.has_chat_template:
        return engine.token_ids(messages[-1].content)
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    return engine.backbone.token_ids(text, plain=False, starts=True)
