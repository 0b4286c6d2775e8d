"""What ``kvpacket verify`` calls packets is what serving reads."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kvpacket_rag import verify as verify_module
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import AdapterError
from kvpacket_rag.evaluation.case import Case, score
from kvpacket_rag.evaluation.measure import prefilled, tell
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.parts import Part
from kvpacket_rag.training.student import student_logits
from kvpacket_rag.training.validation import compare
from kvpacket_rag.verify import probe_rows, verify


@pytest.mark.parametrize("soft", [False, True])
def test_the_probe_reads_what_is_served_with_and_without_an_adapter(
    backbone: Backbone, adapter: Adapter, soft: bool, monkeypatch: pytest.MonkeyPatch
):
    row = next(probe_rows(PacketEncoder(backbone, Adapter.empty(backbone.hidden_size))))
    case = Case([*row.context, Part.of_text(list(row.suffixes[0]))], max_new_tokens=32)
    own = adapter if soft else None
    read: list[Tensor] = []

    def watched(*arguments: Any) -> Any:
        with student_logits(backbone, arguments[1], [row], [[told.ids]]) as (logits, _):
            read.append(logits)
        return compare(*arguments)

    monkeypatch.setattr(verify_module, "probe_rows", lambda encoder: islice(probe_rows(encoder), 1))
    monkeypatch.setattr(verify_module, "compare", watched)
    with prefilled(backbone, parse_method("full", Bench(backbone)), case) as state:
        told = tell(backbone, state, case)
    verdict = verify(KVPacketEngine.around(backbone, adapter=own).encoder)
    for name, found in zip(("packet", "plain"), read, strict=False):
        with prefilled(backbone, parse_method(name, Bench(backbone, own)), case) as state:
            assert_close(score(backbone, state, told.ids), found, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(read[0], read[1], atol=1e-3)
    assert verdict.packets != verdict.plain and verdict.has_adapter is soft


def test_an_adapter_behind_sink_tokens_is_refused(backbone: Backbone, adapter: Adapter):
    with pytest.raises(AdapterError, match="not both"):
        verify(PacketEncoder(backbone, adapter, 1))
