"""What ``kvpacket eval`` says above its tables."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpacket_rag.cli.output import count

if TYPE_CHECKING:
    from kvpacket_rag.encode import PacketEncoder
    from kvpacket_rag.engine import KVPacketEngine


def about(args: argparse.Namespace, engine: KVPacketEngine, skipped: Mapping[str, str], short: int) -> dict[str, str]:
    """What was measured, for the head of the tables."""
    from kvpacket_rag.bench.clock import describe
    from kvpacket_rag.chunk import MIN_MATCH_TOKENS

    places = ", ".join(map(str, args.gold_positions)) or "random"
    told = {
        "Model": engine.model_name,
        "Machine": describe(engine.backbone.dtype, engine.backbone.device),
        "Adapter": _told(engine.encoder),
        "Data": f"{', '.join(args.data)}, {args.split} split, {f'first {args.limit}' if args.limit else 'all'}",
        "Prompts": f"layout {args.style!r}, at most {args.max_chunks} chunks of {args.chunk_tokens} tokens, answers of "
        f"{args.max_new_tokens}; place of the supporting chunk {places}; seed {', '.join(map(str, args.seed))}",
    }
    if skipped:
        reasons = Counter(skipped.values()).most_common()
        told["Left out"] = "; ".join(f"{count(number, 'prompt')}: {reason}" for reason, number in reasons)
    if short:
        told["Read as text"] = (
            f"{count(short, 'document')} of under {MIN_MATCH_TOKENS} tokens, by every method but 'none'"
        )
    return told


def _told(encoder: PacketEncoder) -> str:
    adapter = encoder.adapter
    if adapter.is_empty:
        return "none; packets are of chunks read behind a sink token, as they are served without one"
    return f"{adapter.summary}, SHA-256 {adapter.digest[:12]}…"
