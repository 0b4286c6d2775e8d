"""``kvpacket verify``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kvpacket_rag.cli.options import add_hardware
from kvpacket_rag.cli.output import facts, say, show, show_json, table

if TYPE_CHECKING:
    from kvpacket_rag.adapter import Adapter
    from kvpacket_rag.verify import Verdict

SUMMARY = "prove that packets are fit for a model"
DESCRIPTION = (
    "Proves on a model's real weights that keys can be moved and packets laid side by side, and measures on a small "
    "built-in probe set how far answers from packets are from full prefill, beside plain concatenation."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument("model", metavar="MODEL", help="short name, folder or hub name")
    parser.add_argument(
        "--adapter", metavar="FILE", default="auto", help="adapter, 'none', or 'auto' for the one that ships (default)"
    )
    add_hardware(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Load, measure, judge."""
    say("loading the model and proving the laws")
    from kvpacket_rag.engine import KVPacketEngine
    from kvpacket_rag.verify import verify

    wanted = None if args.adapter == "none" else args.adapter
    engine = KVPacketEngine.load(args.model, adapter=wanted, sink=0, device=args.device, dtype=args.dtype)
    adapter = engine.encoder.adapter
    say("measuring the probe set")
    verdict = verify(engine.backbone, adapter)
    if args.json:
        show_json({"model": args.model, "adapter": adapter.digest, "about": adapter.metadata, **verdict.to_dict()})
        return
    show(_report(args.model, adapter, verdict))


def _report(model: str, adapter: Adapter, verdict: Verdict) -> str:
    named = [("packets", verdict.packets), ("plain concatenation", verdict.plain), ("full prefill", verdict.full)]
    rows = [[name, f"{found.kl:.4f}", f"{found.agreement:.3f}"] for name, found in named]
    about = [
        ("Model", model),
        ("Law A", f"keys moved against keys encoded in place: relative error {verdict.error_shift:.1e}"),
        ("Law B", f"packets side by side against a block mask: relative error {verdict.error_packets:.1e}"),
        ("Adapter", "none" if adapter.is_empty else _origin(adapter)),
    ]
    if figures := adapter.metadata.get("validation_kl"):
        by_domain = ", ".join(f"{name} {value:.3f}" for name, value in json.loads(figures).items())
        plain = json.loads(adapter.metadata.get("plain_kl", "{}")).get("all")
        beside = f"; plain concatenation: all {plain:.3f}" if plain else ""
        about.append(("Its validation", f"KL in nats a token: {by_domain}{beside}"))
    heading = f"Probe set, {verdict.tokens} answer tokens"
    body = table([heading, "KL, nats a token", "agreement"], rows)
    return f"{facts(about)}\n\n{body}\n\nRecovered gap {verdict.recovered_gap:.2f}\nVerdict: {verdict.sentence}"


def _origin(adapter: Adapter) -> str:
    trained_for = adapter.metadata.get("model")
    return f"{adapter.summary}; {f'trained for {trained_for}' if trained_for else 'of unknown origin'}"
