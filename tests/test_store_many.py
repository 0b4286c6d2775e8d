"""Many readers and writers at once get what one alone would get."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harm_samples import ask_at_once
from pipeline_samples import packet_files
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)

from kvpacket_rag.errors import PacketError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore


@pytest.mark.parametrize("room", [None, 2])
def test_eight_threads_of_25_requests_get_the_serial_answers(backbone: Any, tmp_path: Path, room: int | None) -> None:
    assert ask_at_once(backbone, tmp_path, 200, room) == 200


INGEST = """
import contextlib
import os
from pathlib import Path
from pipeline_samples import encoded_texts, long_document, pipeline
from kvpacket_rag.journal import change_lock

def test_ingest(backbone):
    folder = Path(os.environ["FOLDER"])
    with pipeline(backbone, folder, chunk_tokens=90, lock=change_lock(folder)) as rag:
        seen = encoded_texts(rag)
        rag.add([long_document(4, f"d{n}") for n in range(4)])
        assert rag.engine.store.check().is_sound
        (folder / f"encoded {os.getpid()}").write_text(str(len(seen)))
"""


def test_two_processes_that_ingest_one_folder_encode_each_chunk_once(tmp_path: Path) -> None:
    script, folder = tmp_path / "test_ingest.py", tmp_path / "index"
    script.write_text(INGEST)
    folder.mkdir()
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    options = ["-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(script)]
    pair = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    encoded = [int(path.read_text()) for path in folder.glob("encoded *")]
    assert sum(encoded) == len(packet_files(folder)) > 0 and len(encoded) == 2


def test_readers_beside_a_writer_that_deletes_get_whole_packets_or_a_miss(tmp_path: Path) -> None:
    store, readers = DiskStore(tmp_path), [DiskStore(tmp_path) for _ in range(3)]
    done: list[bool] = []

    def read(reader: DiskStore) -> int:
        found, chance = 0, random.Random(id(reader))
        while not done or not found:
            seed = chance.randrange(6)
            try:
                assert same(reader.get(packet_id([seed], SIGNATURE), SIGNATURE), make_packet(seed))
                found += 1
            except PacketError as error:
                assert "damaged" not in str(error)
        return found

    with ThreadPoolExecutor(3) as threads:
        reading = [threads.submit(read, reader) for reader in readers]
        for round_ in range(60):
            store.put(make_packet(round_ % 6), f"text {round_ % 6}", f"owner {round_ % 6}")
            store.drop_owners([f"owner {(round_ + 3) % 6}"])
        done.append(True)
        assert all(task.result(60) for task in reading)
    assert store.check().is_sound
