"""Engines whose packets a real vLLM serves: what to ask, what the engine answers, and vLLM itself, as a program.

vLLM lives in an environment of its own, whose Python ``KVPACKET_VLLM_PYTHON`` names; ``make test-scale`` makes one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.demo import corpus_folder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.models import resolve_model
from kvpacket_rag.serving.vllm_prompt import VLLMPrompt, VLLMPrompter
from kvpacket_rag.store import DiskStore, PacketStore

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(os.environ.get("KVPACKET_VLLM_PYTHON", ROOT / ".venv-scale" / "vllm" / "bin" / "python"))
ANSWER = GenerationSettings(max_new_tokens=24)
CONNECTOR = "kvpacket_rag.serving.vllm"
SMALL = "smollm2-135m-instruct"
_QUESTIONS = (
    "Explain in three long sentences what these documents say.",
    "List every number that the documents mention, and what each of them stands for.",
    "Write a letter to a new colleague about all of this.",
)
_SETS = ((0, 1, 2, 3), (4, 5), (6,))  # sections of the corpus, of unequal length
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 8}',  # a replica takes one and waits for it
    "RAY_USAGE_STATS_ENABLED": "0",
}


def sections() -> list[str]:
    """Of the demo's corpus."""
    texts = [(corpus_folder() / f"{name}.md").read_text() for name in ("manual_firmware_update", "handbook_travel")]
    return [section.strip() for text in texts for section in text.split("\n## ")]


@dataclass
class World:
    """An engine over a folder, and what vLLM needs to serve its packets.

    Attributes:
        engine: over ``folder / "store"``.
        folder: for store, card, jobs and answers.
        model: folder of the model.
        prompts: what is asked.
        settings: further ones of the connector, or others.
    """

    engine: KVPacketEngine
    folder: Path
    model: Path
    prompts: Sequence[list[Message]]
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompter = VLLMPrompter(self.engine)
        self.prompter.card.save(self.folder / "card.json")

    @property
    def dtype(self) -> str:
        """Of model and packets."""
        return self.engine.signature.dtype

    @property
    def connector(self) -> dict[str, Any]:
        """Settings of the connector."""
        return {"card": str(self.folder / "card.json"), "store": str(self.folder / "store")} | self.settings

    @cached_property
    def cut(self) -> list[VLLMPrompt]:
        """The prompts as vLLM takes them; every chunk has to come from a packet."""
        cut = [self.prompter.prompt(prompt) for prompt in self.prompts]
        assert all(prompt.claim and not prompt.misses for prompt in cut)
        return cut

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        """One a prompt."""
        return [prompt.body() | {"sampling": {"max_tokens": ANSWER.max_new_tokens}} for prompt in self.cut]

    @cached_property
    def expected(self) -> list[list[int]]:
        """Tokens of the engine's own answers, all from packets."""
        answers = [self.engine.generate(prompt, ANSWER) for prompt in self.prompts]
        assert not any(answer.usage.misses for answer in answers) and all(a.usage.chunks_reused for a in answers)
        return [list(answer.token_ids) for answer in answers]

    def run(self, rounds: Sequence[dict[str, Any]], *, async_load: bool = False, **llm: Any) -> dict[str, Any]:
        """Rounds of requests through vLLM's Python API; see ``benchmarks/vllm_offline.py``."""
        require_vllm()
        connector = self.connector | {"async_load": async_load}
        job = {"llm": {"model": str(self.model), "dtype": self.dtype} | llm, "connector": connector, "rounds": rounds}
        given, got = self.folder / "job.json", self.folder / "answers.json"
        given.write_text(json.dumps(job))
        got.unlink(missing_ok=True)
        command = [str(PYTHON), "-P", str(ROOT / "benchmarks" / "vllm_offline.py"), str(given), str(got)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=os.environ | _ENVIRONMENT)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads(got.read_text()) | {"log": done.stdout + done.stderr}


def smollm2(folder: Path) -> World:
    """SmolLM2 with the adapter that ships, which leaves no soft tokens in packets; in float32."""
    engine = KVPacketEngine.load(SMALL, store=folder / "store", dtype="float32")
    texts = sections()
    engine.encode(texts)
    return World(engine, folder, Path(resolve_model(SMALL)), chats(texts))


def tiny(folder: Path, model: Any, tokenizer: Any, store: PacketStore | None = None, **engine_options: Any) -> World:
    """A random model with soft tokens before and behind every chunk, over a copy of it that vLLM can read."""
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    backbone = Backbone(model, tokenizer, "tiny")
    adapter = Adapter.random(backbone.embed(range(500)), 3, 2, seed=1)
    engine = KVPacketEngine(
        backbone, DiskStore(folder / "store") if store is None else store, adapter, **engine_options
    )
    texts = sections()
    engine.encode(texts)
    return World(engine, folder, folder / "model", chats(texts))


def bad_requests(world: World, good: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A good request, spoilt in every way that has to be refused."""
    params, sampling = good["kv_transfer_params"], good["sampling"]
    text = "A chunk that was deleted after the prompt was made, in twelve or more tokens of text."
    (name,) = world.engine.encode([text])
    deleted = world.prompter.prompt(f"{text}\n\nWhat was deleted?").body() | {"sampling": sampling}
    world.engine.store.delete(name)
    escaping = {"kvpacket": params["kvpacket"] | {"packets": [["../../../etc/passwd", 40]]}}
    foreign = {"kvpacket": params["kvpacket"] | {"signature": "0" * 64}}
    return {
        "a packet that is not stored": deleted,
        "malformed": good | {"kv_transfer_params": {"kvpacket": {"packets": 3}}},
        "no packet id": good | {"kv_transfer_params": escaping},
        "packets of another adapter": good | {"kv_transfer_params": foreign},
        "other tokens than the packets'": good | {"prompt": [*good["prompt"][:-200], *[7] * 200]},
        "no salt": good | {"cache_salt": None},
        "the salt without the packets": good | {"kv_transfer_params": None},
        "prompt_logprobs": good | {"sampling": sampling | {"prompt_logprobs": 1}},
        "skip_reading_prefix_cache": good | {"sampling": sampling | {"skip_reading_prefix_cache": True}},
    }


def require_vllm() -> None:
    """Say what is missing."""
    assert PYTHON.exists(), (
        f"no Python with vLLM at {PYTHON}; run `make test-scale`, or name one by KVPACKET_VLLM_PYTHON"
    )


def chats(texts: Sequence[str]) -> list[list[Message]]:
    """Nine chats that hold chunks: three sets of unequal length, three questions each."""
    return [
        [
            Message("system", "Answer from the documents."),
            Message("user", "Documents:\n\n" + "\n\n".join(texts[number] for number in chosen) + f"\n\n{question}"),
        ]
        for chosen in _SETS
        for question in _QUESTIONS
    ]


def tokens_of(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Of answers that did not fail."""
    assert all(answer["finish_reason"] in ("length", "stop") for answer in answers), answers
    return [answer["token_ids"] for answer in answers]


@dataclass(frozen=True)
class Server:
    """A vLLM that answers over HTTP.

    Attributes:
        url: without a path.
        log: file of what it prints.
    """

    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a reply."""
        data = json.dumps({"model": "served"} | body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, prompt: VLLMPrompt, **fields: Any) -> tuple[int, dict[str, Any]]:
        """A completion of up to as many tokens as the engine's."""
        wanted = {"temperature": 0, "max_tokens": ANSWER.max_new_tokens, "return_token_ids": True}
        return self.post("/v1/completions", prompt.body() | wanted | fields)

    def metric(self, name: str) -> float:
        """Sum of a counter's values."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


@contextmanager
def serving(world: World, *arguments: str, async_load: bool = False) -> Iterator[Server]:
    """Start vLLM's OpenAI-compatible server over a world's packets, and end it."""
    port = _free_port()
    config = {"kv_connector": "KVPacketConnector", "kv_connector_module_path": CONNECTOR, "kv_role": "kv_both"}
    config |= {"kv_connector_extra_config": world.connector | {"async_load": async_load}}
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(world.model)]
    command += ["--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port), "--dtype", world.dtype]
    command += ["--enforce-eager", "--max-model-len", "2048", "--block-size", "32"]
    command += ["--kv-transfer-config", json.dumps(config), *arguments]
    with _running(command, Server(f"http://127.0.0.1:{port}", world.folder / "server.log")) as server:
        yield server


@contextmanager
def serving_replicas(world: World, num_replicas: int) -> Iterator[Server]:
    """Start replicas of vLLM in a Ray cluster of their own, and end both."""
    port = _free_port()
    args = world.connector | {"model": str(world.model), "num_replicas": num_replicas, "cpus": 1}
    args["engine"] = {"enforce_eager": True, "block_size": 32}
    application = {"import_path": "kvpacket_rag.serving.ray_serve:app", "args": args}
    config = world.folder / "replicas.yaml"
    config.write_text(json.dumps({"http_options": {"port": port}, "applications": [application]}))
    command = [str(PYTHON.with_name("serve")), "run", "--address", "local", str(config)]
    with _running(command, Server(f"http://127.0.0.1:{port}", world.folder / "server.log")) as server:
        yield server


@contextmanager
def _running(command: list[str], server: Server) -> Iterator[Server]:
    """A program while it answers, from its own environment."""
    require_vllm()
    own = os.environ | _ENVIRONMENT | {"PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"}
    with open(server.log, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=own)
    try:
        _wait(process, server)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], server: Server) -> None:
    for _ in range(900):
        assert process.poll() is None, server.log.read_text()[-6000:]
        try:
            urllib.request.urlopen(f"{server.url}/v1/models", timeout=2).close()
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError(server.log.read_text()[-6000:])
