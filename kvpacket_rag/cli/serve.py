"""``kvpacket serve``."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpacket_rag.cli.options import (
    add_embedder,
    add_engine,
    add_index,
    add_remote,
    open_index,
    positive,
    require_index,
)
from kvpacket_rag.cli.output import say
from kvpacket_rag.errors import KVPacketError, MissingExtraError
from kvpacket_rag.namespace import namespace_folder

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from kvpacket_rag.pipeline import KVPacketRAG
    from kvpacket_rag.serving.server.backend import Backend

SUMMARY = "answer over HTTP as OpenAI's API does"
DESCRIPTION = (
    "Serves /v1/chat/completions, /v1/completions and /v1/models over an index: chunks that the index knows come from "
    "packets wherever a prompt holds their text, and 'retrieve' in a request looks for them first."
)
_BACKEND_KEY = "KVPACKET_BACKEND_API_KEY"
_KEY = "KVPACKET_API_KEY"  # an argument of a command is seen by everybody on the machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Index, address, limits and model."""
    add_index(parser)
    parser.add_argument(
        "--host", metavar="NAME", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=8000, help="port to listen on, 0 for any (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help=f"file of keys that clients may use, one a line (default: the one in {_KEY}, or no key)",
    )
    parser.add_argument(
        "--allowed-host",
        metavar="NAME",
        action="append",
        default=[],
        help="name by which clients may address a server without a key on this machine, beside localhost",
    )
    parser.add_argument("--name", metavar="NAME", help="of the model in requests (default: that of the index)")
    parser.add_argument("--namespace", metavar="NAME", default="", help="whose index it is (default: the folder's own)")
    _add_limits(parser.add_argument_group("limits"))
    parser.add_argument(
        "--backend",
        metavar="vllm=URL",
        type=_vllm_url,
        help="let a vLLM write the answers whose connector reads this index "
        f"(its key, if it asks for one, in {_BACKEND_KEY}); the model is loaded here, too, to encode what is missing",
    )
    model = parser.add_argument_group("model")
    add_engine(model)
    add_embedder(model)
    add_remote(model)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    for name, default, told in (
        ("--max-running", 4, "answers written at a time"),
        ("--max-waiting", 32, "requests waiting for one of them; further ones are turned away with status 429"),
        ("--max-tokens", 512, "tokens of a chat's answer where a request sets no limit"),
        ("--max-messages", 1024, "messages of a chat"),
        ("--max-body", 4, "megabytes of a request"),
        ("--grace", 30, "seconds that running answers get when the server is told to stop"),
    ):
        group.add_argument(name, metavar="N", type=positive, default=default, help=f"{told} (default: %(default)s)")
    group.add_argument(
        "--policy",
        choices=("packets", "prefill", "auto"),
        default="packets",
        help="how prompts are read where a request does not say (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Serve until told to stop."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise MissingExtraError(f"serving needs {error.name}; pip install 'kvpacket-rag[serve]'") from error
    if args.backend and args.policy == "auto":
        args.usage("--policy auto is measured for the engine itself; choose packets or prefill for --backend")
    keys = read_keys(args.api_key_file)
    require_index(namespace_folder(args.index, args.namespace))
    with _bind(args.host, args.port) as listener, open_index(args, args.index, namespace=args.namespace) as rag:
        app = build(args, rag, keys)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=args.grace
        )
        _log()
        host, port = listener.getsockname()[:2]
        say(f"serving {name_of(args, rag)} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        if not keys and not _is_loopback(args.host):
            say(f"warning: everybody who reaches {args.host} may ask and retrieve; set {_KEY} or --api-key-file")
        before = signal.signal(signal.SIGTERM, _end)  # comes back to us when the server is done with it
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)


def build(args: argparse.Namespace, rag: KVPacketRAG, keys: tuple[str, ...]) -> Starlette:
    """The application as the arguments say."""
    from kvpacket_rag.serving.server.app import ServerSettings, create_app
    from kvpacket_rag.serving.server.calls import Limits
    from kvpacket_rag.serving.server.metrics import ServerMetrics
    from kvpacket_rag.store.prometheus import StoreCollector

    metrics = ServerMetrics()
    StoreCollector({args.namespace or "index": rag.engine.store}, metrics.registry)
    own_hosts = ("localhost", "127.0.0.1", "::1", args.host, *args.allowed_host)
    settings = ServerSettings(
        Limits((name_of(args, rag),), args.max_messages, args.max_tokens, args.policy),
        keys=keys,
        hosts=() if keys or not _is_loopback(args.host) else own_hosts,
        max_requests=args.max_running + args.max_waiting,
        max_body_bytes=args.max_body * 2**20,
    )
    return create_app(_backend(args, rag), settings, metrics)


def _backend(args: argparse.Namespace, rag: KVPacketRAG) -> Backend:
    if args.backend is None:
        from kvpacket_rag.serving.server.backend import EngineBackend

        return EngineBackend(rag.engine, rag, args.max_running)
    from kvpacket_rag.serving.server.vllm_backend import VLLMAddress, VLLMBackend

    address = VLLMAddress(args.backend, os.environ.get(_BACKEND_KEY, ""))
    return VLLMBackend(rag.engine, rag, address, address.find_model(), args.max_running)


def _vllm_url(text: str) -> str:
    """The address in ``vllm=URL``."""
    kind, _, url = text.partition("=")
    if kind != "vllm" or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no backend; expected vllm=http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def name_of(args: argparse.Namespace, rag: KVPacketRAG) -> str:
    """What requests call the model; never a folder of this machine."""
    name: str = args.name or rag.engine.model_name
    return Path(name).name if os.path.isabs(name) else name


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Keys of a file, or the one of the environment.

    Raises:
        KVPacketError: the file holds none, or one that no header can carry.
    """
    lines = file.read_text("utf-8").splitlines() if file else [os.environ.get(_KEY, "")]
    keys = tuple(key for line in lines if (key := line.strip()))
    if file and not keys:
        raise KVPacketError(f"{file} holds no key; write one a line, or leave --api-key-file out")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise KVPacketError("an API key holds white space or signs other than ASCII's; make keys of letters and digits")
    return keys


def _bind(host: str, port: int) -> socket.socket:
    """The address, taken before the model is loaded; it listens once that is done."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise KVPacketError(
            f"cannot listen on {host} port {port}: {error}; name others by --host and --port"
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _log() -> None:
    """Ids and counts of requests to standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in ("kvpacket_rag", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)


def _end(*_: object) -> None:
    raise SystemExit(0)
