"""From a prompt to parts: the chunks the store knows, and the text around them, tokenised apart."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvpacket_rag.answer import Miss
from kvpacket_rag.backbone import Backbone, is_unicode
from kvpacket_rag.errors import PromptError
from kvpacket_rag.finder import ChunkFinder
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.parts import Part, tokenise
from kvpacket_rag.prompt import Message, TextPiece, segment_chat, segment_text
from kvpacket_rag.store import PacketStore

Policy = Literal["packets", "prefill"]
Prompt = str | Sequence[Message]


class PromptReader:
    """Reads prompts for one engine, and follows what its store knows.

    Args:
        backbone: the model, whose tokenizer and template are used.
        store: whose chunks are looked for.
        signature: packets of another one are not for this reader.
        min_match_tokens: shorter chunks are left to be read as text.
    """

    def __init__(
        self, backbone: Backbone, store: PacketStore, signature: PacketSignature, min_match_tokens: int
    ) -> None:
        self._backbone = backbone
        self._store = store
        self._signature = signature
        self._min_match_tokens = min_match_tokens
        self._finder = ChunkFinder()
        self._known: dict[str, int] = {}  # packet id to tokens of its text
        self._revision: int | None = None
        self._lock = threading.Lock()

    def read(
        self, prompt: Prompt, policy: Policy, template_kwargs: Mapping[str, Any] | None
    ) -> tuple[list[Part], tuple[Miss, ...]]:
        """Find chunks and tokenise.

        Args:
            prompt: a final text, or chat messages.
            policy: ``"prefill"`` gives the same tokens of text, with no packet to them.
            template_kwargs: for the chat template.

        Returns:
            The parts in order, and chunks that stand in the prompt in a form no packet fits.

        Raises:
            PromptError: the policy is unknown, the prompt empty, or a message malformed.
        """
        if policy not in ("packets", "prefill"):
            raise PromptError(f"policy is {policy!r}, expected 'packets' or 'prefill'")
        texts = [prompt] if isinstance(prompt, str) else [getattr(m, "content", "") for m in prompt]
        if not all(is_unicode(text) for text in texts if isinstance(text, str)):
            raise PromptError("the prompt holds a lone surrogate, which no encoding knows; remove it")
        with self._lock:
            self._refresh()
            if isinstance(prompt, str):
                pieces = segment_text(prompt, self._finder)
            else:
                tokenizer = self._backbone.tokenizer
                pieces = segment_chat(prompt, self._finder, tokenizer, template_kwargs=template_kwargs)
            known = self._known if policy == "packets" else {}
            parts = tokenise(self._backbone, pieces, known, self._is_templated(prompt))
            near = [miss for p in pieces if isinstance(p, TextPiece) for miss in self._finder.near_misses(p.text)]
        misses = tuple(Miss(name, reason) for name, reason in near) if policy == "packets" else ()
        return parts, misses

    def _is_templated(self, prompt: Prompt) -> bool:
        return not isinstance(prompt, str) and bool(getattr(self._backbone.tokenizer, "chat_template", None))

    def _refresh(self) -> None:
        """Bring the finder up to what the store knows, if that changed."""
        revision = self._store.revision()
        if revision == self._revision:
            return
        now = {
            chunk.packet_id: chunk
            for chunk in self._store.known(self._signature)
            if chunk.num_tokens >= self._min_match_tokens
        }
        for name in self._known.keys() - now.keys():
            self._finder.discard(name)
        for name in now.keys() - self._known.keys():
            self._finder.add(name, now[name].text)
        self._known = {name: chunk.num_tokens for name, chunk in now.items()}
        self._revision = revision
