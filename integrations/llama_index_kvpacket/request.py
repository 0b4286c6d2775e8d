"""One call of a model, on its way to the engine and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvpacket_rag import Answer, AnswerStream, Message, PromptError, Reuse
from kvpacket_rag.engine import Policy
from kvpacket_rag.learner import Prepared
from llama_index_kvpacket.parameters import require_names
from llama_index_kvpacket.responses import Raw, raw
from llama_index_kvpacket.retrieved import ADVICE, RETRIEVED, texts_of

if TYPE_CHECKING:
    from llama_index_kvpacket.configuration import ConfiguredLLM

logger = logging.getLogger(__name__)

Prompt = str | list[Message]


class Request:
    """The one way to the engine.

    Nothing happens, and no error is raised, before it is started.

    Args:
        llm: whose fields apply where the call says nothing else.
        prompt: makes it.
        arguments: of the call.
    """

    def __init__(self, llm: ConfiguredLLM, prompt: Callable[[], Prompt], arguments: Mapping[str, Any]) -> None:
        self._llm = llm
        self._prompt = prompt
        self._arguments = arguments
        self._retrieved = RETRIEVED.count
        self._found = RETRIEVED.here()  # now, for it may be started in another thread
        self._texts = texts_of(self._found)  # as they are now
        self._prepared = Prepared()
        llm.begin()

    def start(self) -> AnswerStream:
        """Check the prompt, and encode retrieved chunks in it that have no packet."""
        llm, call = self._llm, dict(self._arguments)
        own = call.pop("chat_template_kwargs", None) or {}
        if not isinstance(own, Mapping):
            raise PromptError(f"chat_template_kwargs is {own!r}; pass a dictionary of arguments by name")
        policy = call.pop("policy", None) or llm.policy
        reuse = Reuse(
            call.pop("match", None) or llm.match,
            tuple(require_names("hints", call.pop("hints", None) or llm.hints)),
            call.pop("on_miss", None) or llm.on_miss,
        )
        settings, prompt = llm.generation_settings(call), self._prompt()
        reuse = self._prepare(prompt, reuse, policy)
        template = {**llm.chat_template_kwargs, **own}
        return llm.engine.stream(prompt, settings, policy=policy, template_kwargs=template, reuse=reuse)

    def _prepare(self, prompt: Prompt, reuse: Reuse, policy: Policy) -> Reuse:
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        text, engine = "\0".join(texts), self._llm.engine
        if policy == "prefill" or reuse.match == "off":
            return engine.learner.read_in_full(text, [*self._texts, *RETRIEVED.texts()]).expected(reuse)
        encode = self._llm.encode_retrieved and reuse.on_miss != "error" and engine.may_reuse(text, policy)
        self._prepared = engine.learner.prepare(text, self._texts, RETRIEVED.texts(), ADVICE, encode=encode)
        return self._prepared.expected(reuse)

    def details(self, answer: Answer) -> Raw:
        """What ``response.raw`` tells of the answer, and ``llm.last_usage`` from now on."""
        answer = self._prepared.counted(answer)
        details, usage = raw(answer), answer.usage
        logger.info("%s", usage.sentence)
        if usage.chunks_reused or self._prepared.encoded:
            if self._found:  # where nothing was retrieved, all share one
                self._found.reused_by.add(self._llm.engine)
        elif usage.misses and self._llm.engine not in self._found.reused_by:  # else it may quote an earlier one's
            reasons = "; ".join(dict.fromkeys(miss.reason for miss in usage.misses))
            self._llm.warn_once(f"no chunk of a prompt was reused; {reasons}; llm.last_usage tells of each call")
        self._llm.note(details["usage"], self._retrieved)
        return details
