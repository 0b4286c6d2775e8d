"""The command line: one small module a command, none of which loads the library before it runs."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence

import kvpacket_rag
from kvpacket_rag.cli import (
    ask,
    average,
    bench,
    check,
    delete,
    demo,
    estimate,
    import_adapter,
    ingest,
    inspect,
    serve,
    train,
    verify,
    vllm_card,
)
from kvpacket_rag.cli import eval as evaluate
from kvpacket_rag.errors import KVPacketError

_COMMANDS = {
    "demo": demo,
    "ingest": ingest,
    "estimate": estimate,
    "ask": ask,
    "serve": serve,
    "vllm-card": vllm_card,
    "delete": delete,
    "train": train,
    "average": average,
    "verify": verify,
    "inspect": inspect,
    "check": check,
    "import-adapter": import_adapter,
    "eval": evaluate,
    "bench": bench,
}
_INTERRUPTED = 130  # what shells report of a program ended by Ctrl-C
_CLOSED_PIPE = 141  # and of one whose reader went away


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="kvpacket",
        description="Answers from documents whose keys and values were computed once: no chunk is read twice.",
        epilog="'kvpacket COMMAND --help' tells the options of a command. Results go to standard output, progress "
        "and messages to standard error.",
    )
    parser.add_argument("--version", action="version", version=f"kvpacket-rag {kvpacket_rag.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION)
        command.add_argument("--debug", action="store_true", help="show where an error comes from")
        module.add_arguments(command)
        command.set_defaults(run=module.run, usage=command.error)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 after an error, 3 where ``verify`` finds packets unfit or ``check`` something wrong, 130 when interrupted,
        141 when whoever read the output went away. Wrong usage exits with 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sign the terminal cannot show is no reason to stop
    args = build_parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()  # here, so that a closed pipe is noticed here
    except KeyboardInterrupt:
        print("kvpacket: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it exits
        return _CLOSED_PIPE
    except (KVPacketError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        print(f"kvpacket: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return int(code or 0)
