"""Killed at every single step, a store opens with rows and files in step, and goes on where it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EVERY_STEP = """
import shutil, sys, tempfile
from pathlib import Path
from crash_samples import fast_folder, killed_at
from test_store import SIGNATURE, make_packet, same, stored_bytes
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore

def work():
    store = DiskStore(root, 3 * stored_bytes("disk", make_packet(0)))
    for seed in range(3):
        store.put(make_packet(seed), f"text {seed}", f"owner {seed}")
    store.put(make_packet(0), "text 0", "second owner")
    store.put(make_packet(3), "text 3", "owner 3")    # makes room
    store.drop_owners(["owner 2", "owner 0"])         # deletes one
    path = store._folder.path_of(packet_id([3], SIGNATURE))
    path.write_bytes(b"damaged")
    try:
        store.get(packet_id([3], SIGNATURE), SIGNATURE)   # sets it aside
    except Exception as error:
        assert "damaged" in str(error), error
    store.put(make_packet(3), "text 3")
    store.close()

base = Path(tempfile.mkdtemp(dir=fast_folder(Path(sys.argv[1]))))
root, step = base / "store", 0
while killed_at(step, work):
    store = DiskStore(root)
    found = store.check()
    damaged = {name for name in found.damaged_packets}
    assert damaged <= {packet_id([3], SIGNATURE)}, (step, found)   # only what was damaged by hand
    found.damaged_packets.clear()
    assert found.is_sound, (step, found)
    files = {path.stem for path in (root / "packets").rglob("*") if path.is_file()}
    stored = [chunk for chunk in store.known(SIGNATURE) if chunk.packet_id in store]
    assert files == {chunk.packet_id for chunk in stored} | damaged, step
    for chunk in stored:
        if chunk.packet_id not in damaged:
            assert same(store.get(chunk.packet_id, SIGNATURE), make_packet(int(chunk.text[5:]))), step
    store.close()
    if step % 7 == 0:                                 # and goes on where it was
        assert not killed_at(10**9, work)
        again = DiskStore(root)
        assert again.check().is_sound and packet_id([3], SIGNATURE) in again
        assert packet_id([2], SIGNATURE) not in again
        again.close()
    shutil.rmtree(root)
    step += 1
shutil.rmtree(base)
print(step)
"""

EVERY_FAILURE = """
import shutil, sys, tempfile
from pathlib import Path
from crash_samples import failing_at, fast_folder
from test_store import SIGNATURE, make_packet, same, stored_bytes
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore

def work():
    steps = [lambda seed=seed: store.put(make_packet(seed), f"text {seed}", f"owner {seed}") for seed in range(4)]
    steps += [lambda: store.drop_owners(["owner 2", "owner 0"]), lambda: store.put(make_packet(2), "text 2", "owner 2")]
    try:
        store = DiskStore(root, 3 * stored_bytes("disk", make_packet(0)))
    except KVPacketError:
        return
    for step in steps:
        try:
            step()
        except KVPacketError as error:
            assert "cannot be" in str(error) or "fails" in str(error), error
        found = store.check()                    # rows and files agree at once, but for files still to be deleted
        assert not (found.damaged_packets or found.damaged_rows or found.faults or found.wrong_counts), found
        for chunk in store.known(SIGNATURE):
            if chunk.packet_id in store:
                assert same(store.get(chunk.packet_id, SIGNATURE), make_packet(int(chunk.text[5:])))
    store.close()

base = Path(tempfile.mkdtemp(dir=fast_folder(Path(sys.argv[1]))))
root, step = base / "store", 0
while failing_at(step, work):
    store = DiskStore(root)
    assert store.check().is_sound, (step, store.check())
    store.close()
    shutil.rmtree(root)
    step += 1
shutil.rmtree(base)
print(step)
"""

KILLED_INGESTS = """
import sys
from pathlib import Path
from harm_samples import kill_ingests, tiny_backbone

rounds = int(sys.argv[2])
assert kill_ingests(tiny_backbone(), Path(sys.argv[1]), rounds) > 0.6 * rounds
print(rounds)
"""

EVERY_STEP_OF_A_CHANGE = """
import sys, tempfile
from pathlib import Path
from crash_samples import fast_folder
from harm_samples import kill_at_every_step, tiny_backbone

with tempfile.TemporaryDirectory(dir=fast_folder(Path(sys.argv[1]))) as base:
    print(kill_at_every_step(tiny_backbone(), Path(base)))
"""


def output_of(script: str, *arguments: object) -> str:
    """What a script of its own process prints."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that were forked")
@pytest.mark.parametrize(
    ("script", "steps"),
    [(EVERY_STEP, 60), (EVERY_FAILURE, 20), (EVERY_STEP_OF_A_CHANGE, 60)],
    ids=["killed", "disk fails", "killed in a change"],
)
def test_at_every_step_that_goes_wrong_rows_and_files_agree(tmp_path: Path, script: str, steps: int) -> None:
    assert int(output_of(script, tmp_path)) > steps


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that were forked")
@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_ingests_killed_at_random_are_completed_and_encode_nothing_twice(tmp_path: Path, rounds: int) -> None:
    assert int(output_of(KILLED_INGESTS, tmp_path, rounds)) == rounds
