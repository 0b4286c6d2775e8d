"""``kvpacket vllm-card``."""

from __future__ import annotations

import argparse
import json
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from kvpacket_rag.cli.options import add_engine, add_index, engine_options, require_index
from kvpacket_rag.cli.output import facts, say, show
from kvpacket_rag.errors import StoreError
from kvpacket_rag.namespace import namespace_folder

if TYPE_CHECKING:
    from kvpacket_rag.serving.vllm_admit import Settings
    from kvpacket_rag.serving.vllm_card import ServingCard

SUMMARY = "write what vLLM must know to answer from an index's packets"
DESCRIPTION = (
    "Writes the card of an index, one JSON file that vLLM's connector reads, and prints the command that starts vLLM "
    "with it. Write it again, and start vLLM anew, when model, adapter or number format changed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Index, file and model."""
    add_index(parser)
    parser.add_argument("--namespace", metavar="NAME", default="", help="whose index it is (default: the folder's own)")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="file to write")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    add_engine(parser.add_argument_group("model"))


def run(args: argparse.Namespace) -> None:
    """Load the model, whose rotary embedding is measured, and write."""
    folder = namespace_folder(args.index, args.namespace)
    require_index(folder)
    if args.out.exists() and not args.force:
        raise StoreError(f"{args.out} exists; name another file, or replace it with --force")
    say("loading the model (the first time takes longer)")
    from kvpacket_rag.models import resolve_model
    from kvpacket_rag.serving.vllm_admit import Settings

    card = _card(args, folder)
    card.save(args.out)
    settings = Settings(str(args.out.absolute()), str(folder.expanduser().absolute()))
    show(facts([("Model", f"{card.model} in {card.signature.dtype}"), ("Written", str(args.out))]))
    show(f"\nStart vLLM with:\n\n{start_command(str(resolve_model(card.model)), card, settings)}")


def _card(args: argparse.Namespace, folder: Path) -> ServingCard:
    """The card of an index.

    Raises:
        PacketMismatchError: the packets are of another model, adapter or dtype than is asked for.
        UnsupportedModelError: vLLM cannot take them.
    """
    from kvpacket_rag.index import PacketIndex
    from kvpacket_rag.origin import Origin
    from kvpacket_rag.serving.vllm_card import ServingCard

    options = engine_options(args)
    model = options.pop("model", None)
    with closing(PacketIndex.open(folder, load=False)) as index:
        origin = Origin(index, folder)
        with closing(origin.load_engine(model, options, keep_adapter=True)) as engine:
            origin.check(engine, origin.embedder, reencode=False)
            return ServingCard.of(engine)


def start_command(model: str, card: ServingCard, settings: Settings) -> str:
    """The command that starts vLLM's server with the connector, over several lines."""
    from kvpacket_rag.serving.vllm_admit import GUARD

    options = {
        "--model": model,
        "--dtype": card.signature.dtype,
        "--max-model-len": str(card.plan.max_positions),
        "--logits-processors": GUARD,
        "--kv-transfer-config": json.dumps(settings.transfer_config()),
    }
    lines = ["python -m vllm.entrypoints.openai.api_server"]
    lines += [f"  {name} {shlex.quote(value)}" for name, value in options.items()]
    return " \\\n".join(lines)
