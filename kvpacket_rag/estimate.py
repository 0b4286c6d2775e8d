"""What packets of some documents would take and save, told from a sample before all are encoded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from kvpacket_rag.compress.compression import Compression
from kvpacket_rag.compress.kept import pack_positions
from kvpacket_rag.compress.quantise import Quantiser
from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.compress.scheme import SCHEMES, Scheme
from kvpacket_rag.datasets.templates import PIPELINE_STYLE
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine, Policy
from kvpacket_rag.errors import DocumentError
from kvpacket_rag.packet import Packet
from kvpacket_rag.store.packet_file import packet_parts

REMOVED = (0.0, 0.3, 0.5)
_QUESTION = "What does this text say?"
_ROUNDS = 3  # of timed questions; their median counts


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes on disk of all packets in one setting.

    Attributes:
        quantize: name of the scheme, or ``"none"``.
        removed: share of the tokens that a press removes.
        num_bytes: of all files, headers included.
        bytes_per_token: of the chunks' own tokens.
    """

    quantize: str
    removed: float
    num_bytes: int
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was found.

    Attributes:
        chunks: different ones.
        tokens: of their texts.
        sample_chunks: that were encoded to find out.
        tokens_per_second: encoded, after the first chunk.
        encode_seconds: for all chunks at that rate.
        hits: chunks of a question.
        packet_seconds: to the first token with these chunks from packets in memory, the median.
        prefill_seconds: to the first token with the same prompts read in full, the median.
        sizes: in every setting.
    """

    chunks: int
    tokens: int
    sample_chunks: int
    tokens_per_second: float
    encode_seconds: float
    hits: int
    packet_seconds: float
    prefill_seconds: float
    sizes: tuple[Size, ...]

    @property
    def break_even_questions(self) -> float | None:
        """Questions after which encoding has paid by the time they save; None if they save none."""
        saved = self.prefill_seconds - self.packet_seconds
        return self.encode_seconds / saved if saved > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, for JSON."""
        return asdict(self) | {"break_even_questions": self.break_even_questions}


def estimate(engine: KVPacketEngine, chunks: Sequence[str], hits: int = 4, sample: int = 16) -> Estimate:
    """Encode a sample, ask of it, and say what all would take.

    Args:
        engine: over an empty store in memory, without a press and without a quantiser.
        chunks: texts of all chunks; equal ones count once.
        hits: chunks of a question, at most as many as are sampled.
        sample: chunks to encode, taken evenly from all.

    Raises:
        DocumentError: there are no chunks, or one does not fit the model.
    """
    texts = list(dict.fromkeys(text.strip() for text in chunks if text.strip()))
    if not texts:
        raise DocumentError("there is no text to estimate for; name documents that hold some")
    lengths = [len(engine.encoder.identify(text)[1]) for text in texts]
    chosen = sorted({number * len(texts) // sample for number in range(sample)})
    rate = _encode(engine, [texts[number] for number in chosen], [lengths[number] for number in chosen])
    packets = [engine.store.get(engine.encoder.identify(texts[number])[0], engine.signature) for number in chosen]
    hits = min(hits, len(chosen))
    times = _ask(engine, [texts[number] for number in chosen], hits)
    share = sum(lengths) / sum(packet.num_tokens for packet in packets)
    sizes = tuple(
        Size(scheme.name if scheme else "none", removed, round(share * size), share * size / sum(lengths))
        for scheme, removed, size in _sizes(engine, packets)
    )
    return Estimate(len(texts), sum(lengths), len(chosen), rate, sum(lengths) / rate, hits, *times, sizes)


def _encode(engine: KVPacketEngine, texts: Sequence[str], lengths: Sequence[int]) -> float:
    """Tokens a second; what a process does only the first time is left out if there is more than one chunk."""
    if len(texts) > 1:
        engine.encode(texts[:1])
        texts, lengths = texts[1:], lengths[1:]
    started = time.perf_counter()
    engine.encode(texts)
    return sum(lengths) / (time.perf_counter() - started)


def _ask(engine: KVPacketEngine, texts: Sequence[str], hits: int) -> tuple[float, float]:
    """Seconds to the first token from packets and by full prefill, each with another chunk first in every round."""
    times: dict[Policy, list[float]] = {"packets": [], "prefill": []}
    for number in range(_ROUNDS + 1):
        shown = [texts[(number + place) % len(texts)] for place in range(hits)]  # another first: none is gone on with
        prompt = PIPELINE_STYLE.messages(shown, f"{_QUESTION} ({number})")
        for policy, seconds in times.items():
            answer = engine.generate(prompt, GenerationSettings(max_new_tokens=1), policy=policy)
            seconds.append(answer.timings.ttft_seconds)
    packets, prefill = (statistics.median(seconds[1:]) for seconds in times.values())  # the first is to warm up
    return packets, prefill


def _sizes(engine: KVPacketEngine, packets: Sequence[Packet]) -> Iterator[tuple[Scheme | None, float, int]]:
    """Bytes of the sample's files in every setting that can be made here."""
    schemes = [None, *SCHEMES.values()] if find_spec("compressed_tensors") else [None]
    for scheme in schemes:
        for removed in REMOVED:
            yield scheme, removed, sum(_file_bytes(engine, packet, scheme, removed) for packet in packets)


def _file_bytes(engine: KVPacketEngine, packet: Packet, scheme: Scheme | None, removed: float) -> int:
    """Of a packet's file; which tokens are removed does not matter for its size, so the last ones are."""
    groups = engine.backbone.plan.groups
    compression = Compression("random", removed) if removed else None
    kept = compression.num_kept(packet.num_slots) if compression else packet.num_slots
    tensors = tuple(tensor[:, :, :kept] for tensor in packet.tensors)
    if scheme:
        tensors = Quantiser(scheme).quantise(tensors, groups)
    if compression:
        layers = len({layer for group in groups for layer in group.layers})
        positions = torch.arange(kept).expand(layers, groups[0].heads, kept)
        tensors = (*tensors, pack_positions(positions, packet.span))
    signature = replace(
        packet.signature,
        compression=str(Reduction(compression)),
        quantization=scheme.settings if scheme else "none",
    )
    return sum(len(part) for part in packet_parts(replace(packet, signature=signature, tensors=tensors)))
