"""``kvpacket verify``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kvpacket_rag.cli.adapter_facts import origin_of
from kvpacket_rag.cli.options import add_hardware
from kvpacket_rag.cli.output import facts, say, show, show_json, table
from kvpacket_rag.verdict import RULE, Verdict

if TYPE_CHECKING:
    from kvpacket_rag.adapter import Adapter

NOT_FIT = 3  # exit code; 1 and 2 are errors
SUMMARY = "prove that packets are fit for a model"
DESCRIPTION = (
    "Proves on a model's real weights that keys can be moved and packets laid side by side, and measures on a small "
    "built-in probe set how far answers from packets are from full prefill, beside plain concatenation. "
    f"{RULE[0].upper()}{RULE[1:]}. Exits with 0 if they are fit and with {NOT_FIT} if they are not; a model that "
    "breaks a law is refused with an error and 1."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument("model", metavar="MODEL", help="short name, folder or hub name")
    parser.add_argument(
        "--adapter", metavar="FILE", default="auto", help="its file, 'none', or 'auto' for the one that ships (default)"
    )
    add_hardware(parser)
    parser.add_argument("--json", action="store_true", help="print all figures and the thresholds as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Load, measure, judge; the exit code says whether packets are fit."""
    say("loading the model and proving the laws")
    from kvpacket_rag.engine import KVPacketEngine
    from kvpacket_rag.verify import verify

    wanted = None if args.adapter == "none" else args.adapter
    engine = KVPacketEngine.load(args.model, adapter=wanted, device=args.device, dtype=args.dtype)
    adapter = engine.encoder.adapter
    say("measuring the probe set")
    verdict = verify(engine.encoder)
    if args.json:
        origin = origin_of(adapter.metadata)
        show_json({"model": args.model, "adapter": adapter.digest, "about": origin, **verdict.to_dict()})
    else:
        show(_report(args.model, adapter, verdict))
    return 0 if verdict.is_fit else NOT_FIT


def _report(model: str, adapter: Adapter, verdict: Verdict) -> str:
    named = [("packets", verdict.packets), ("plain concatenation", verdict.plain), ("full prefill", verdict.full)]
    rows = [[name, f"{found.kl:.4f}", f"{found.agreement:.3f}"] for name, found in named]
    about = [
        ("Model", model),
        ("Law A", f"keys moved against keys encoded in place: relative error {verdict.error_shift:.1e}"),
        ("Law B", f"packets side by side against a block mask: relative error {verdict.error_packets:.1e}"),
        (
            "Adapter",
            "none; chunks are read behind a sink token, as they are served" if adapter.is_empty else _origin(adapter),
        ),
    ]
    if figures := adapter.metadata.get("validation_kl"):
        by_domain = ", ".join(f"{name} {value:.3f}" for name, value in json.loads(figures).items())
        plain = json.loads(adapter.metadata.get("plain_kl", "{}")).get("all")
        beside = f"; plain concatenation: all {plain:.3f}" if plain else ""
        about.append(("Its validation", f"KL in nats a token: {by_domain}{beside}"))
    heading = f"Probe set, {verdict.tokens} answer tokens"
    body = table([heading, "KL, nats a token", "agreement"], rows)
    end = f"Recovered gap {verdict.recovered_gap:.2f}\nVerdict: {verdict.sentence}\n({RULE})"
    return f"{facts(about)}\n\n{body}\n\n{end}"


def _origin(adapter: Adapter) -> str:
    trained_for = adapter.metadata.get("model")
    return f"{adapter.summary}; {f'trained for {trained_for}' if trained_for else 'of unknown origin'}"
