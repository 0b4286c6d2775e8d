from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kvpacket_rag.errors import PacketError, PacketMismatchError
from kvpacket_rag.packet import Packet, PacketSignature, packet_id

SIGNATURE = PacketSignature(weights="w", tokenizer="t", adapter="none", rope="r", dtype="float32")


@pytest.mark.parametrize("name", [f.name for f in fields(PacketSignature)])
def test_each_field_of_the_signature_alone_changes_the_id_and_is_named_when_it_differs(name: str):
    other = replace(SIGNATURE, **{name: 2 if name == "format_version" else "changed"})
    assert packet_id([1, 2], other) != packet_id([1, 2], SIGNATURE)
    with pytest.raises(PacketMismatchError, match=name):
        SIGNATURE.require(other, "p")


def test_fields_cannot_be_forged_by_moving_text_across_their_border():
    forged = [
        replace(SIGNATURE, adapter="x", compression=""),
        replace(SIGNATURE, adapter="", compression="x"),
        replace(SIGNATURE, adapter='x","compression":"', compression=""),
        replace(SIGNATURE, adapter="x\ncompression: ", compression=""),
    ]
    assert len({s.digest for s in forged}) == len(forged)
    assert len({packet_id(ids, SIGNATURE) for ids in ([1, 23], [12, 3], [1, 2, 3], [123], [0, 123])}) == 5


def test_a_signature_survives_its_own_text():
    assert PacketSignature.from_json(SIGNATURE.to_json()) == SIGNATURE
    for text in ("", "{}", "[]", '{"weights": 1}', "nonsense"):
        with pytest.raises(PacketError):
            PacketSignature.from_json(text)


def test_ids_are_equal_in_processes_with_other_hash_seeds():
    code = (
        "from kvpacket_rag.packet import *; "
        "print(packet_id([5, 70000], PacketSignature('w', 't', 'none', 'r', 'float32')))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "random")
    }
    assert found == {packet_id([5, 70000], SIGNATURE)}


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": ()},
        {"tensors": (torch.zeros(2, 3, 4),)},
        {"tensors": (torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16),)},
        {"tensors": (torch.zeros(2, 3, 4, 5, requires_grad=True),)},
        {"tensors": (torch.zeros(2, 3, 7, 5),)},
        {"num_tokens": 0},
        {"num_tokens": 7},
    ],
)
def test_a_packet_checks_its_own_shapes(changes: dict[str, Any]):
    good: dict[str, Any] = {"tensors": (torch.zeros(2, 3, 4, 5),), "span": 6, "num_tokens": 4}
    assert Packet("p", SIGNATURE, **good).size_bytes == 480
    with pytest.raises(PacketError):
        Packet("p", SIGNATURE, **(good | changes))
