"""Killed at every single step, a store opens with rows and files in step, and goes on where it was."""

from __future__ import annotations

import os
import signal
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
import os, random, shutil, signal, tempfile, time
from pathlib import Path
from crash_samples import killed_at
from pipeline_samples import contents, encoded_texts, long_document, packet_files, pipeline
from kvpacket_rag.journal import OwnerJournal

def test_killed(backbone):
    base, chance, survived = Path(os.environ["FOLDER"]), random.Random(0), 0
    before, after = ([long_document(4, f"d{n}", changed=c) for n in range(3)] for c in (None, 2))
    with pipeline(backbone, base / "whole", chunk_tokens=90) as whole:
        whole.add(after)
        wanted = contents(whole), packet_files(base / "whole")
    for round in range(int(os.environ["ROUNDS"])):
        folder = base / f"round {round}"

        def work():
            with pipeline(backbone, folder, chunk_tokens=90) as rag:
                rag.add(before)
                rag.add(after)

        survived += killed_at(chance.randrange(150), work)
        with pipeline(backbone, folder, chunk_tokens=90) as rag:
            store = rag.engine.store
            assert store.check().is_sound, round
            assert all(name in store for _, name in rag.index.rows()), round
            there, seen = packet_files(folder), encoded_texts(rag)
            rag.add(after)
            assert len(seen) == len(wanted[1] - there), round      # nothing is encoded twice
            assert (contents(rag), packet_files(folder)) == wanted, round
            assert OwnerJournal(rag.index, store).documents() == [], round
        shutil.rmtree(folder)
    assert survived > 0.8 * int(os.environ["ROUNDS"])
"""


def environment(**more: str) -> dict[str, str]:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    return {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that were forked")
@pytest.mark.parametrize(("script", "steps"), [(EVERY_STEP, 60), (EVERY_FAILURE, 20)], ids=["killed", "disk fails"])
def test_at_every_step_that_goes_wrong_rows_and_files_agree(tmp_path: Path, script: str, steps: int) -> None:
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > steps


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that were forked")
def test_ingests_killed_at_random_steps_are_completed_and_encode_nothing_twice(tmp_path: Path) -> None:
    script = tmp_path / "test_killed.py"
    script.write_text(KILLED_INGESTS)
    options = ["-q", "-p", "conftest", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(script)]
    rounds = environment(FOLDER=str(tmp_path), ROUNDS="10")
    done = subprocess.run(command, env=rounds, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.returncode != -signal.SIGKILL, done.stdout
