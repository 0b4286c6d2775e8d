"""Reading a prompt the way an engine reads it, for the methods that serving itself offers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.evaluation.flops import Flops, LayerCost, of_rotation
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.parts import Part
from kvpacket_rag.prefill import Prefilled, Prefiller


def serve(packets: CasePackets, case: Case, parts: Sequence[Part], num_recomputed: int = 0) -> State:
    """Load packets, assemble, prefill: the engine's own code, with no preamble kept from an earlier request.

    Args:
        packets: prepared for the case, if any part is to be taken from them.
        case: says how long the answer may be.
        parts: to be read; those with a packet id are taken from packets.
        num_recomputed: tokens of chunks among the others.
    """
    prefiller = Prefiller(packets.backbone, packets.encoder, packets.store)
    prefiller.check_length(parts, case.max_new_tokens)
    started = time.perf_counter()
    filled = prefiller.run(parts, case.max_new_tokens)
    int(filled.logits.argmax(-1))  # waits for the device
    seconds = time.perf_counter() - started
    return State(
        context=filled.context,
        bound=filled.bound,
        logits=filled.logits,
        recomputed_tokens=float(num_recomputed),
        packet_bytes=packets.size_bytes(filled.reused),
        flops=_flops(packets, filled, num_recomputed),
        load_seconds=filled.load_seconds,
        assemble_seconds=filled.assemble_seconds,
        prefill_seconds=seconds - filled.load_seconds - filled.assemble_seconds,
    )


def _flops(packets: CasePackets, filled: Prefilled, num_recomputed: int) -> Flops:
    slots = filled.context.num_slots
    cost = LayerCost.of(packets.backbone)
    return Flops(
        rotate=of_rotation(packets.backbone.plan, slots - filled.prefilled_tokens),
        recompute=cost.layers * cost.of_tokens(num_recomputed, slots),
        query=cost.layers * cost.of_tokens(filled.prefilled_tokens - num_recomputed, slots),
    )
