"""Question-answering data: files, generators, data sets of the hub, and the prompts around them."""

from kvpacket_rag.datasets.catalogue import open_dataset
from kvpacket_rag.datasets.sample import QASample, SourceText, read_jsonl

__all__ = ["QASample", "SourceText", "open_dataset", "read_jsonl"]
