"""Methods by their names on the command line and in tables."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.evaluation.methods.a3 import A3
from kvpacket_rag.evaluation.methods.bench import Bench, Method
from kvpacket_rag.evaluation.methods.cacheblend import CacheBlend
from kvpacket_rag.evaluation.methods.epic import Epic
from kvpacket_rag.evaluation.methods.full import FullPrefill
from kvpacket_rag.evaluation.methods.no_context import NoContext
from kvpacket_rag.evaluation.methods.prefix_reuse import PrefixReuse
from kvpacket_rag.evaluation.methods.random_tokens import RandomTokens
from kvpacket_rag.evaluation.methods.sam_kv import LARGE, SamKV
from kvpacket_rag.evaluation.methods.single_cache import SingleCache
from kvpacket_rag.evaluation.methods.stored import StoredPackets

_FIXED: dict[str, Callable[[Bench], Method]] = {
    "full": lambda bench: FullPrefill(bench.bare),
    "prefix": lambda bench: PrefixReuse(bench.preambles),
    "packet": lambda bench: StoredPackets("packet", bench.adapted),
    "plain": lambda bench: StoredPackets("plain", bench.bare),
    "none": lambda bench: NoContext(bench.bare),
    "legolink-0": lambda bench: StoredPackets("legolink-0", bench.behind_sinks),
    "sam-kv": lambda bench: SamKV(bench.bare),
    "sam-kv-large": lambda bench: SamKV(bench.bare, LARGE),
}
_BY_RATIO: dict[str, Callable[[float, Bench], Method]] = {
    "random": lambda ratio, bench: RandomTokens(ratio, bench.bare),
    "cacheblend": lambda ratio, bench: CacheBlend(ratio, bench.bare),
    "a3": lambda ratio, bench: A3(ratio, bench.bare),
}

_REDUCED: dict[str, Callable[[str, Bench, Reduction], Method]] = {
    "packet": lambda name, bench, reduction: StoredPackets(name, bench.adapted_and(reduction)),
    "plain": lambda name, bench, reduction: StoredPackets(name, bench.bare_and(reduction)),
    "single": lambda name, bench, reduction: SingleCache(name, bench.bare_and(reduction)),
}

METHOD_FORMS = (*_FIXED, "epic-N", *(f"{name}-R" for name in _BY_RATIO), *(f"{name}@SIZE" for name in _REDUCED))


def parse_method(text: str, bench: Bench) -> Method:
    """The method of a name such as ``"packet"``, ``"epic-16"`` or ``"cacheblend-0.15"``.

    Args:
        text: the name; N stands for a number of tokens, R for a ratio of 0 to 1, SIZE for what makes packets smaller.
        bench: what the methods of a comparison share.

    Raises:
        KVPacketError: there is no such method; the known forms are listed.
        PacketError: there is no such press or way to quantise.
        AdapterError: it is ``"packet"``, and the bench has an adapter that does not fit.
        UnsupportedModelError: the model does not let the method in.
    """
    if text in _FIXED:
        return _FIXED[text](bench)
    base, _, size = text.partition("@")
    if base in _REDUCED and size:
        return _REDUCED[base](text, bench, Reduction.parse(size))
    name, _, number = text.rpartition("-")
    if name == "epic" and re.fullmatch(r"[0-9]+", number):
        return Epic(int(number), bench.bare)
    if name in _BY_RATIO and re.fullmatch(r"[01]|[01]?\.[0-9]+", number) and float(number) <= 1:
        return _BY_RATIO[name](float(number), bench)
    raise KVPacketError(
        f"there is no method {text!r}; known are {', '.join(METHOD_FORMS)}, with a number of tokens for N and a "
        "ratio of 0 to 1 for R, such as epic-16 and cacheblend-0.15, and a press, a way to quantise or both for SIZE, "
        "such as packet@reread-0.3+k8v4"
    )
