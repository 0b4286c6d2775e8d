"""Quality against size: F1 and KL of packets by share of tokens removed and bits of a number.

    python benchmarks/frontier.py --data hotpotqa niah --limit 40 --out frontier

Every figure is kept in OUT/records.jsonl as soon as it is measured, so a run may be stopped and goes on from there.
With --single, one joint cache of all chunks is made smaller in the same ways, its preamble kept whole, as packets'
preambles are. With random among the presses, the last column says what a press adds to the divergence of whole packets,
by what as many tokens left out at random add, with a 95 % interval over all questions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpacket_rag.cli.output import table
from kvpacket_rag.datasets import open_dataset
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.evaluation.bootstrap import estimate
from kvpacket_rag.evaluation.plots import plot_frontier
from kvpacket_rag.evaluation.questions import PromptSettings
from kvpacket_rag.evaluation.records import Record, RecordFile
from kvpacket_rag.evaluation.results import MEAN, Row, summarise
from kvpacket_rag.evaluation.run import Evaluation, RunProgress, Variant

RATIOS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
SCHEMES = ("none", "int8", "k8v4", "int4")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["niah"], help="as for 'kvpacket eval'")
    parser.add_argument("--limit", type=int, default=40, help="questions of each data set")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="share of tokens removed")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help="ways to quantise")
    parser.add_argument("--presses", nargs="+", default=["reread"], help="what chooses the tokens to remove")
    parser.add_argument("--single", action="store_true", help="also a single cache of all chunks")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--max-chunks", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True, help="folder of records and the picture")
    return parser.parse_args()


def curves_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name of a line to the methods on it, from nothing removed to most."""
    curves: dict[str, list[str]] = {}
    for base in ("packet", "single") if args.single else ("packet",):
        for press in args.presses:
            for scheme in args.schemes:
                bits = "" if scheme == "none" else f"+{scheme}"
                names = [f"{base}@{press}-{ratio:g}{bits}" if ratio else f"{base}@{scheme}" for ratio in args.ratios]
                curves[f"{base}, {press}, {scheme}"] = names
    return curves


def measured(args: argparse.Namespace, methods: Sequence[str]) -> Iterator[Record]:
    """Records of all data sets."""
    engine = KVPacketEngine.load(args.model, adapter=args.adapter)
    variants = [Variant(name, name, engine.encoder.adapter) for name in ("full", "plain", *methods)]
    evaluation = Evaluation(engine.backbone, variants, RecordFile(args.out / "records.jsonl"))
    settings = PromptSettings(
        max_chunks=args.max_chunks, chunk_tokens=args.chunk_tokens, max_new_tokens=args.max_new_tokens
    )

    def tell(progress: RunProgress) -> None:
        print(f"{progress.data}: {progress.done} of {progress.total}, {progress.seconds:.0f} s", flush=True)

    for data in args.data:
        samples = open_dataset(data, "dev", limit=args.limit)
        yield from evaluation.run(data, samples, settings, tell).records


def main() -> None:
    """Measure, print, draw."""
    args = read_arguments()
    curves = curves_of(args)
    methods = list(dict.fromkeys(name for names in curves.values() for name in names))
    records = list(measured(args, methods))
    rows = summarise(records)
    part = MEAN if len(args.data) > 1 else rows[0]["part"]
    by_method = {row["method"]: row for row in rows if row["part"] == part}
    header = ["method", "n", "F1", "KL", "KL / plain's", "bytes a token", "added / random's"]
    against = {method: _against_chance(method, records) for method in by_method}
    print(table(header, [[*_cells(row, by_method), against[method]] for method, row in by_method.items()]))
    lines = {name: [by_method[method] for method in names] for name, names in curves.items()}
    plot_frontier(lines, args.out / "frontier.png")


def _cells(row: Row, by_method: dict[str, Row]) -> list[str]:
    share = row["kl"] / by_method["plain"]["kl"]
    figures = f"{row['f1']:.3f}", f"{row['kl']:.4f}", f"{share:.3f}", f"{row['bytes_per_token']:,.0f}"
    return [row["method"], str(row["n"]), *figures]


def _against_chance(method: str, records: Sequence[Record]) -> str:
    """Divergence added to that of whole packets, by what the same share left out at random adds."""
    base, _, size = method.partition("@")
    press, _, rest = size.partition("-")
    kl: dict[str, dict[tuple[str, str], float]] = {}
    for record in records:
        kl.setdefault(record.method, {})[record.data, record.sample_id] = record.kl
    whole, chance = f"{base}@none", f"{base}@random-{rest}"
    if press == "random" or whole not in kl or chance not in kl or not rest:
        return ""
    columns = [[kl[name][question] for question in kl[whole]] for name in (method, chance, whole)]
    found = estimate(lambda ours, theirs, none: (ours - none).sum(-1) / (theirs - none).sum(-1), *columns)
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


if __name__ == "__main__":
    main()
