"""Training runs side by side: what each kind of adapter reaches, and what it costs.

    python benchmarks/adapters.py RUN_FOLDER...

Figures are those the runs wrote themselves: validation KL in nats an answer token, the share of plain
concatenation's divergence that is recovered, what a packet grows by, and the size of the adapter's file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.cli.output import table
from kvpacket_rag.training.recipe import Recipe

HEADER = ["run", "adapter", "other settings", "steps", "best KL", "plain KL", "recovered", "tokens a packet", "MB"]
SHAPE = {"header", "trailer", "deep", "rank", "keep_header", "steps"}  # told by the adapter's own summary
WATCHING = {"validate_every", "patience"}


def line(folder: Path) -> list[str]:
    """One run."""
    adapter = Adapter.load(folder / "adapter.safetensors")
    recipe = json.loads(adapter.metadata["recipe"])
    entries = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    best = min(entry["validation_kl"] for entry in entries if "validation_kl" in entry)
    plain = next((entry["plain_kl"] for entry in entries if "plain_kl" in entry), None)
    return [
        folder.name,
        adapter.summary,
        differences(recipe),
        str(max(entry["step"] for entry in entries)),
        f"{best:.4f}",
        f"{plain:.4f}" if plain else "–",
        f"{1 - best / plain:.2f}" if plain else "–",
        str(adapter.stored_tokens),
        f"{(folder / 'adapter.safetensors').stat().st_size / 1e6:.2f}",
    ]


def differences(recipe: dict[str, Any]) -> str:
    """Settings that are not the default ones."""
    usual = Recipe().to_dict()
    return ", ".join(f"{n}={v}" for n, v in recipe.items() if n not in SHAPE | WATCHING and v != usual.get(n)) or "–"


def main() -> None:
    """Print the table, best first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    lines = [line(folder) for folder in parser.parse_args().runs]
    print(table(HEADER, sorted(lines, key=lambda entry: float(entry[4]))))


if __name__ == "__main__":
    main()
