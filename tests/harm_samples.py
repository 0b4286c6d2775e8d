"""Harm done to folders, files and requests, and what must hold after it; for tests and ``benchmarks/store.py``."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from conftest import CHUNKS, tiny_model, tiny_tokenizer
from crash_samples import killed_after, killed_at
from pipeline_samples import WordEmbedder, contents, encoded_texts, long_document, packet_files, pipeline
from test_store_mutations import MUTATIONS

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.journal import OwnerJournal
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.store import DiskStore

SHORT = GenerationSettings(max_new_tokens=3)
BEFORE, AFTER = ([long_document(4, f"d{n}", changed=changed) for n in range(3)] for changed in (None, 2))


def tiny_backbone() -> Backbone:
    """A random model for scripts, which have no fixtures."""
    return Backbone(tiny_model(), tiny_tokenizer(), "tiny")


def open_folder(backbone: Backbone, folder: Path) -> KVPacketRAG:
    """A pipeline over it, with chunks of a section each."""
    return pipeline(backbone, folder, chunk_tokens=90)


def kill_ingests(backbone: Backbone, base: Path, rounds: int) -> int:
    """Kill ingests of documents and of their new versions, at random steps and at random moments in turn.

    After each, the folder must open with every row's packet whole and nothing else counted as data, and the same
    ingest again must complete it without encoding anything twice.

    Returns:
        How many of them were killed while they were at it, and not after they had ended.
    """
    chance, hit = random.Random(0), 0

    def ingest(folder: Path) -> None:
        with open_folder(backbone, folder) as rag:
            rag.add(BEFORE)
            rag.add(AFTER)

    ingest(base / "whole")
    with open_folder(backbone, base / "whole") as whole:
        wanted = contents(whole), packet_files(base / "whole")
    started = time.perf_counter()
    killed_at(10**9, lambda: ingest(base / "timed"))
    duration = time.perf_counter() - started
    for number in range(rounds):
        folder = base / f"round {number}"
        if number % 2:
            hit += killed_at(chance.randrange(150), lambda folder=folder: ingest(folder))  # type: ignore[misc]
        else:
            hit += killed_after(chance.uniform(0, duration), lambda folder=folder: ingest(folder))  # type: ignore[misc]
        _completes(backbone, folder, wanted)
        shutil.rmtree(folder)
    return hit


def _completes(backbone: Backbone, folder: Path, wanted: tuple[Any, set[str]]) -> None:
    with contextlib.closing(DiskStore(folder, sweep=False)) as store:
        assert len(store) <= len(packet_files(folder)), "an orphan may lie there, and is not counted"
    with open_folder(backbone, folder) as rag:
        there = in_step(rag, folder)
        seen = encoded_texts(rag)
        rag.add(AFTER)
        assert len(seen) == len(wanted[1] - there), "something was encoded twice"
        assert (contents(rag), packet_files(folder)) == wanted
        assert OwnerJournal(rag.index, rag.engine.store).documents() == []


def in_step(rag: KVPacketRAG, folder: Path) -> set[str]:
    """The packets of a folder that was opened, once it is seen that rows, vectors and packets agree."""
    store, embedder = rag.engine.store, WordEmbedder()
    assert isinstance(store, DiskStore) and store.check().is_sound, store.check()
    rows, there = list(rag.index.rows()), packet_files(folder)
    for _, name in rows:
        store.get(name, rag.engine.signature)
    if rows:
        texts = embedder.embed_documents([chunk.text for chunk, _ in rows])
        vectors = rag.index.vectors([chunk.chunk_id for chunk, _ in rows])
        assert np.allclose(vectors, texts / np.linalg.norm(texts, axis=1, keepdims=True), atol=1e-6)
    assert there == {known.packet_id for known in store.known(rag.engine.signature)}
    if not OwnerJournal(rag.index, store).documents():
        assert there == {name for _, name in rows}
    return there


def kill_at_every_step(backbone: Backbone, base: Path) -> int:
    """Kill an update and a deletion at each of their steps; what is there must agree, and the rest can be done.

    Returns:
        How many steps there were.
    """
    with open_folder(backbone, base / "before") as rag:
        rag.add(BEFORE)

    def change(folder: Path) -> None:
        with open_folder(backbone, folder) as rag:
            rag.add(AFTER[:1])
            if "d1" in rag.index.documents():
                rag.delete("d1")

    shutil.copytree(base / "before", base / "after")
    change(base / "after")
    with open_folder(backbone, base / "after") as rag:
        wanted = contents(rag), packet_files(base / "after")
    step, folder = 0, base / "killed"
    while True:
        shutil.copytree(base / "before", folder)
        if not killed_at(step, lambda: change(folder)):
            return step
        with open_folder(backbone, folder) as rag:
            in_step(rag, folder)
        change(folder)
        with open_folder(backbone, folder) as rag:
            for name in OwnerJournal(rag.index, rag.engine.store).documents():  # of a deletion that was cut short
                rag.delete(name)
            assert (contents(rag), packet_files(folder)) == wanted, step
        shutil.rmtree(folder)
        step += 1


def ask_after_mutations(backbone: Backbone, folder: Path, rounds: int) -> int:
    """Damage the file of a packet by seed and ask: the answer must be the one from whole packets.

    Returns:
        How many of the answers told the damage, as a miss that was counted and whose packet was encoded again.
    """
    engine, chance, told = KVPacketEngine(backbone, DiskStore(folder), min_match_tokens=4), random.Random(0), 0
    store = engine.store
    assert isinstance(store, DiskStore)
    names = engine.encode(CHUNKS, [f"owner {n}" for n in range(len(CHUNKS))])
    prompt = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWho signed?"
    right = engine.generate(prompt, SHORT).token_ids
    kinds = list(MUTATIONS)
    for number in range(rounds):
        paths = [store._folder.path_of(name) for name in names[:2]]
        kind, one = kinds[number % len(kinds)], number // len(kinds) % 2
        before, whole = store.metrics.snapshot().misses.get("damaged", 0), [path.read_bytes() for path in paths]
        if kind == "swapped":
            paths[0].write_bytes(whole[1])
            paths[1].write_bytes(whole[0])
        else:
            MUTATIONS[kind][0](chance, paths[one], whole[one])
        answer = engine.generate(prompt, SHORT)
        assert answer.token_ids == right, f"a wrong answer after mutation {number}, {kind}"
        expected = names[:2] if kind == "swapped" else [names[one]]
        counted = store.metrics.snapshot().misses.get("damaged", 0) - before
        is_told = [miss.packet_id for miss in answer.usage.misses] == expected
        told += is_told and counted == len(expected) and all(name in store for name in expected)
    assert engine.generate(prompt, SHORT).usage.misses == ()
    engine.close()
    return told


def prompts() -> list[str]:
    """200 of them over overlapping chunks, many of them equal."""
    chance = random.Random(0)
    chosen = [chance.sample(CHUNKS, chance.randint(1, 3)) for _ in range(200)]
    return ["\n\n".join([*texts, f"Question {number % 5}?"]) for number, texts in enumerate(chosen)]


def ask_at_once(backbone: Backbone, base: Path, requests: int, room: int | None = None) -> int:
    """Ask by eight threads over one store, which has room for so many of the four packets.

    Returns:
        How many of the answers are those that one request after the other gets.
    """
    asked = (prompts() * (requests // 200 + 1))[:requests]
    alone = KVPacketEngine(backbone, min_match_tokens=4)
    alone.encode(CHUNKS)
    serial = {prompt: alone.generate(prompt, SHORT).token_ids for prompt in dict.fromkeys(asked)}
    with contextlib.closing(DiskStore(base / "sizes")) as sizes:
        KVPacketEngine(backbone, sizes, min_match_tokens=4).encode(CHUNKS)
        cap = None if room is None else sizes.size_bytes * room // len(CHUNKS)
    store = DiskStore(base / "store", cap)
    engine = KVPacketEngine(backbone, store, min_match_tokens=4)
    engine.encode(CHUNKS, [f"owner {n}" for n in range(len(CHUNKS))])
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: engine.generate(prompt, SHORT).token_ids, asked))
    assert store.check().is_sound and (cap is None or store.size_bytes <= cap)
    engine.close()
    return sum(answer == serial[prompt] for answer, prompt in zip(answers, asked, strict=True))
