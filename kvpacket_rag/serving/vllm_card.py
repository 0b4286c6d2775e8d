"""The card: what another inference engine must know to use an engine's packets, as one JSON file.

It holds no tensor and needs no model to be read, so a process that serves packets need not load the engine.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpacket_rag.errors import PacketError, PacketMismatchError, StoreError, UnsupportedModelError
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.rope import RotaryPlan, Rotation, TensorGroup

if TYPE_CHECKING:  # the engine itself is no part of a process that serves packets
    from kvpacket_rag.engine import KVPacketEngine

_FORMAT = "kvpacket-serving-1"


@dataclass(frozen=True, slots=True)
class ServingCard:
    """Whose packets these are, and how they are laid out.

    Attributes:
        model: as the engine knows it; for messages only.
        values: fingerprint of the weights, equal in every version of transformers; see
            :func:`~kvpacket_rag.fingerprint.fingerprint_values`.
        signature: what the packets of chunks carry.
        plan: the rotary plan, measured on the engine's live model.
        header: soft tokens at the head of every packet.
        trailer: soft tokens at its tail.
    """

    model: str
    values: str
    signature: PacketSignature
    plan: RotaryPlan
    header: int
    trailer: int

    @classmethod
    def of(cls, engine: KVPacketEngine) -> ServingCard:
        """The card of an engine.

        Raises:
            UnsupportedModelError: its packets cannot be laid into another engine's paged cache.
        """
        signature, plan, adapter = engine.signature, engine.backbone.plan, engine.encoder.adapter
        if signature.compression != "none":
            raise UnsupportedModelError(
                f"the packets are compressed ({signature.compression}), and a paged cache has one slot a position; "
                "load the engine without compress"
            )
        if wrong := [g.name for g in plan.groups if g.name not in ("keys", "values") or not g.has_heads]:
            raise UnsupportedModelError(
                f"{engine.model_name} caches {', '.join(sorted(set(wrong)))}; only keys and values by head can be "
                "handed to another engine"
            )
        stored = adapter.header.shape[0] - adapter.left_out_tokens
        values = engine.backbone.values_fingerprint
        return cls(engine.model_name, values, signature, plan, stored, adapter.trailer.shape[0])

    @property
    def preamble_signature(self) -> PacketSignature:
        """Of the packet of a prompt's head: plain text, read alone from position 0, which is exact.

        No engine has this signature, so that no preamble is ever looked for as a chunk.
        """
        return replace(self.signature, adapter="preamble", quantization="none")

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            StoreError: it cannot be written.
        """
        path = Path(path)
        half = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            half.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1))
            os.replace(half, path)
        except OSError as error:
            raise StoreError(f"the card {str(path)!r} cannot be written: {error}") from error
        finally:
            with suppress(OSError):
                half.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> ServingCard:
        """Read what :meth:`save` wrote.

        Raises:
            StoreError: there is no such file, or it is no card.
            PacketMismatchError: its rotary plan is not the one that its packets were made with.
        """
        try:
            text = json.loads(Path(path).read_text())
            if text.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            signature = PacketSignature.from_json(json.dumps(text.pop("signature")))
            card = cls(signature=signature, plan=_plan(text.pop("plan")), **text)
            _check(card)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, PacketError) as error:
            raise StoreError(
                f"{str(path)!r} is no card of an engine ({type(error).__name__}: {error}); write one with "
                "'kvpacket vllm-card --index DIR --out FILE'"
            ) from error
        if card.plan.digest != signature.rope:
            raise PacketMismatchError(
                f"the rotary plan in {str(path)!r} is not that of its packets; write the card again"
            )
        return card


def _plan(value: dict[str, Any]) -> RotaryPlan:
    groups = []
    for group in value["groups"]:
        turn = group["rotation"]
        rotation = turn and Rotation(turn["layout"], turn["start"], tuple(turn["frequencies"]))
        groups.append(TensorGroup(**(group | {"layers": tuple(group["layers"]), "rotation": rotation})))
    return RotaryPlan(tuple(groups), value["max_positions"])


def _check(card: ServingCard) -> None:
    """What the digest of the plan does not cover.

    Raises:
        ValueError: a count or a text is none.
    """
    for name in ("header", "trailer"):
        count = getattr(card, name)
        if type(count) is not int or count < 0:
            raise ValueError(f"its {name} is {count!r}")
    if type(card.plan.max_positions) is not int or not isinstance(card.model, str) or not isinstance(card.values, str):
        raise ValueError("its model, values or max_positions is of another type")
