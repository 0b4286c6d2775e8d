"""A retrieval chain with ChatHuggingFace around a local pipeline, asked synchronously and asynchronously."""

import asyncio
import logging
import os
import sys

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline

logging.basicConfig(stream=sys.stdout, level=logging.INFO)

llm = HuggingFacePipeline.from_model_id(
    model_id=os.environ["MODEL"],
    task="text-generation",
    device_map="cpu",
    pipeline_kwargs={"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.03},
)
chat = ChatHuggingFace(llm=llm, verbose=False)
documents = [
    Document("Ada Marlow signed the lease of the harbour office in March 2021 for a term of seven years."),
    Document("Refunds are paid within nine working days to the card that was charged, never in cash."),
]
retriever = InMemoryVectorStore.from_documents(documents, DeterministicFakeEmbedding(size=8)).as_retriever()
prompt = ChatPromptTemplate.from_messages([("system", "Answer from:\n\n{context}"), ("human", "{question}")])
questions = ["Who signed the lease of the harbour office?", "How are refunds paid?", "Who signed it?"]


def ask(question):
    found = retriever.invoke(question)
    messages = prompt.invoke({"context": "\n\n".join(doc.page_content for doc in found), "question": question})
    return chat.invoke(messages)


async def main():
    found = await retriever.ainvoke(questions[2])
    values = {"context": "\n\n".join(doc.page_content for doc in found), "question": questions[2]}
    return await (prompt | chat).ainvoke(values)


messages = [ask(question) for question in questions[:2]]
messages.append(asyncio.run(main()))
answers = [message.content for message in messages]
print(*answers, messages[-1].response_metadata, sep="\n")
