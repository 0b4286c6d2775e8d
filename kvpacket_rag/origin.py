"""What an index was built with, kept in its folder, so that nothing answers from foreign packets or vectors."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.embed import Embedder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import PacketMismatchError, PacketNotFoundError, StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.models import resolve_model
from kvpacket_rag.owners import knows_packets, name_new
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.shipped import is_shipped
from kvpacket_rag.store import DiskStore, PacketStore, RemoteStore, open_store, reopen_store
from kvpacket_rag.store.opening import KEEP_HERE
from kvpacket_rag.store.remote_cache import was_never_put

ADAPTER_FILE = "adapter.safetensors"
_DEFAULT_MODEL = "smollm2-135m-instruct"
_DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
_UNFINISHED = "unfinished: go on with 'kvpacket ingest --reencode' or reencode=True"  # in place of a signature
_COMPARED = 4  # rows whose vectors are compared with an embedder's
_LIKE = 0.5  # cosine: vectors of a text with and without its metadata are nearer, those of two models are not


class Origin:
    """Model, dtype, adapter, embedder and chunk size of an index, and where its packets lie.

    Args:
        index: keeps them as settings.
        folder: of the index; holds a copy of the adapter, so that moving files about does not part the two. None for
            memory.
    """

    def __init__(self, index: PacketIndex, folder: Path | None) -> None:
        self._index = index
        self._folder = folder
        self._name = f"the index in {folder}" if folder else "the index in memory"

    @property
    def embedder(self) -> str:
        """Name of the embedding model."""
        return self._index.get_setting("embedder") or _DEFAULT_EMBEDDER

    @property
    def knows_embedder(self) -> bool:
        """Whether that is known: an index that another framework filled with its own vectors does not say."""
        return not len(self._index) or bool(self._index.get_setting("embedder"))

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of a chunk."""
        return int(self._index.get_setting("chunk_tokens") or 256)

    def require_embedder(self) -> None:
        """Refuse to guess which model the vectors are of.

        Raises:
            StoreError: the index does not say.
        """
        if not self.knows_embedder:
            raise StoreError(
                f"{self._name} does not say which embedding model its vectors are of, for it was filled "
                "through a framework that embeds by itself; name that model with --embedder NAME, or embedder=NAME "
                f"in Python ({_DEFAULT_EMBEDDER} for those of KVPacketEmbedding)"
            )

    def check_vectors(self, embedder: Embedder) -> None:
        """See that stored vectors can be those of an embedder that the index does not name.

        Raises:
            StoreError: they cannot.
        """
        if self.knows_embedder:
            return
        chunks = [chunk for chunk, _ in islice(self._index.rows(), _COMPARED)]
        stored = self._index.vectors([chunk.chunk_id for chunk in chunks])
        own = embedder.embed_documents([chunk.text for chunk in chunks])
        if own.shape != stored.shape:
            found = f"have {stored.shape[1]} dimensions and its own {own.shape[1]}"
        else:
            lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(stored, axis=1)
            likeness = float(np.median((own * stored).sum(1) / lengths))
            if likeness >= _LIKE:
                return
            found = f"and its own have a cosine of {likeness:.2f} for the same texts"
        raise StoreError(
            f"the vectors of {self._name} are not of the embedder {embedder.name!r}: they {found}; "
            "name the embedding model that the index was filled with"
        )

    def load_engine(self, model: str | None, options: Mapping[str, Any], keep_adapter: bool = False) -> KVPacketEngine:
        """The engine over the index's packets; model, dtype and adapter of the index where none is asked for.

        Args:
            model: short name, path or hub name.
            options: of :meth:`KVPacketEngine.load`, and of :meth:`open_packets`.
            keep_adapter: ``adapter="auto"`` means the index's own, too, for that is the one that fits its packets.
        """
        options = dict(options)
        has_packets = self._index.get_setting("signature") is not None
        if has_packets and keep_adapter and isinstance(asked := options.get("adapter"), str) and asked == "auto":
            del options["adapter"]
        store = self.open_packets(options.pop("remote", None), options.pop("cache_bytes", None))
        chosen: dict[str, Any] = {"store": store, "dtype": self._index.get_setting("dtype") or "auto"}
        if "adapter" not in options and has_packets:
            chosen["adapter"] = None
            if sink := self._index.get_setting("sink"):
                chosen["sink"] = int(sink)
            if self._index.get_setting("adapter"):
                chosen["adapter"] = Adapter.load(self._require_folder() / ADAPTER_FILE)
        for name in ("compress", "quantize"):
            chosen[name] = self._index.get_setting(name) or None
        model = model or self._index.get_setting("model") or _DEFAULT_MODEL
        if resolve_model(model) == (folder := Path(model).expanduser()):
            model = str(folder.absolute())  # to be found from any working folder later
        try:
            self._note_place(store)  # first: packets were uploaded, whether or not the model can be loaded
            return KVPacketEngine.load(model, **(chosen | options))
        except BaseException:
            store.close()
            raise

    def open_packets(self, remote: str | None = None, cache_bytes: int | None = None) -> DiskStore | RemoteStore:
        """The packets of the index: in its folder, or in the object store that it was built with.

        Args:
            remote: URL of an object store for an index that has none yet; ``"none"`` to keep the packets in the folder
                where the index names one that they were never uploaded to.
            cache_bytes: cap on the packets that lie in the folder.

        Raises:
            StoreError: the index names an object store that its packets were never uploaded to, and nothing was asked
                for; or they are to be kept in the folder, and are not there.
        """
        folder, noted = self._require_folder(), self._index.get_setting("remote")
        if not remote:
            return reopen_store(folder, noted, cache_bytes)
        if remote != KEEP_HERE:
            return open_store(folder, remote, cache_bytes)
        if noted and len(self._index) and not was_never_put(folder):
            raise StoreError(
                f"the packets of {self._name} lie in the object store at {noted}, not in the folder; open it without "
                f"--remote {KEEP_HERE} (remote={KEEP_HERE!r}), or ingest the documents into a new folder"
            )
        return open_store(folder, None, cache_bytes)

    def check(self, engine: KVPacketEngine, embedder: str, reencode: bool = False) -> bool:
        """Whether packets have to be made anew, all or the lost ones, which is only said if ``reencode`` allows it.

        Raises:
            PacketMismatchError: they have to, for they are of another model, adapter or dtype, and may not.
            PacketNotFoundError: the engine's store knows none of them, and they may not be made anew.
            StoreError: the vectors are of another embedder.
        """
        if not len(self._index):
            return False
        known = self._index.get_setting("embedder")
        if known and known != embedder:
            raise StoreError(
                f"{self._name} was built with the embedder {known!r}, not {embedder!r}; "
                "open it with the former, or ingest the documents into a new folder"
            )
        written = self._index.get_setting("signature")
        if written not in (None, engine.signature.to_json()):
            if not reencode:
                raise PacketMismatchError(self._difference(str(written), engine))
            return True
        if reencode:
            present = {known.packet_id for known in engine.store.known(engine.signature)}
            return any(name not in present for _, name in self._index.rows())
        if not knows_packets(self._index, engine.store, engine.signature):
            raise PacketNotFoundError(
                f"{self._name} holds {len(self._index)} chunks, but the engine's store has none of their packets; load "
                f"the engine over the store in which they are, or {self._remedy}"
            )
        return False

    def begin_reencoding(self, engine: KVPacketEngine) -> None:
        """Note where it is to lead, and that nobody may answer from this index until it is done."""
        name_new(self._index, engine.store)  # which it is not any more with the next line
        self._set({"signature": _UNFINISHED, **self._facts(engine)})
        self._note_place(engine.store)

    def write(
        self, engine: KVPacketEngine, embedder: str, chunk_tokens: int | None = None, store: PacketStore | None = None
    ) -> None:
        """Note what the index is built with from here on; of rows that another framework made, only the packets.

        Args:
            engine: that made the packets.
            embedder: name of the embedding model.
            chunk_tokens: most tokens of a chunk; None to say nothing of it.
            store: where the packets of a new index are to be; the engine's by default.
        """
        if not len(self._index):
            self._note_place(engine.store if store is None else store)
        own = {"embedder": embedder} if self.knows_embedder else {}
        if own and chunk_tokens is not None:
            own["chunk_tokens"] = str(chunk_tokens)
        self._set({**self._facts(engine), **own, "signature": engine.signature.to_json()})

    def _facts(self, engine: KVPacketEngine) -> dict[str, str]:
        adapter = engine.encoder.adapter
        if self._folder is not None:
            file = self._folder / ADAPTER_FILE
            if adapter.is_empty:
                file.unlink(missing_ok=True)
            elif self._index.get_setting("adapter") != adapter.digest or not file.is_file():
                adapter.save(file)
        digest = "" if adapter.is_empty else adapter.digest
        sink = str(len(engine.encoder.sink_ids))
        reduction = engine.encoder.reduction
        return {
            "model": engine.model_name,
            "dtype": engine.signature.dtype,
            "adapter": digest,
            "sink": sink,
            "compress": str(reduction.compression or ""),
            "quantize": reduction.scheme.name if reduction.scheme else "",
        }

    def _note_place(self, store: PacketStore) -> None:
        """Note the object store in which the index's packets are from here on, if it is one."""
        name_new(self._index, store)
        self._set({"remote": store.url if isinstance(store, RemoteStore) else ""})

    def _set(self, settings: Mapping[str, str]) -> None:
        for key, value in settings.items():
            if (self._index.get_setting(key) or "") != value:
                self._index.set_setting(key, value)

    def _require_folder(self) -> Path:
        assert self._folder is not None  # an index in memory has no packets to be opened
        return self._folder

    @property
    def _remedy(self) -> str:
        """How to encode every chunk again; on the command line it may take more options."""
        command = f"kvpacket ingest --reencode --index {shlex.quote(str(self._folder))}"
        return f"make its packets anew, in Python by reencode=True{f', else by: {command}' if self._folder else ''}"

    def _difference(self, written: str, engine: KVPacketEngine) -> str:
        command = self._remedy
        if written == _UNFINISHED:
            return f"encoding {self._name} again was interrupted; to finish, {command}"
        found, ours = PacketSignature.from_json(written), engine.signature
        names = ours.differing(found)
        model, adapter = self._index.get_setting("model"), engine.encoder.adapter
        digest = found.adapter.partition(",")[0]
        made_with = f"adapter {ADAPTER_FILE} in it (SHA-256 {digest[:12]}…)" if digest != "none" else "no adapter"
        if model != engine.model_name:
            command += f" --model {shlex.quote(engine.model_name)}"
        if "dtype" in names:
            command += f" --dtype {ours.dtype}"
        if "adapter" in names:
            command += f" --adapter {_argument(adapter)}"
        reduction = engine.encoder.reduction
        if "compression" in names:
            command += f" --compress {reduction.compression or 'none'}"
        if "quantization" in names:
            command += f" --quantize {reduction.scheme.name if reduction.scheme else 'none'}"
        return (
            f"{self._name} holds packets of model {model!r} in {found.dtype} with {made_with}, which "
            f"{engine.model_name!r} in {ours.dtype} with {adapter.label} cannot read: {ours.difference(found)}; "
            f"open it as it was made, without naming a model, dtype or adapter, or {command}"
        )


def _argument(adapter: Adapter) -> str:
    """What ``--adapter`` takes for this one."""
    if adapter.is_empty:
        return "none"
    if is_shipped(adapter):
        return "auto"
    return shlex.quote(str(adapter.file)) if adapter.file else "FILE"
