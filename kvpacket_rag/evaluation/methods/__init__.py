"""Ways to read a prompt with chunks, each on the very same tokens, one file a method."""

from kvpacket_rag.evaluation.methods.bench import Bench, CasePackets, Method
from kvpacket_rag.evaluation.methods.names import METHOD_FORMS, parse_method

__all__ = ["METHOD_FORMS", "Bench", "CasePackets", "Method", "parse_method"]
