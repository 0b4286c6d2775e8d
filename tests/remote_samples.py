"""Object stores for tests: a folder, memory, and a real S3 server that can be killed and started again."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import obstore.exceptions
import obstore.store
import pytest

from kvpacket_rag.store import RemoteStore

REMOTE_KINDS = ["file", "object memory", pytest.param("s3", marks=pytest.mark.scale)]
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_BUCKET = "packets"


def open_remote(kind: str, folder: Path, **options: Any) -> RemoteStore:
    """A store of its own in an object store of that kind."""
    if kind == "object memory":
        return RemoteStore("memory:///", folder / "cache", backend=obstore.store.MemoryStore(), **options)
    url = f"file://{folder}/objects" if kind == "file" else s3().url()
    return RemoteStore(url, folder / "cache", **options)


class S3:
    """SeaweedFS in processes of its own, with one bucket; its keys are in the environment of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, *self._others = _free_ports(5)
        identity = {"name": "tests", "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        keys = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
        (folder / "keys.json").write_text(json.dumps({"identities": [{**identity, "credentials": [keys]}]}))
        os.environ.update(KEYS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{self._port}")
        self._root = obstore.store.from_url(
            f"s3://{_BUCKET}", client_options={"allow_http": True}, retry_config={"max_retries": 0}
        )
        self._start(self._make_bucket)

    def url(self) -> str:
        """A place that nobody else uses."""
        return f"s3://{_BUCKET}/{uuid.uuid4().hex}"

    def start(self) -> None:
        """Start it over what it stored before, and wait until it reads that."""
        self._start(lambda: obstore.get(self._root, "probe").bytes())

    def kill(self) -> None:
        """Without a chance to end anything."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _make_bucket(self) -> None:
        url = obstore.sign(self._root, "PUT", "", timedelta(minutes=5))
        urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
        obstore.put(self._root, "probe", b"here")

    def _start(self, check: Callable[[], object]) -> None:
        names = ("-master.port", "-volume.port", "-filer.port", "-s3.port.grpc")
        ports = [f"{name}={port}" for name, port in zip(names, self._others, strict=True)]
        fixed = ["-ip=127.0.0.1", "-filer", "-s3", "-master.volumeSizeLimitMB=64", "-volume.max=30"]
        with open(self._folder / "log", "ab") as log:
            program = [Path(sys.executable).with_name("weed"), "server", f"-dir={self._folder}"]
            own = [f"-s3.port={self._port}", f"-s3.config={self._folder / 'keys.json'}"]
            self._process = subprocess.Popen([*program, *own, *fixed, *ports], stdout=log, stderr=log)
        for _ in range(240):
            try:
                check()
                return
            except (obstore.exceptions.BaseError, OSError):
                time.sleep(0.25)
        raise RuntimeError(f"no S3 server after a minute: {(self._folder / 'log').read_text()[-2000:]}")


@functools.cache
def s3() -> S3:
    """The server of this test run."""
    folder = Path(tempfile.mkdtemp(prefix="kvpacket-s3-"))
    server = S3(folder)

    def stop() -> None:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return server


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
