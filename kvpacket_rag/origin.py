"""What an index was built with, kept in its folder, so that nothing answers from foreign packets or vectors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import PacketMismatchError, StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.models import resolve_model
from kvpacket_rag.packet import PacketSignature

ADAPTER_FILE = "adapter.safetensors"
_DEFAULT_MODEL = "smollm2-135m-instruct"
_UNFINISHED = "unfinished: go on with 'kvpacket ingest --reencode' or reencode=True"  # in place of a signature


class Origin:
    """Model, dtype, adapter, embedder and chunk size of an index.

    Args:
        index: keeps them as settings.
        folder: of the index; holds a copy of the adapter, so that moving files about does not part the two.
    """

    def __init__(self, index: PacketIndex, folder: Path) -> None:
        self._index = index
        self._folder = folder

    @property
    def embedder(self) -> str:
        """Name of the embedding model."""
        return self._index.get_setting("embedder") or "all-MiniLM-L6-v2"

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of a chunk."""
        return int(self._index.get_setting("chunk_tokens") or 256)

    def load_engine(self, model: str | None, options: Mapping[str, Any]) -> KVPacketEngine:
        """The engine over the folder's packets; model, dtype and adapter of the index where none is asked for."""
        chosen: dict[str, Any] = {"dtype": self._index.get_setting("dtype") or "auto"}
        if "adapter" not in options and self._index.get_setting("signature"):
            chosen["adapter"] = None
            if sink := self._index.get_setting("sink"):
                chosen["sink"] = int(sink)
            if self._index.get_setting("adapter"):
                chosen["adapter"] = Adapter.load(self._folder / ADAPTER_FILE)
        model = model or self._index.get_setting("model") or _DEFAULT_MODEL
        if resolve_model(model) == (folder := Path(model).expanduser()):
            model = str(folder.absolute())  # to be found from any working folder later
        return KVPacketEngine.load(model, store=self._folder, **(chosen | dict(options)))

    def check(self, engine: KVPacketEngine, embedder: str, reencode: bool) -> bool:
        """Whether the packets have to be made anew, which is only said if ``reencode`` allows it.

        Raises:
            PacketMismatchError: they have to, and may not.
            StoreError: the vectors are of another embedder.
        """
        if not len(self._index):
            return False
        known = self._index.get_setting("embedder")
        if known not in (None, embedder):
            raise StoreError(
                f"the index in {self._folder} was built with the embedder {known!r}, not {embedder!r}; "
                "open it with the former, or ingest the documents into a new folder"
            )
        written = self._index.get_setting("signature")
        if written is None or written == engine.signature.to_json():
            return False
        if not reencode:
            raise PacketMismatchError(self._difference(written, engine))
        return True

    def begin_reencoding(self, engine: KVPacketEngine) -> None:
        """Note where it is to lead, and that nobody may answer from this index until it is done."""
        self._set({"signature": _UNFINISHED, **self._facts(engine)})

    def write(self, engine: KVPacketEngine, embedder: str, chunk_tokens: int) -> None:
        """Note what the index is built with from here on."""
        self._set(
            {
                **self._facts(engine),
                "embedder": embedder,
                "chunk_tokens": str(chunk_tokens),
                "signature": engine.signature.to_json(),
            }
        )

    def _facts(self, engine: KVPacketEngine) -> dict[str, str]:
        adapter, file = engine.encoder.adapter, self._folder / ADAPTER_FILE
        if adapter.is_empty:
            file.unlink(missing_ok=True)
        elif self._index.get_setting("adapter") != adapter.digest or not file.is_file():
            temporary = file.with_name(f".{os.getpid()}.{ADAPTER_FILE}")
            adapter.save(temporary)
            os.replace(temporary, file)
        digest = "" if adapter.is_empty else adapter.digest
        sink = str(len(engine.encoder.sink_ids))
        return {"model": engine.model_name, "dtype": engine.signature.dtype, "adapter": digest, "sink": sink}

    def _set(self, settings: Mapping[str, str]) -> None:
        for key, value in settings.items():
            if self._index.get_setting(key) != value:
                self._index.set_setting(key, value)

    def _difference(self, written: str, engine: KVPacketEngine) -> str:
        remedy = "make its packets anew with 'kvpacket ingest --reencode' or KVPacketRAG.open(..., reencode=True)"
        if written == _UNFINISHED:
            return f"encoding the index in {self._folder} again was interrupted; {remedy} to finish it"
        found, ours = PacketSignature.from_json(written), engine.signature
        names = [field.name for field in fields(ours) if getattr(ours, field.name) != getattr(found, field.name)]
        model = self._index.get_setting("model")
        return (
            f"the index in {self._folder} holds packets of model {model!r} in {found.dtype}, which "
            f"{engine.model_name!r} in {ours.dtype} cannot read: {' and '.join(names)} differ; "
            f"open it as it was built, or {remedy}"
        )
