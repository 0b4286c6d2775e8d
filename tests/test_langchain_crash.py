"""Whatever write a change of LangChain's vector store ends at, the packets of its rows are left, and no others."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from crash_samples import fast_folder
from langchain_kvpacket import KVPacketVectorStore
from langchain_samples import WordEmbeddings

from kvpacket_rag import Backbone, DiskStore, KVPacketEngine, PacketIndex

OLD, NEW, KEPT = CHUNKS[:3]
WRITES = [
    *((PacketIndex, name) for name in ("add", "delete", "set_setting")),
    *((DiskStore, name) for name in ("put", "add_owner", "drop_owners")),
]
Change = Callable[[KVPacketVectorStore], object]
CHANGES: dict[str, Change] = {
    "update": lambda store: store.add_texts([NEW], ids=["a"]),
    "swap": lambda store: store.add_texts([KEPT, OLD], ids=["a", "b"]),
    "new": lambda store: store.add_texts([NEW]),
    "delete": lambda store: store.delete(["a"]),
}


class Killed(BaseException):
    """Ends what a killed process would have ended."""


@contextmanager
def opened(backbone: Backbone, folder: Path) -> Iterator[KVPacketVectorStore]:
    engine = KVPacketEngine(backbone, DiskStore(folder), min_match_tokens=4)
    store = KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(folder))
    yield store
    store.close()
    engine.close()


def dying_at(monkeypatch: pytest.MonkeyPatch, step: int, store: KVPacketVectorStore, change: Change) -> bool:
    """Make a change of which the write of that number and all that come after it are not done; False if all are."""
    left = [step]

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*given: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return write(*given, **options)

        return written

    with monkeypatch.context() as patch:
        for owner, name in WRITES:
            patch.setattr(owner, name, dying(getattr(owner, name)))
        try:
            change(store)
        except Killed:
            return True
    return False


def require_in_step(store: KVPacketVectorStore, folder: Path) -> None:
    """Every row has its packet, nothing else has one, and each is owned by its rows alone."""
    known = {packet.text for packet in store.engine.store.known(store.engine.signature)}
    rows = {chunk.chunk_id: chunk.text for chunk, _ in store.index.rows()}
    assert known == set(rows.values()) and len(store.engine.store) == len(known)
    catalogue = sqlite3.connect(folder / "packets.sqlite")
    owners = [name for (name,) in catalogue.execute("SELECT owner FROM owners")]
    catalogue.close()
    assert sorted(owners) == sorted(f":{name}" for name in rows)


@pytest.fixture
def filled(backbone: Backbone, tmp_path: Path) -> Iterator[Path]:
    """A folder that holds a store with two texts."""
    with tempfile.TemporaryDirectory(dir=fast_folder(tmp_path)) as base:
        with opened(backbone, Path(base, "filled")) as store:
            store.add_texts([OLD, KEPT], ids=["a", "b"])
        yield Path(base, "filled")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_opened_anew", [True, False])
def test_no_text_outlives_a_change_that_was_cut_short_at_any_write(
    backbone: Backbone, filled: Path, monkeypatch: pytest.MonkeyPatch, change: Change, is_opened_anew: bool
):
    step, is_killed = 0, True
    while is_killed:
        folder = Path(shutil.copytree(filled, filled.with_name(str(step))))
        with opened(backbone, folder) as store:
            is_killed = dying_at(monkeypatch, step, store, change)
            if not is_opened_anew:
                change(store)
                require_in_step(store, folder)
        with opened(backbone, folder) as store:
            require_in_step(store, folder)
            store.delete()
            require_in_step(store, folder)
        step += 1
    assert step > 5


def test_an_update_repeated_after_a_kill_leaves_the_new_text_alone(
    backbone: Backbone, filled: Path, monkeypatch: pytest.MonkeyPatch
):
    with opened(backbone, filled) as store:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(DiskStore, "drop_owners", lambda *_: (_ for _ in ()).throw(Killed))
            store.add_texts([NEW], ids=["a"])
        store.add_texts([NEW], ids=["a"])
        assert store.engine.generate(f"{OLD}\n\nWho?").usage.chunks_reused == 0
        require_in_step(store, filled)
