"""A real server on a free port, over the tiny model, for tests of what clients see."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from conftest import CHUNKS
from openai import OpenAI
from pipeline_samples import documents, pipeline
from starlette.applications import Starlette

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.serving.server.app import ServerSettings, create_app
from kvpacket_rag.serving.server.backend import Backend, EngineBackend
from kvpacket_rag.serving.server.calls import Limits

LIMITS = Limits(("tiny",), messages=50, max_tokens=12)


class Served:
    """A server that runs in a thread of its own.

    Attributes:
        url: without ``/v1``.
        http: a client for requests by hand.
        openai: the official client, which does not ask again by itself.
    """

    def __init__(self, url: str, server: uvicorn.Server) -> None:
        self.url = url
        self.server = server
        self.http = httpx.Client(base_url=url, timeout=20)
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)

    def chat(self, **more: Any) -> httpx.Response:
        """A chat by hand."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Who signed it?"}], "max_tokens": 4}
        return self.http.post("/v1/chat/completions", json=body | more)

    def close(self) -> None:
        """Close the clients."""
        self.http.close()
        self.openai.close()


@contextlib.contextmanager
def serving(backend: Backend, grace: int = 5, **settings: Any) -> Iterator[Served]:
    """Our server over a backend."""
    with running(create_app(backend, ServerSettings(settings.pop("limits", LIMITS), **settings)), grace) as served:
        yield served


@contextlib.contextmanager
def running(app: Starlette, grace: int = 5) -> Iterator[Served]:
    """An application, stopped in the end as a signal stops it."""
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=grace)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started)
        served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", server)
        try:
            yield served
        finally:
            served.close()
            server.should_exit = True
            thread.join(grace + 10)
            assert not thread.is_alive()


def eventually(holds: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)


@pytest.fixture(name="rag")
def rag_fixture(backbone: Backbone, tmp_path: Path) -> Iterator[KVPacketRAG]:
    """The tiny model over an index of four documents."""
    with pipeline(backbone, tmp_path / "index") as rag:
        rag.add(documents(CHUNKS))
        yield rag


@pytest.fixture(name="served")
def served_fixture(rag: KVPacketRAG) -> Iterator[Served]:
    """A server over it."""
    with serving(EngineBackend(rag.engine, rag, threads=2)) as served:
        yield served


class Gate:
    """Holds the model back at every token but the first until it is opened; counts its steps."""

    def __init__(self, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self._open = threading.Event()
        step = backbone.step

        def gated(*arguments: Any) -> Any:
            self.steps += 1
            assert self._open.wait(20)
            return step(*arguments)

        monkeypatch.setattr(backbone, "step", gated)

    def open(self) -> None:
        """Let it go on."""
        self._open.set()

    def shut(self) -> None:
        """Hold it at its next token."""
        self._open.clear()


@pytest.fixture(name="gate")
def gate_fixture(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before the tiny model's steps; open in the end, so that no thread stays behind it."""
    gate = Gate(backbone, monkeypatch)
    yield gate
    gate.open()
