"""Packets made while documents go into any vector store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from langchain_core.documents import BaseDocumentTransformer, Document

from kvpacket_rag import DocumentError, KVPacketEngine, KVPacketError

logger = logging.getLogger(__name__)

PACKET_ID_KEY = "kvpacket_id"  # in a document's metadata


class KVPacketTransformer(BaseDocumentTransformer):
    """The last step before a vector store that makes no packets: every document's text becomes one.

    What is returned are copies, with the id of the packet in their metadata, which any store keeps; so do the prompts
    find them as they find all chunks, by their text. Packets belong to documents by their ids: one that comes again
    under its id with another text loses the old packet, and :meth:`drop` drops those of deleted ones. A document
    without id owns its packet by its text. A ``KVPacketRetriever`` makes again what a full store let go of.

    Args:
        engine: makes the packets and keeps them in its store.
        owner: name of the collection; give each its own where several share an engine.

    Example:
        >>> qdrant.add_documents(KVPacketTransformer(chat.engine).transform_documents(documents))  # doctest: +SKIP
    """

    def __init__(self, engine: KVPacketEngine, owner: str = "langchain") -> None:
        if not isinstance(engine, KVPacketEngine):
            raise KVPacketError(
                f"engine is a {type(engine).__name__}; pass that of the model, as in engine=chat.engine"
            )
        self.engine = engine
        self.owner = owner

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Make packets; a document without text, or with more than the model's window, has no packet id.

        Raises:
            StoreError: the packets cannot be stored.
        """
        names = [self._packet_of(document) for document in documents]
        owners = [self._owner(document.id or name or "") for document, name in zip(documents, names, strict=True)]
        found = [place for place, name in enumerate(names) if name]
        texts = [documents[place].page_content for place in found]
        self.engine.writer.replace(texts, [owners[place] for place in found], owners)
        return [_with_packet_id(document, name) for document, name in zip(documents, names, strict=True)]

    def drop(self, ids: Iterable[str]) -> list[str]:
        """Drop the packets of documents that were deleted, save those that others need.

        Args:
            ids: of the documents, or of the packets of documents without id.

        Returns:
            The ids of the packets that went.
        """
        return self.engine.drop_owners([self._owner(name) for name in ids])

    def _packet_of(self, document: Document) -> str:
        if not document.page_content.strip():
            return ""
        try:
            return self.engine.encoder.identify(document.page_content)[0]
        except DocumentError as error:
            logger.warning("document %s gets no packet: %s", document.id, str(error))
            return ""

    def _owner(self, name: str) -> str:
        return f"{quote(self.owner, safe='')}/{name}"


def _with_packet_id(document: Document, name: str) -> Document:
    """A copy that names its packet, or none; the document itself where that is so already."""
    metadata = {key: value for key, value in document.metadata.items() if key != PACKET_ID_KEY}
    if name:
        metadata[PACKET_ID_KEY] = name
    return document if metadata == document.metadata else document.model_copy(update={"metadata": metadata})
