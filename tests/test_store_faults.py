"""Disks that are full or cannot be written, and files used up: a clear error, and what was stored stays of use."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)

from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import StoreError, StoreFullError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore

PRELUDE = """
import ctypes, os, resource, sys
from pathlib import Path
import numpy as np
from test_store import SIGNATURE, make_packet, same
from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import KVPacketError, PacketCorruptError, StoreError, StoreFullError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore
root, one, other = Path(sys.argv[1]), packet_id([1], SIGNATURE), packet_id([2], SIGNATURE)

def refused(work, *words):
    try:
        work()
    except KVPacketError as error:
        assert any(word in str(error) for word in words), error
        return
    raise AssertionError("was not refused")

def give_up_rights():
    if os.getuid() == 0:  # root may write everywhere, unless it lays down its capabilities
        version_3, this_thread, none = 0x20080522, 0, (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(version_3, this_thread), none) == 0
"""

READ_ONLY = """
give_up_rights()
store = DiskStore(root)
assert same(store.get(one, SIGNATURE), make_packet(1)) and one in store and len(store) == 2
assert [chunk.text for chunk in store.known(SIGNATURE)] == ["text 1", "text 2"]
store.put(make_packet(1), "text 1")                       # is there already
refused(lambda: store.put(make_packet(3), "text 3"), "can only be read")
refused(lambda: store.delete(one), "can only be read")
refused(lambda: store.get(other, SIGNATURE), "damaged")   # and cannot be set aside
assert store.check().damaged_packets.keys() == {other}
index = PacketIndex.open(root)
assert index.search([1, 0], 2)[0].chunk.text == "one" and len(index) == 2
refused(lambda: index.delete(["c1"]), "writable", "can only be read")
index.close()
store.close()
"""

READ_ONLY_IN_PART = """
give_up_rights()
store, is_there = DiskStore(root), (root / "packets").exists()
assert (one in store) == is_there and len(store) == 2 and store.state().disorder.missing == 2 * (not is_there)
if is_there:
    assert same(store.get(one, SIGNATURE), make_packet(1))
else:
    refused(lambda: store.get(one, SIGNATURE), "is missing")
refused(lambda: DiskStore(root / "new"), "cannot be created")
"""

FOLLOWS = """
give_up_rights()
store, index = DiskStore(root), PacketIndex.open(root)
print("ready", flush=True)
sys.stdin.readline()
assert [chunk.text for chunk in store.known(SIGNATURE)] == ["text 2", "text 3"]
assert [hit.chunk.text for hit in index.search([1, 0], 9)] == ["three"]
"""

NO_FILES = """
store = DiskStore(root)
store.get(one, SIGNATURE)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
refused(lambda: store.get(one, SIGNATURE), "raise ulimit -n")
refused(lambda: store.put(make_packet(3), "text 3"), "raise ulimit -n", "(ulimit -n)")
refused(lambda: DiskStore(root), "raise ulimit -n", "(ulimit -n)")
refused(lambda: PacketIndex.open(root), "files may still be opened")
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert same(store.get(one, SIGNATURE), make_packet(1)) and packet_id([3], SIGNATURE) not in store
store.put(make_packet(3), "text 3")
assert len(store) == 3
"""

NO_ROOM = """
store = DiskStore(root)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))    # no file may grow beyond
refused(lambda: store.put(make_packet(3), "text 3"), "cannot be", "full")
assert same(store.get(one, SIGNATURE), make_packet(1)) and packet_id([3], SIGNATURE) not in store
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
store.put(make_packet(3), "text 3")
assert store.check().damaged_packets.keys() == {other} and store.check().disorder == type(store.check().disorder)()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store and an index of two; the second packet is damaged."""
    import numpy as np

    from kvpacket_rag.chunk import Chunk
    from kvpacket_rag.index import PacketIndex

    root = tmp_path / "store"
    store = DiskStore(root)
    for seed in (1, 2):
        store.put(make_packet(seed), f"text {seed}", f"owner {seed}")
    path = store._folder.path_of(packet_id([2], SIGNATURE))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    store.close()
    index = PacketIndex.open(root)
    index.add([Chunk("c1", "one"), Chunk("c2", "two")], np.eye(2), ["p", "p"])
    index.close()
    return root


def script(code: str, *arguments: object) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def run(code: str, *arguments: object) -> None:
    process = script(code, *arguments)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output


def lock(root: Path) -> None:
    """Take the right to write away."""
    for path in sorted([root, *root.rglob("*")]):
        path.chmod(0o555 if path.is_dir() else 0o444)


unix = pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs Unix permissions")
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")


@unix
def test_a_folder_that_cannot_be_written_is_read(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    lock(root)
    run(READ_ONLY, root)
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@unix
@pytest.mark.parametrize("missing", ["quarantine", "packets"])
def test_a_folder_that_cannot_be_written_and_lacks_a_part_is_read(root: Path, missing: str) -> None:
    shutil.rmtree(root / missing)
    lock(root)
    run(READ_ONLY_IN_PART, root)


@unix
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="another user must write meanwhile")
def test_who_only_reads_sees_what_another_user_changes(root: Path) -> None:
    import numpy as np

    from kvpacket_rag.chunk import Chunk
    from kvpacket_rag.index import PacketIndex

    lock(root)
    reader = script(FOLLOWS, root)
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    store, index = DiskStore(root), PacketIndex.open(root)
    store.delete(packet_id([1], SIGNATURE))
    store.put(make_packet(3), "text 3")
    index.delete(["c1", "c2"])
    index.add([Chunk("c3", "three")], np.eye(2)[:1], ["p"])
    store.close()
    index.close()
    output, _ = reader.communicate("go\n", timeout=120)
    assert reader.returncode == 0, output


@linux
@pytest.mark.parametrize("code", [NO_FILES, NO_ROOM], ids=["no open files left", "no room for a file"])
def test_limits_of_the_system_are_named_and_pass(root: Path, code: str) -> None:
    run(code, root)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_request_is_answered_though_nothing_can_be_written(
    backbone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)
    engine.encode(CHUNKS, [f"owner {n}" for n in range(len(CHUNKS))])
    prompt = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWho signed?"
    before = engine.generate(prompt)
    engine.store._folder.path_of(engine.encode(CHUNKS[:1])[0]).unlink()  # type: ignore[attr-defined]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("kvpacket_rag.store.folder.open", refuse, raising=False)
        with pytest.raises(StoreFullError if number == errno.ENOSPC else StoreError):
            engine.encode(CHUNKS[:1])
        after = engine.generate(prompt)
    assert after.token_ids == before.token_ids and len(after.usage.misses) == 1
    assert engine.encode(CHUNKS[:1]) and engine.generate(prompt).usage.misses == ()
    engine.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_request_is_answered_though_no_packet_can_be_read(
    backbone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)
    engine.encode(CHUNKS[:2])
    prompt = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWho signed?"
    before = engine.generate(prompt)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("kvpacket_rag.store.packet_file.open", refuse, raising=False)
        after = engine.generate(prompt)
    assert after.token_ids == before.token_ids and len(after.usage.misses) == 2
    assert all(os.strerror(number) in miss.reason for miss in after.usage.misses)
    assert engine.generate(prompt).usage.misses == () and engine.store.check().is_sound  # type: ignore[attr-defined]
    engine.close()


def test_closing_does_not_fail_because_what_was_used_cannot_be_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with contextlib.closing(DiskStore(tmp_path)) as store:
        store.put(make_packet(1), "text")
    store = DiskStore(tmp_path)
    store.get(packet_id([1], SIGNATURE), SIGNATURE)

    def refuse(*_: object) -> None:
        raise StoreFullError("no room")

    monkeypatch.setattr("kvpacket_rag.store.changes.CatalogueChanges.touch", refuse)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        len(store)


def test_a_clock_that_goes_back_makes_files_verified_again_and_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)
    store.put(make_packet(1), "text")
    monkeypatch.setattr("time.time_ns", lambda: 10**9)
    monkeypatch.setattr("time.time", lambda: 1.0)
    again = DiskStore(tmp_path)  # a sweep goes by no clock
    again.put(make_packet(2), "text")
    for seed in (1, 2):
        assert same(again.get(packet_id([seed], SIGNATURE), SIGNATURE), make_packet(seed))
