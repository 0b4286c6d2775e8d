"""What the store on disk stands, and how fast it is.

    python benchmarks/store.py                       every part at full size: half an hour on two cores
    python benchmarks/store.py --parts kills many    some of them
    python benchmarks/store.py --kills 10 --mutations 90 --packets 1000 --megabytes 64     smaller

Every figure comes from doing the harm or the work itself: ingests killed while they write, files of packets damaged by
seed and asked for, requests of eight threads beside the same requests one by one, processes that write under a byte
cap, and a store of very many small packets. The model is random and tiny: it encodes and answers, but not well.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # processes are forked

import argparse
import contextlib
import logging
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kvpacket_rag import DiskStore, Packet, PacketSignature
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store.folder import StoreFolder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from harm_samples import ask_after_mutations, ask_at_once, kill_ingests, tiny_backbone

Figures = Iterator[tuple[str, str]]

SIGNATURE = PacketSignature(weights="w" * 64, tokenizer="t" * 64, adapter="none", rope="r" * 64, dtype="float32")
CHURN = 40  # packets that come and go under the byte cap
ROOM = 12  # of them that it leaves room for


def make(seed: int, tokens: int = 2) -> Packet:
    """A packet of about a kilobyte; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tuple(torch.randn(2, 2, tokens, 8, generator=generator) for _ in range(2))
    return Packet(packet_id([seed], SIGNATURE), SIGNATURE, tensors, tokens, tokens)


def kills(root: Path, args: argparse.Namespace) -> Figures:
    """Kill ingests; look through what they leave, and complete it."""
    hit = kill_ingests(tiny_backbone(), root, args.kills)
    told = "opened, whole, and completed with nothing encoded twice"
    yield "ingests killed", f"{args.kills} of {args.kills} {told}; {hit} were at work, the others had ended"


def mutations(root: Path, args: argparse.Namespace) -> Figures:
    """Damage files in every way there is, in turn, and ask."""
    told = ask_after_mutations(tiny_backbone(), root, args.mutations)
    found = f"{told} damages found, counted as misses and mended"
    yield "files damaged", f"{args.mutations} of {args.mutations} answers right, {found}"


def requests(root: Path, args: argparse.Namespace) -> Figures:
    """Eight threads over one store, with room for all of the packets and for half of them."""
    for name, room in (("", None), (", evicting", 2)):
        equal = ask_at_once(tiny_backbone(), root / f"room {room}", args.requests, room)
        yield f"requests of 8 threads{name}", f"{equal} of {args.requests} answers equal the serial ones"


def cap(root: Path, args: argparse.Namespace) -> Figures:
    """Two processes that put more than fits, while a third counts bytes."""
    with contextlib.closing(DiskStore(root / "sizes")) as sizes:
        for seed in range(ROOM):
            sizes.put(make(seed), f"text {seed}")
        max_bytes = sizes.size_bytes
    writers = [_forked(lambda number=number: _churn(root / "store", max_bytes, number)) for number in range(2)]
    counts: dict[bool, list[int]] = {False: [], True: []}  # by whether writers wait meanwhile
    with contextlib.closing(DiskStore(root / "store", max_bytes)) as store:
        while writers:
            for wait in counts:
                with store._catalogue.transaction() if wait else contextlib.nullcontext():
                    counts[wait].append(sum(map(_size, (root / "store").glob("packets/*/*"))) - max_bytes)
            writers = [writer for writer in writers if not os.waitpid(writer, os.WNOHANG)[0]]
        verdict = "sound" if store.check().is_sound and store.size_bytes <= max_bytes else "UNSOUND"
    between, amid = (f"{max(0, *counts[waits]):,} bytes in {len(counts[waits]):,} counts" for waits in (True, False))
    yield "most bytes over the cap, 2 processes", f"{between} between writes; {verdict} afterwards"
    coming = f"a packet of {max_bytes // ROOM:,} that goes and one that comes may both be counted"
    yield "the same, amid writes", f"{amid}, in which {coming}"


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def _churn(root: Path, max_bytes: int, number: int) -> None:
    store, choice = DiskStore(root, max_bytes), random.Random(number)
    for _ in range(500):
        seed = choice.randrange(CHURN)
        store.put(make(seed), f"text {seed}", f"owner {seed}")
        store.drop_owners([f"owner {choice.randrange(CHURN)}"])
        time.sleep(0.005)  # encoding takes longer; without it, two writers leave hardly any turn to a third
    store.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def many(root: Path, args: argparse.Namespace) -> Figures:
    """Times at many small packets."""
    packets, store, sync = args.packets, DiskStore(root), os.fsync
    os.fsync = lambda _: None  # filling: the last thousand are written as they really are
    for seed in range(packets - min(1000, packets // 2)):
        store.put(make(seed), f"text {seed} " + "of an ordinary length " * 40, f"owner {seed}")
    os.fsync = sync
    last = [make(seed) for seed in range(packets - min(1000, packets // 2), packets)]
    puts = [_seconds(lambda packet=packet: store.put(packet, "text", packet.packet_id)) for packet in last]
    yield f"put at {packets:,} packets, synced", _spread(puts)
    chosen = random.Random(0).sample(range(packets), min(2000, packets))
    gets = [_seconds(lambda seed=seed: store.get(packet_id([seed], SIGNATURE), SIGNATURE)) for seed in chosen]
    again = [_seconds(lambda seed=seed: store.get(packet_id([seed], SIGNATURE), SIGNATURE)) for seed in chosen]
    yield "get, first of the process (verified)", _spread(gets)
    yield "get again", _spread(again)
    yield "is it there", _spread([_seconds(lambda seed=seed: packet_id([seed], SIGNATURE) in store) for seed in chosen])
    rows = [_seconds(lambda seed=seed: store._catalogue.find(packet_id([seed], SIGNATURE))) for seed in chosen]
    yield "row alone", _spread(rows)
    yield "all known texts", f"{_seconds(lambda: list(store.known(SIGNATURE))):.2f} s"
    store.close()
    yield "open", f"{_seconds(lambda: DiskStore(root).close()):.2f} s"
    with contextlib.closing(DiskStore(root, sum(map(_size, root.glob("packets/*/*"))))) as capped:
        late = [make(seed) for seed in range(packets, packets + 200)]
        puts = [_seconds(lambda packet=packet: capped.put(packet, "text")) for packet in late]
    yield "put that makes room", _spread(puts)


def verify(root: Path, args: argparse.Namespace) -> Figures:
    """A check beside reading the same files without looking at them, and what checksums cost a load."""
    store = DiskStore(root)
    for seed in range(max(1, args.megabytes // 8)):
        store.put(make(seed, tokens=31_250), f"text {seed}")
    size, files = store.size_bytes, [path for path in root.glob("packets/*/*") if path.is_file()]
    for state, prepare in (("disk", _drop_pages), ("page cache", lambda _: None)):
        rates = []
        for work in (store.check, lambda: [path.read_bytes() for path in files]):
            prepare(files)
            rates.append(size / _seconds(work) / 1e6)
        yield f"verify, from {state}", f"{rates[0]:,.0f} MB/s; reading takes {rates[1]:,.0f} MB/s"
    names = [path.stem for path in files]
    first, *warm = [_seconds(lambda: [store.get(name, SIGNATURE) for name in names]) / len(names) for _ in range(20)]
    folder, reads = StoreFolder(root), store._reads
    guard = [_seconds(lambda: [reads.is_verified(name, folder.stamp(name)) for name in names]) for _ in range(20)]
    once, load, look = first * 1e3, statistics.median(warm) * 1e3, statistics.median(guard) / len(names) * 1e3
    yield f"load of {size / len(files) / 1e6:.0f} MB", f"{once:.1f} ms the first time, verified; {load:.3f} ms then"
    yield "knowing that it is verified", f"{look:.4f} ms, {look / load:.1%} of a warm load"
    store.close()


def _drop_pages(files: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _spread(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"p50 {cuts[49] * 1000:.2f} ms, p99 {cuts[98] * 1000:.2f} ms"


PARTS = {part.__name__: part for part in (kills, mutations, requests, cap, many, verify)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    parser.add_argument("--kills", type=int, default=100, help="ingests to kill")
    parser.add_argument("--mutations", type=int, default=1000, help="files to damage")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--packets", type=int, default=100_000)
    parser.add_argument("--megabytes", type=int, default=512, help="of packets to verify")
    parser.add_argument("--folder", type=Path, help="a disk to measure, instead of that of temporary files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of forking
    logging.getLogger("kvpacket_rag").setLevel(logging.CRITICAL)  # of every damage
    print(describe(torch.float32, torch.device("cpu")))
    for name in args.parts:
        base = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            for figure, told in PARTS[name](base, args):
                print(f"{figure}: {told}", flush=True)
        finally:
            shutil.rmtree(base)


if __name__ == "__main__":
    main()
