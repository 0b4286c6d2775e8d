"""Several processes share one store on disk, and any of them may be killed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from test_store import SIGNATURE, closing, make_packet, same, stored_bytes  # noqa: F401 (closing is a fixture)

from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore
from kvpacket_rag.store.folder import StoreFolder

PRELUDE = """
import os, random, signal, sys, time
from pathlib import Path
from test_store import SIGNATURE, make_packet, same
from test_store_processes import put_all
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore
"""

KILL_ROUNDS = """
for round in range(10):
    child = os.fork()
    if child == 0:
        store, chance = DiskStore(sys.argv[1]), random.Random(round)
        while True:
            seed = chance.randrange(40)
            store.put(make_packet(seed), f"text {seed}", f"owner {seed}")
            store.drop_owners([f"owner {chance.randrange(40)}"])
    time.sleep(random.Random(round).uniform(0.05, 0.4))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = DiskStore(sys.argv[1])
    known = list(store.known(SIGNATURE))
    for chunk in known:
        assert chunk.packet_id in store
        assert same(store.get(chunk.packet_id, SIGNATURE), make_packet(int(chunk.text.split()[1])))
    print(len(known), store.revision())
    assert len(known) == len(store) == sum(path.is_file() for path in Path(sys.argv[1], "packets").rglob("*"))
    store.close()
"""

PUT_ALL = """
store = DiskStore(sys.argv[1], int(sys.argv[2]) or None)
print("ready", flush=True)
put_all(store, "theirs")
store.close()
"""

PUT_AND_DROP = """
store = DiskStore(sys.argv[1])
put_all(store, "theirs")
assert packet_id([99], SIGNATURE) in store
store.drop_owners(["mine"])
store.close()
"""


def put_all(store: DiskStore, owner: str) -> None:
    for seed in random.Random(owner).sample(range(30), 30):
        store.put(make_packet(seed), f"text {seed}", f"{owner} {seed}")


def start(script: str, *arguments: object, hash_seed: str = "random") -> subprocess.Popen[str]:
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONWARNINGS": "ignore",  # of forking: the output is read
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
    }
    command = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"


def bytes_of_files(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def packet_bytes() -> int:
    return stored_bytes("disk", make_packet(0))


def test_processes_with_different_hash_seeds_share_one_store(tmp_path: Path) -> None:
    mine, dropped = DiskStore(tmp_path), packet_id([99], SIGNATURE)
    mine.put(make_packet(99), "text 99", "mine")
    mine.get(dropped, SIGNATURE)
    before = mine.revision()
    finish(start(PUT_AND_DROP, tmp_path, hash_seed="1"))
    assert mine.revision() != before
    assert all(same(mine.get(packet_id([seed], SIGNATURE), SIGNATURE), make_packet(seed)) for seed in range(30))
    assert dropped not in mine and dropped not in {chunk.packet_id for chunk in mine.known(SIGNATURE)}


def test_processes_that_put_the_same_packets_at_once_make_one_file_each(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path), start(PUT_ALL, tmp_path, 0)
    await_ready(other)
    put_all(store, "mine")
    finish(other)
    assert len(store) == sum(path.is_file() for path in (tmp_path / "packets").rglob("*")) == 30
    assert store.drop_owners(f"theirs {seed}" for seed in range(30)) == []
    assert len(store.drop_owners(f"mine {seed}" for seed in range(30))) == 30


def test_the_byte_cap_holds_with_several_processes(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, max_bytes=20_000), start(PUT_ALL, tmp_path, 20_000)
    await_ready(other)
    while other.poll() is None:
        put_all(store, "mine")
        with store._catalogue.transaction():  # while nobody writes: amid writes, what goes and what comes both count
            assert bytes_of_files(tmp_path / "packets") <= 20_000
        assert store.size_bytes <= 20_000
    finish(other)
    assert len(store) == 20_000 // packet_bytes()


def test_a_writer_killed_at_any_moment_leaves_only_whole_packets(tmp_path: Path) -> None:
    counts = [int(line.split()[0]) for line in finish(start(KILL_ROUNDS, tmp_path)).splitlines()]
    assert len(counts) == 10 and len(set(counts)) > 2


def test_a_deletion_cut_off_half_way_leaves_no_text_and_a_file_to_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)
    store.put(make_packet(1), "text", "owner")
    (file,) = (tmp_path / "packets").rglob("*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, "remove", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.drop_owners(["owner"])
    assert (len(store), packet_id([1], SIGNATURE) in store, list(store.known(SIGNATURE))) == (0, False, [])
    DiskStore(tmp_path)
    assert not file.exists()
