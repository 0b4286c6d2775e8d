"""A prompt to measure methods on, and what a method leaves behind to answer it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.assemble import Context
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import PromptError
from kvpacket_rag.evaluation.flops import Flops
from kvpacket_rag.parts import Part, absorb, parts_of
from kvpacket_rag.prompt import Message
from kvpacket_rag.runner import BoundContext


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt in parts, the same tokens for every method.

    A chunk at the very end is read as text by all methods, for the next token needs a token before it
    that was read in the prompt.

    Attributes:
        parts: in order, all with their tokens; chunks have a packet id, whichever encoder named it.
        answers: that count as right.
        max_new_tokens: room kept for an answer.
        sample_id: of the question in its data set.
        bare: the prompt without its documents, however short they are; by default, without its chunks and the white
            space between them.

    Raises:
        PromptError: there are no parts, or one has no tokens.
    """

    parts: Sequence[Part]
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 64
    sample_id: str = ""
    bare: Sequence[Part] = ()

    def __post_init__(self) -> None:
        if not self.parts or not all(part.ids for part in self.parts):
            raise PromptError("a case needs parts, and tokens in each of them; make them with parts_of")
        parts = (*self.parts[:-1], replace(self.parts[-1], packet_id=None))
        object.__setattr__(self, "parts", parts)
        if not self.bare:
            object.__setattr__(self, "bare", [part for part in absorb(parts) if part.packet_id is None])

    @classmethod
    def from_chat(
        cls,
        backbone: Backbone,
        messages: Sequence[Message],
        chunks: Sequence[str],
        answers: tuple[str, ...] = (),
        max_new_tokens: int = 64,
    ) -> Case:
        """A chat cut at the given chunks; errors are those of :func:`kvpacket_rag.parts.parts_of`."""
        encoder = PacketEncoder(backbone, Adapter.empty(backbone.hidden_size))
        return cls(parts_of(encoder, messages, chunks), answers, max_new_tokens)

    @property
    def ids(self) -> list[int]:
        """Tokens of the whole prompt, as full prefill reads them."""
        return [token for part in self.parts for token in part.ids or ()]

    @property
    def num_document_tokens(self) -> int:
        """Tokens of the chunks."""
        return sum(part.num_tokens for part in self.parts if part.packet_id)


@dataclass(slots=True)
class State:
    """A prompt read, ready to be answered from; hand it to :func:`release` in the end.

    Attributes:
        context: holds the prompt.
        bound: the same, as the model takes it.
        logits: (1, vocabulary) of the first token.
        recomputed_tokens: tokens of chunks the model read, averaged over its layers.
        packet_bytes: of the packets the prompt was read from.
        flops: until the first token.
        load_seconds: finding the packets.
        assemble_seconds: realigning them and laying them end to end.
        prefill_seconds: from there until the first token was chosen.
        num_slots: of the prompt; fewer than its positions if tokens were dropped.
        num_positions: of the prompt.
    """

    context: Context
    bound: BoundContext
    logits: Tensor
    recomputed_tokens: float
    packet_bytes: int
    flops: Flops
    load_seconds: float
    assemble_seconds: float
    prefill_seconds: float
    num_slots: int = field(init=False)
    num_positions: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_slots, self.num_positions = self.context.num_slots, self.context.num_positions

    @property
    def ttft_seconds(self) -> float:
        """From the prompt in parts and stored packets to the first token, all included."""
        return self.load_seconds + self.assemble_seconds + self.prefill_seconds

    def rewind(self) -> None:
        """Forget what was answered."""
        self.context.num_slots, self.context.num_positions = self.num_slots, self.num_positions


@torch.inference_mode()
def score(backbone: Backbone, state: State, answer_ids: Sequence[int]) -> Tensor:
    """The distributions a given answer is told by, from one forward over it.

    Args:
        backbone: that read the prompt.
        state: may have been answered from before, and may be again.
        answer_ids: at least one token, and no more than the case has room for.

    Returns:
        (answer tokens, vocabulary): row i is what predicts token i.

    Raises:
        PromptError: the answer is empty.
        PacketError: it is longer than the room kept for it.
    """
    if not answer_ids:
        raise PromptError("there is no token of an answer to score; pass at least one")
    state.rewind()
    if len(answer_ids) == 1:
        return state.logits
    place = state.context.reserve(len(answer_ids) - 1)
    ids = torch.tensor([list(answer_ids[:-1])], device=backbone.device)
    positions = torch.arange(place.num_tokens, device=backbone.device)[None] + place.position
    stop = place.slot + place.num_tokens
    rest = state.bound.run(ids, slice(place.slot, stop), positions, stop, wanted="all")
    return torch.cat([state.logits, rest[0]])


@torch.inference_mode()
def decode(backbone: Backbone, state: State, max_new_tokens: int) -> list[int]:
    """The most likely answer, token by token.

    Args:
        backbone: that read the prompt.
        state: may have been answered from before, and may be again.
        max_new_tokens: no more than the case has room for.

    Returns:
        Tokens up to the one that ends the answer, which is among them unless the answer was cut short.

    Raises:
        PacketError: the answer is longer than the room kept for it.
    """
    state.rewind()
    logits, answer = state.logits, []
    for number in range(max_new_tokens):
        answer.append(int(logits.argmax(-1)))
        if answer[-1] in backbone.eos_ids or number == max_new_tokens - 1:
            break
        logits = backbone.step(state.bound, state.context, answer[-1])
    return answer


def release(backbone: Backbone, state: State) -> None:
    """Give the state's memory back, for the next prompt to write, but not to go on with what it holds."""
    state.context.filled = ()
    backbone.pool.give_back(state.context)
