"""What a request to vLLM says about its packets: written by the one who asks, proved by the one who serves.

The prompt is ``[preamble][soft tokens, chunk, soft tokens]… [question]``. Everything before the question comes from
packets, as one prefix without gaps, because vLLM takes no other. A packet is named by a hash over its chunk's tokens,
and those tokens stand in the prompt, so the request proves itself: no packet can be put where another was meant.

vLLM shares cached blocks between prompts that begin with the same tokens. The same tokens cut into other packets, or
read as text, have other keys and values, so the salt that keeps blocks apart covers every packet of the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpacket_rag.errors import PacketMismatchError, PacketNotFoundError, PromptError
from kvpacket_rag.packet import PacketSignature, packet_id
from kvpacket_rag.serving.vllm_card import ServingCard
from kvpacket_rag.store.protocol import PacketStore, require_packet_id

PARAMS = "kvpacket"  # the key in a request's kv_transfer_params
_FIELDS = {"signature", "preamble", "packets"}
_SALT = "kvpacket-"
_REREAD = "its packets would be read as text"


@dataclass(frozen=True, slots=True)
class Named:
    """A packet as a request names it.

    Attributes:
        packet_id: of the packet.
        num_tokens: of the text it stands for, soft tokens left out.
    """

    packet_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request says, well formed but not proved.

    Attributes:
        signature: digest of the signature of its chunks' packets.
        preamble: the packet of the text before the first chunk, if there is any.
        packets: of the chunks, in order.
    """

    signature: str
    preamble: Named | None
    packets: tuple[Named, ...]

    def as_params(self) -> dict[str, Any]:
        """As it stands in the request's ``kv_transfer_params``."""
        preamble = self.preamble and [self.preamble.packet_id, self.preamble.num_tokens]
        packets = [[named.packet_id, named.num_tokens] for named in self.packets]
        return {PARAMS: {"signature": self.signature, "preamble": preamble, "packets": packets}}

    @property
    def salt(self) -> str:
        """The request's ``cache_salt``: equal for the same packets in the same order, and for nothing else."""
        text = json.dumps(self.as_params(), sort_keys=True)
        return _SALT + hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PlacedPacket:
    """A packet's place in a prompt.

    Attributes:
        packet_id: of the packet.
        signature: it has to carry.
        start: position of its first token.
        span: positions it takes.
    """

    packet_id: str
    signature: PacketSignature
    start: int
    span: int

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + self.span


def read_claim(params: Any) -> Claim | None:
    """What ``kv_transfer_params`` say about packets; None if they do not speak of any.

    Raises:
        PromptError: they are malformed.
        PacketError: an id is none.
    """
    if not isinstance(params, Mapping) or PARAMS not in params:
        return None
    value = params[PARAMS]
    if len(params) > 1:
        raise PromptError(f"kv_transfer_params holds {sorted(map(str, params))[:8]} beside {PARAMS!r}; pass that alone")
    if not isinstance(value, Mapping) or set(value) != _FIELDS:
        found = sorted(map(str, value))[:8] if isinstance(value, Mapping) else type(value).__name__
        raise PromptError(f"kv_transfer_params[{PARAMS!r}] is {found}; expected {sorted(_FIELDS)}")
    packets, signature, preamble = value["packets"], value["signature"], value["preamble"]
    if not isinstance(packets, list | tuple) or not isinstance(signature, str):
        raise PromptError("packets must be a list of [packet id, number of tokens], and signature a text")
    claim = Claim(signature, None if preamble is None else _named(preamble), tuple(map(_named, packets)))
    if not claim.packets and not claim.preamble:
        raise PromptError(f"kv_transfer_params[{PARAMS!r}] names no packet; leave it out to have a prompt read as text")
    return claim


def _named(value: Any) -> Named:
    if not isinstance(value, list | tuple) or len(value) != 2 or type(value[1]) is not int or value[1] < 1:
        raise PromptError(f"{str(value)[:80]!r} names no packet; expected [packet id, number of tokens]")
    require_packet_id(value[0])
    return Named(*value)


def check_sampling(sampling: Any) -> None:
    """Refuse what makes vLLM compute the whole prompt itself, for a request that names packets.

    Args:
        sampling: vLLM's SamplingParams.

    Raises:
        PromptError: naming the parameter.
    """
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if getattr(sampling, name, None) is not None:
            raise PromptError(f"with {name} {_REREAD}; leave it out, or ask without packets")
    if getattr(sampling, "skip_reading_prefix_cache", None):
        raise PromptError(f"with skip_reading_prefix_cache {_REREAD}; leave it out, or ask without packets")


def soft_prompt(ids: Sequence[int], card: ServingCard) -> list[int]:
    """Tokens that stand for a packet in a prompt: the chunk's own, its first and last repeated for soft tokens.

    Placeholders are never read. A repeated token brings no foreign one into what penalties count.
    """
    return [ids[0]] * card.header + list(ids) + [ids[-1]] * card.trailer


def prove(claim: Claim, card: ServingCard, prompt: Sequence[int], salt: str | None) -> tuple[PlacedPacket, ...]:
    """Places of the packets, once the prompt is proved to hold what they stand for.

    Args:
        claim: what the request says.
        card: of the packets served here.
        prompt: token ids of the whole prompt.
        salt: the request's ``cache_salt``.

    Raises:
        PacketMismatchError: the packets were made with another model or adapter.
        PromptError: prompt and packets do not fit, or the salt is not theirs.
    """
    if claim.signature != card.signature.digest:
        raise PacketMismatchError(
            f"the request's packets have signature {claim.signature[:12]}…, those served here have "
            f"{card.signature.digest[:12]}…: model, adapter or dtype differ; write the card of the engine that "
            "asks, and start vLLM with it"
        )
    if salt != claim.salt:
        raise PromptError(f"cache_salt is {str(salt)[:80]!r}; expected {claim.salt!r}, the salt of these packets")
    placed: list[PlacedPacket] = []
    place = 0
    named = [(claim.preamble, card.preamble_signature, 0, 0)] if claim.preamble else []
    named += [(packet, card.signature, card.header, card.trailer) for packet in claim.packets]
    for packet, signature, header, trailer in named:
        first, span = place + header, header + packet.num_tokens + trailer
        if place + span >= len(prompt):
            raise PromptError(
                f"the packets take {place + span} positions or more and the prompt has {len(prompt)}; expected at "
                "least one token of text behind them"
            )
        if packet_id(prompt[first : first + packet.num_tokens], signature) != packet.packet_id:
            raise PromptError(f"the prompt does not hold the tokens of packet {packet.packet_id!r} at {first}")
        placed.append(PlacedPacket(packet.packet_id, signature, place, span))
        place += span
    return tuple(placed)


def require_no_salt(salt: str | None) -> None:
    """Refuse a request without packets that would share blocks with requests that have some.

    Raises:
        PromptError: its salt is one of theirs.
    """
    if salt is not None and salt.startswith(_SALT):
        raise PromptError(f"cache_salt {salt!r} belongs to a request with packets; pass its kv_transfer_params as well")


def require_stored(placed: Sequence[PlacedPacket], store: PacketStore) -> None:
    """Refuse packets that are not there.

    Raises:
        PacketNotFoundError: naming the first that is missing.
        StoreError: the store cannot be read.
    """
    for packet in placed:
        if packet.packet_id not in store:
            raise PacketNotFoundError(f"packet {packet.packet_id!r} is not in the store; encode its chunk again")
