"""Clients that leave, do not read, come all at once or meet a failure: no worker is lost and no text is logged."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from conftest import CHUNKS
from server_samples import Gate, Served, eventually, gate_fixture, rag_fixture, serving  # noqa: F401

from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import DeviceError, StoreError
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.serving.server.backend import EngineBackend

SECRET = "Zanzibar marmalade"
CHAT = [{"role": "user", "content": f"{CHUNKS[1]}\n\n{SECRET}?"}]
BODY = {"model": "tiny", "messages": CHAT, "max_tokens": 1000, "temperature": 0}


def connect(served: Served, body: dict[str, Any]) -> socket.socket:
    """A connection on which a chat was asked for; nothing of the answer is read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(place(served))
    connection.sendall(head("/v1/chat/completions", len(content)) + content)
    return connection


def place(served: Served) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


def head(path: str, length: int) -> bytes:
    kind = "Content-Type: application/json"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {length}\r\n\r\n".encode()


def contexts(engine: KVPacketEngine, patch: pytest.MonkeyPatch) -> list[Any]:
    """The contexts that requests have taken from the pool and not given back."""
    pool, held = engine.backbone.pool, list[Any]()
    take, give = pool.take, pool.give_back
    patch.setattr(pool, "take", lambda *a, **k: held.append(context := take(*a, **k)) or context)
    patch.setattr(pool, "take_filled", lambda *_: None)
    patch.setattr(pool, "give_back", lambda context: (held.remove(context), give(context))[1])
    return held


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_answer_and_gives_context_and_packets_back(
    rag: KVPacketRAG, gate: Gate, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    held = contexts(rag.engine, monkeypatch)
    with serving(EngineBackend(rag.engine, rag, threads=1)) as served:
        connection = connect(served, BODY | {"stream": stream})
        eventually(lambda: gate.steps == 1)
        assert len(held) == 1
        connection.close()
        time.sleep(0.2)  # until the server has seen it
        gate.open()
        eventually(lambda: not held)
        assert gate.steps < 5
        assert served.chat().status_code == 200
        left = 'kvpacket_requests_total{route="/v1/chat/completions",status="499"} 1.0'
        eventually(lambda: left in served.http.get("/metrics").text)


def test_a_stream_that_is_closed_while_its_text_is_held_back_stops_there(
    engine: KVPacketEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine.backbone, "decode", lambda _: "\ufffd")  # an unfinished character, for ever
    stream = engine.stream("So", GenerationSettings(max_new_tokens=50))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, stream)
        eventually(lambda: gate.steps == 1)
        stream.close()
        gate.open()
        assert reading.result(10) == [] and gate.steps == 1


def test_a_client_that_leaves_while_it_waits_is_not_answered_at_all(engine: KVPacketEngine, gate: Gate):
    with serving(EngineBackend(engine, threads=1)) as served:
        first, second = connect(served, BODY | {"max_tokens": 3}), connect(served, BODY)
        eventually(lambda: gate.steps == 1)
        second.close()
        time.sleep(0.2)
        gate.open()
        assert served.chat(max_tokens=1).status_code == 200
        assert gate.steps == 2  # those of the first answer's second and third token
        first.close()


def test_a_client_that_does_not_read_keeps_no_worker_and_is_given_up(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvpacket_rag.serving.server.replies.Reply.piece", lambda *_: b"x" * 2**20)
    left = 'kvpacket_requests_total{route="/v1/chat/completions",status="499"} 1.0'
    body = BODY | {"stream": True, "max_tokens": 40}
    with serving(EngineBackend(engine, threads=1), send_seconds=3) as served, connect(served, body):
        assert served.chat().status_code == 200
        assert left not in served.http.get("/metrics").text  # it waits still, and the one worker was free
        eventually(lambda: left in served.http.get("/metrics").text)


def test_a_body_that_does_not_come_is_given_up(engine: KVPacketEngine):
    with serving(EngineBackend(engine), body_seconds=0.3) as served, socket.create_connection(place(served)) as slow:
        slow.sendall(head("/v1/completions", 50) + b"{")
        assert b" 408 " in slow.recv(100)


def test_requests_beyond_the_places_are_turned_away_and_may_come_again(engine: KVPacketEngine, gate: Gate):
    with serving(EngineBackend(engine, threads=1), max_requests=2) as served, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(served.chat) for _ in range(2)]
        eventually(lambda: gate.steps == 1)
        eventually(lambda: served.chat().status_code == 429)
        response = served.chat()
        assert response.json()["error"]["type"] == "rate_limit_error" and int(response.headers["retry-after"]) > 0
        assert served.http.get("/healthz").status_code == 200
        threading.Timer(0.3, gate.open).start()
        patient = served.openai.with_options(max_retries=4)  # the official client comes again by itself
        messages: Any = CHAT
        assert patient.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices
        assert [answer.result().status_code for answer in running] == [200, 200]


def test_an_error_on_the_way_is_an_event_without_an_end_and_the_next_request_is_answered(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    step, calls = engine.backbone.step, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 20:
            raise RuntimeError(f"the text {SECRET} stands in an error")
        return step(*arguments)

    monkeypatch.setattr(engine.backbone, "step", failing)
    with serving(EngineBackend(engine, threads=1)) as served, caplog.at_level(logging.INFO):
        messages: Any = CHAT
        stream = served.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=100, stream=True)
        with pytest.raises(openai.APIError, match="its log says where"):
            list(stream)
        assert served.chat().status_code == 200
    assert "RuntimeError at " in caplog.text and SECRET not in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError(SECRET), 500), (StoreError("/srv/index cannot be read"), 503), (DeviceError("memory ran out"), 503)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_a_status_and_tells_nothing_of_this_machine(
    engine: KVPacketEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    stream: bool,
):
    def failing(*_: Any) -> Any:
        raise error

    with serving(EngineBackend(engine, threads=1)) as served, caplog.at_level(logging.INFO):
        with monkeypatch.context() as patch:
            patch.setattr(engine._prefiller, "run", failing)
            response = served.chat(messages=CHAT, stream=stream)
        assert response.status_code == status and str(error) not in response.text
        assert ("retry-after" in response.headers) == (status == 503)
        assert served.chat().status_code == 200
    assert SECRET not in caplog.text and response.headers["x-request-id"] in caplog.text


def test_logs_carry_ids_and_counts_and_no_text(rag: KVPacketRAG, caplog: pytest.LogCaptureFixture):
    with serving(EngineBackend(rag.engine, rag)) as served, caplog.at_level(logging.DEBUG, "kvpacket_rag"):
        response = served.chat(messages=CHAT, retrieve=True)
        answer = response.json()["choices"][0]["message"]["content"]
        served.chat(messages=CHAT, **{SECRET: 1})
        served.http.post(f"/v1/models/{SECRET}")
    assert response.headers["x-request-id"] in caplog.text and "prompt tokens were cached" in caplog.text
    told = [record.getMessage() for record in caplog.records if record.name.startswith("kvpacket_rag")]
    assert told and not any(text in line for line in told for text in (SECRET, "Marlow", answer))


def test_many_clients_at_once_get_the_answers_they_would_get_alone(rag: KVPacketRAG):
    questions = [f"{chunk}\n\nQuestion {number}?" for number, chunk in enumerate(CHUNKS * 4)]
    with serving(EngineBackend(rag.engine, rag, threads=4)) as served, ThreadPoolExecutor(16) as pool:

        def text(question: str) -> str:
            messages, retrieve = [{"role": "user", "content": question}], {"k": len(question) % 3 + 1}
            found = served.chat(messages=messages, max_tokens=10, retrieve=retrieve).json()
            return str(found["choices"][0]["message"]["content"])

        assert list(pool.map(text, questions)) == [text(question) for question in questions]


def test_an_answer_that_runs_when_the_server_is_stopped_is_finished(engine: KVPacketEngine, gate: Gate):
    with serving(EngineBackend(engine, threads=1)) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.chat)
        eventually(lambda: gate.steps == 1)
        served.server.should_exit = True
        eventually(lambda: not listens(served))
        gate.open()
        assert answer.result(10).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_outlasts_the_time_of_grace_is_told_so(engine: KVPacketEngine, gate: Gate, stream: bool):
    gate.open()
    with serving(EngineBackend(engine, threads=1), grace=1) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.chat, max_tokens=1500, stream=stream)
        eventually(lambda: gate.steps > 20)
        gate.shut()
        served.server.should_exit = True
        response: httpx.Response = answer.result(10)
        gate.open()
    assert "stopped before the answer was complete" in response.text and "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 503)


def listens(served: Served) -> bool:
    try:
        socket.create_connection(place(served), 1).close()
    except OSError:
        return False
    return True
