"""Deleting a document from an index so that nothing of it is left, and a refresh brings it back."""

from __future__ import annotations

from typing import Any

from llama_index.core.indices.base import BaseIndex


def delete_document(index: BaseIndex[Any], ref_doc_id: str) -> None:
    """Delete a document from an index, and make the index forget that it ever had it.

    ``index.delete_ref_doc`` alone leaves the document's hash behind, for some stores even with
    ``delete_from_docstore=True``; ``refresh_ref_docs`` then takes the document for unchanged and never adds it again.
    Beside another vector store than :class:`KVPacketVectorStore`, call
    :func:`~llama_index_kvpacket.drop_packets` as well.
    """
    index.delete_ref_doc(ref_doc_id, delete_from_docstore=True)
    index.docstore.delete_ref_doc(ref_doc_id, raise_error=False)  # nodes that are kept beside the vector store
    index.docstore.delete_document(ref_doc_id, raise_error=False)  # the hash


async def adelete_document(index: BaseIndex[Any], ref_doc_id: str) -> None:
    """:func:`delete_document` for asynchronous stores."""
    await index.adelete_ref_doc(ref_doc_id, delete_from_docstore=True)
    await index.docstore.adelete_ref_doc(ref_doc_id, raise_error=False)
    await index.docstore.adelete_document(ref_doc_id, raise_error=False)
