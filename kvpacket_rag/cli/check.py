"""``kvpacket check``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpacket_rag.cli.options import INDEX_FILE
from kvpacket_rag.cli.output import facts, say, show, show_json, size
from kvpacket_rag.errors import StoreError

if TYPE_CHECKING:
    from kvpacket_rag.index import PacketIndex
    from kvpacket_rag.store import DiskStore, PacketStore, RemoteStore, StoreCheck

SUMMARY = "verify every packet and every row of an index"
DESCRIPTION = (
    "Reads all packets of a folder and compares their checksums, and looks for damaged rows, packets whose rows are "
    "gone, leftovers and wrong counts; where the packets lie in an object store, those that the folder has of them. "
    "Loads no model. Exits with 3 where something is wrong and was not repaired."
)
_STORE_FILE = "packets.sqlite"
_WRONG = 3
_LINE_SECONDS = 5.0
_NO_FAULT = {"packets_whole", "bytes_read", "chunks_without_packet"}  # a packet may have been evicted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to check."""
    parser.add_argument(
        "index", metavar="DIR", type=Path, help="folder of an index and its namespaces, or of packets alone"
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="set damaged packets aside, take damaged rows and their documents out, delete leftovers and packets whose "
        "rows are gone, count anew",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check; the exit code."""
    folder = args.index
    places, links = _places(folder)
    if not places and not links:
        raise StoreError(
            f"{folder} holds neither an index nor packets; make some with 'kvpacket ingest PATH --index {folder}'"
        )
    worst = _WRONG if links else 0
    found: dict[Path, dict[str, Any]] = {}
    for place in places:
        found[place], code = _check_folder(place, args.repair)
        worst = max(worst, code)
        if not args.json:
            if len(places) > 1:
                show(f"{place}:")
            show(facts((n.replace("_", " "), _shown(n, v)) for n, v in found[place].items()))
    if args.json:
        below = {place.name: found[place] for place in places if place != folder}
        extra = {"namespaces": below} if below else {}
        show_json(found.get(folder, {}) | extra | ({"links_left_alone": list(map(str, links))} if links else {}))
    for link in links:
        say(f"{link} is a link, left alone: what it leads to is not of this folder; delete it, or move that here")
    return worst


def _places(folder: Path) -> tuple[list[Path], list[Path]]:
    """What is to be checked, the folder itself and its namespaces, and links in place of folders of these."""
    from kvpacket_rag.namespace import FOLDER

    root = folder / FOLDER
    namespaces = [root] if root.is_symlink() else sorted(root.glob("*"))
    links = [place for place in namespaces if place.is_symlink()]
    return [place for place in (folder, *namespaces) if place not in links and _holds_something(place)], links


def _holds_something(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in (INDEX_FILE, _STORE_FILE))


def _check_folder(folder: Path, repair: bool) -> tuple[dict[str, Any], int]:
    """What was found in the folder of one index, and the exit code."""
    from kvpacket_rag.index import PacketIndex
    from kvpacket_rag.journal import change_lock
    from kvpacket_rag.owner_check import knows_none
    from kvpacket_rag.store.remote_cache import tied_to

    with ExitStack() as opened:
        if repair:
            opened.enter_context(change_lock(folder))
        index = None
        if os.path.lexists(folder / INDEX_FILE):
            index = opened.enter_context(closing(PacketIndex.open(folder, load=False)))
        is_known = index is None or not index.damaged_settings()
        remote = index.get_setting("remote") if index is not None and is_known else tied_to(folder)
        store = opened.enter_context(closing(_opened(folder, remote, repair)))
        # without what it says of itself, an index cannot tell which packets are its own: its rows stay as they are
        found: dict[str, Any] = _check_index(index, store, repair and is_known) if index is not None else {}
        packets = store.check(repair=repair, progress=_Percent())
        damaged = index.damaged() if index is not None else {}
        is_left = index is not None and bool(index.faults() or damaged)
        all_lost = index is not None and is_known and not damaged and knows_none(index, store)
    found |= _told(packets)
    wrong = any(found[name] for name in found if name not in _NO_FAULT)
    beyond_repair = repair and (is_left or not packets.repaired)
    found["verdict"] = _verdict(wrong, repair, beyond_repair, folder)
    if all_lost and (repair or not wrong) and not beyond_repair:
        found["verdict"] = f"no packet is left: run 'kvpacket ingest --index {folder} --reencode'"
    return found, _WRONG if all_lost or (wrong and (not repair or beyond_repair)) else 0


def _opened(folder: Path, remote: str | None, repair: bool) -> DiskStore | RemoteStore:
    """The store of a folder; without repair, nothing is put or made where the folder says that its packets go."""
    from kvpacket_rag.store import DiskStore, RemoteStore, reopen_store
    from kvpacket_rag.store.remote_cache import was_never_put

    if not remote or repair:
        return reopen_store(folder, remote, sweep=False)
    if was_never_put(folder):
        return DiskStore(folder, sweep=False)
    return RemoteStore(remote, folder, sweep=False, create=False)


def _check_index(index: PacketIndex, store: PacketStore, repair: bool) -> dict[str, Any]:
    from kvpacket_rag.ingest import MARK
    from kvpacket_rag.journal import OwnerJournal
    from kvpacket_rag.owner_check import OwnerCheck, check_owners
    from kvpacket_rag.ownership import finish_changes, half_changed

    faults, damaged, journal = index.faults(), index.damaged(), OwnerJournal(index, store)
    is_known = not index.damaged_settings()
    unsettled = journal.documents() if is_known else []
    changing = half_changed(index) if is_known else []
    if repair:
        index.mend(MARK)  # before anything goes: a repair that is cut short may leave nothing that tells of it
        journal.settle(unsettled)
        finish_changes(index, store)
        for document_id in damaged.values():
            if chunk_ids := index.chunk_ids(document_id):
                journal.delete(document_id, chunk_ids)
        index.drop_damaged()  # rows that go by no name
    without, owners = 0, OwnerCheck()
    if repair or not damaged:
        if is_known:
            owners = check_owners(index, store)
        if repair:
            owners.repair(index, store)
            index.compact()
        without = sum(packet_id not in store for packet_id in {packet_id for _, packet_id in index.rows()})
    return {
        "faults_of_index": faults,
        "damaged_rows_of_index": [f"{chunk_id} of {document_id}" for chunk_id, document_id in damaged.items()],
        "documents_half_changed": unsettled,
        "chunks_half_changed": changing,
        "chunks_without_packet": without,
        "chunks_not_owning_their_packet": len(owners.unowned),
        "packets_of_chunks_that_are_gone": len(owners.rowless),
    }


def _told(packets: StoreCheck) -> dict[str, Any]:
    return {
        "packets_whole": packets.packets,
        "bytes_read": packets.bytes_read,
        "damaged_packets": packets.damaged_packets,
        "damaged_rows_of_packets": packets.damaged_rows,
        "faults_of_catalogue": packets.faults,
        "files_without_row": packets.disorder.orphans + packets.disorder.quarantined_orphans,
        "rows_without_file": packets.disorder.missing,
        "temporary_files": packets.disorder.strays,
        "wrong_counts": packets.wrong_counts,
    }


def _verdict(wrong: bool, repaired: bool, beyond_repair: bool, folder: Path) -> str:
    if not wrong:
        return "all is well"
    if beyond_repair:
        return "a database is damaged: move the folder away and ingest the documents again"
    if repaired:
        return "repaired; ingest the documents again, which encodes what was lost and brings back documents taken out"
    return f"something is wrong; 'kvpacket check {folder} --repair' puts right what can be"


def _shown(name: str, value: Any) -> str:
    if name.startswith("bytes"):
        return size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        value = [f"{packet_id}: {reason}" for packet_id, reason in value.items()]
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


class _Percent:
    """How far verifying is: one line written over on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + (0.2 if sys.stderr.isatty() else _LINE_SECONDS)

    def __call__(self, done: int, total: int) -> None:
        """Show bytes verified."""
        terminal = sys.stderr.isatty()
        if time.monotonic() < self._next and (done < total or not terminal):
            return
        self._next = time.monotonic() + (0.2 if terminal else _LINE_SECONDS)
        text = f"verified {size(done)} of {size(total)} ({done / max(total, 1):.0%})"
        if terminal:
            print(f"\r{text:<60}", end="" if done < total else "\n", file=sys.stderr, flush=True)
        else:
            say(text)
