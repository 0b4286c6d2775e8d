"""What the store on disk stands, and how fast it is.

    python benchmarks/store.py [--kills 100] [--mutations 1000] [--requests 200] [--packets 100000] [--folder DIR]

Every figure comes from doing the harm or the work itself: processes killed while they write, files damaged by seed,
threads that read and write at once under a byte cap, and a store of many small packets. Nothing is encoded.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvpacket_rag import DiskStore, KVPacketError, Packet, PacketSignature
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.packet import packet_id

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from crash_samples import killed_at
from test_store_mutations import MUTATIONS

SIGNATURE = PacketSignature(weights="w" * 64, tokenizer="t" * 64, adapter="none", rope="r" * 64, dtype="float32")
CHURN = 40  # packets that come and go while processes are killed and threads are busy


def make(seed: int, tokens: int = 2) -> Packet:
    """A packet of about a kilobyte; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tuple(torch.randn(2, 2, tokens, 8, generator=generator) for _ in range(2))
    return Packet(packet_id([seed], SIGNATURE), SIGNATURE, tensors, tokens, tokens)


def is_right(store: DiskStore, seed: int) -> bool:
    """Whether the store gives the packet of that seed; False if it says that it has none."""
    try:
        found = store.get(packet_id([seed], SIGNATURE), SIGNATURE)
    except KVPacketError:
        return False
    if not all(torch.equal(a, b) for a, b in zip(found.tensors, make(seed).tensors, strict=True)):
        raise SystemExit(f"WRONG PACKET for seed {seed}")
    return True


def kills(root: Path, rounds: int) -> str:
    """Kill a writer at random steps and at random moments; look through what it leaves."""
    chance, killed = random.Random(0), 0
    for number in range(rounds):

        def churn(number: int = number) -> None:
            store, choice = DiskStore(root, 30_000), random.Random(number)
            for _ in range(60):
                seed = choice.randrange(CHURN)
                store.put(make(seed), f"text {seed}", f"owner {seed}")
                store.drop_owners([f"owner {choice.randrange(CHURN)}"])
            store.close()

        if number % 2:
            killed += killed_at(chance.randrange(1500), churn)
        else:
            killed += _killed_after(chance.uniform(0.0, 0.3), churn)
        store = DiskStore(root)
        if not store.check().is_sound or store.size_bytes > 30_000:
            return f"kill {number} left disorder: {store.check()}"
        stored = [chunk for chunk in store.known(SIGNATURE) if chunk.packet_id in store]
        if not all(is_right(store, int(chunk.text.split()[1])) for chunk in stored):
            return f"kill {number} lost a packet"
        store.close()
    return f"{rounds} of {rounds} survived ({killed} hit a writer at work)"


def _killed_after(seconds: float, work: Callable[[], None]) -> bool:
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def mutations(root: Path, rounds: int) -> str:
    """Damage a packet's file in every way there is, in turn; count what was noticed."""
    store, caught, kinds = DiskStore(root), 0, list(MUTATIONS)
    path = root / "packets" / (name := packet_id([1], SIGNATURE))[:2] / f"{name}.safetensors"
    for number in range(rounds):
        store.put(make(1), "text 1", "owner")
        MUTATIONS[kinds[number % len(kinds)]][0](random.Random(number), path, path.read_bytes())
        caught += not is_right(store, 1)
    counted = sum(store.metrics.snapshot().misses.values())
    store.close()
    return f"{caught} of {rounds} caught, {counted} counted as misses"


def concurrency(root: Path, requests: int) -> str:
    """Eight threads over two store objects under a cap, half of them writing."""
    cap = sum(path.stat().st_size for path in _filled(root / "sizes", 12).rglob("*.safetensors"))
    stores = [DiskStore(root / "store", cap) for _ in range(2)]
    over: list[int] = []

    def request(number: int) -> bool:
        store, choice = stores[number % 2], random.Random(number)
        seeds = [choice.randrange(CHURN) for _ in range(3)]
        for seed in seeds:
            if not is_right(store, seed):
                store.put(make(seed), f"text {seed}", f"owner {seed}")
        over.append(sum(_size(path) for path in (root / "store" / "packets").rglob("*")) - cap)
        return True

    with ThreadPoolExecutor(8) as threads:
        right = sum(threads.map(request, range(requests)))
    sound = stores[0].check().is_sound
    for store in stores:
        store.close()
    excess = f"{max(0, *over)} bytes over the cap at most, by a count no lock stops (a packet has {cap // 12})"
    return f"{right} of {requests} right, {excess}, {'sound' if sound else 'UNSOUND'}"


def _filled(root: Path, packets: int) -> Path:
    store = DiskStore(root)
    for seed in range(packets):
        store.put(make(seed), f"text {seed}")
    store.close()
    return root


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def many(root: Path, packets: int) -> list[tuple[str, str]]:
    """Times at many small packets."""
    store, sync = DiskStore(root), os.fsync
    os.fsync = lambda _: None  # filling: the last thousand are written as they really are
    for seed in range(packets - min(1000, packets // 2)):
        store.put(make(seed), f"text {seed} " + "of an ordinary length " * 40, f"owner {seed}")
    os.fsync = sync
    puts = [
        _seconds(lambda seed=seed: store.put(make(seed), f"text {seed}", f"owner {seed}"))
        for seed in range(packets - min(1000, packets // 2), packets)
    ]
    chosen = random.Random(0).sample(range(packets), min(2000, packets))
    gets = [_seconds(lambda seed=seed: store.get(packet_id([seed], SIGNATURE), SIGNATURE)) for seed in chosen]
    again = [_seconds(lambda seed=seed: store.get(packet_id([seed], SIGNATURE), SIGNATURE)) for seed in chosen]
    finds = [_seconds(lambda seed=seed: packet_id([seed], SIGNATURE) in store) for seed in chosen]
    rows = [_seconds(lambda seed=seed: store._catalogue.find(packet_id([seed], SIGNATURE))) for seed in chosen]
    known = _seconds(lambda: list(store.known(SIGNATURE)))
    store.close()
    opening = _seconds(lambda: DiskStore(root).close())
    capped = DiskStore(root, sum(_size(path) for path in (root / "packets").rglob("*")))
    evicting = [_seconds(lambda seed=seed: capped.put(make(seed), "text")) for seed in range(packets, packets + 200)]
    capped.close()
    return [
        (f"put at {packets:,} packets, synced", _spread(puts)),
        ("put that makes room", _spread(evicting)),
        ("get, first of the process (verified)", _spread(gets)),
        ("get again", _spread(again)),
        ("is it there", _spread(finds)),
        ("row alone", _spread(rows)),
        ("all known texts", f"{known:.2f} s"),
        ("open", f"{opening:.2f} s"),
    ]


def verify_rate(root: Path, megabytes: int) -> str:
    """Bytes a second of a check, beside reading the same files without looking at them; both from the page cache."""
    store, size = DiskStore(root), 0
    for seed in range(max(1, megabytes // 8)):
        store.put(make(seed, tokens=31_250), f"text {seed}")
    size = store.size_bytes
    files = [path for path in (root / "packets").rglob("*") if path.is_file()]
    reading = min(_seconds(lambda: [path.read_bytes() for path in files]) for _ in range(3))
    checking = min(_seconds(store.check) for _ in range(3))
    names = [path.stem for path in files]
    first = _seconds(lambda: [store.get(name, SIGNATURE) for name in names])
    warm = min(_seconds(lambda: [store.get(name, SIGNATURE) for name in names]) for _ in range(3))
    store.close()
    rates = f"{size / checking / 1e6:,.0f} MB/s against {size / reading / 1e6:,.0f} MB/s read"
    packets = f"{len(files)} packets of {size / len(files) / 1e6:.0f} MB"
    return f"{rates}; loading {packets} takes {first * 1000:.1f} ms once and {warm * 1000:.2f} ms from then on"


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _spread(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"p50 {cuts[49] * 1000:.2f} ms, p99 {cuts[98] * 1000:.2f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--mutations", type=int, default=100)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--packets", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=64, help="of packets to verify")
    parser.add_argument("--folder", type=Path, help="a disk to measure, instead of that of temporary files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(describe(torch.float32, torch.device("cpu")))
    base = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        print(f"kills: {kills(base / 'kills', args.kills)}", flush=True)
        print(f"mutations: {mutations(base / 'mutations', args.mutations)}", flush=True)
        print(f"8 threads: {concurrency(base / 'threads', args.requests)}", flush=True)
        for name, figure in many(base / "many", args.packets):
            print(f"{name}: {figure}", flush=True)
        print(f"verify: {verify_rate(base / 'verify', args.megabytes)}")
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
