"""A chain as LangChain's documentation shows it with HuggingFacePipeline, over a retriever of any vector store."""

import logging
import os
import sys

import torch
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import HuggingFacePipeline

logging.basicConfig(stream=sys.stdout, level=logging.INFO)

llm = HuggingFacePipeline.from_model_id(
    model_id=os.environ["MODEL"],
    task="text-generation",
    device=-1,
    batch_size=2,
    model_kwargs={"torch_dtype": torch.float32, "trust_remote_code": False, "attn_implementation": "sdpa"},
    pipeline_kwargs={
        "max_new_tokens": 24,
        "do_sample": False,
        "repetition_penalty": 1.03,
        "return_full_text": False,
        "top_k": 10,
    },
)
vectorstore = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
vectorstore.add_documents(
    [
        Document("Ada Marlow signed the lease of the harbour office in March 2021 for a term of seven years."),
        Document("Refunds are paid within nine working days to the card that was charged, never in cash."),
    ]
)


def format_docs(docs):
    return "\n\n".join(doc.page_content for doc in docs)


retriever = vectorstore.as_retriever(search_kwargs={"k": 2})
prompt = PromptTemplate.from_template("Answer from this context:\n{context}\n\nQuestion: {question}\nAnswer:")
chain = (
    {"context": retriever | format_docs, "question": RunnablePassthrough()}
    | prompt
    | llm.bind(skip_prompt=True)
    | StrOutputParser()
)
questions = ["Who signed the lease of the harbour office?", "For how long was it signed?", "How are refunds paid?"]
answers = [chain.invoke(questions[0])]
print(answers[0])
for piece in chain.stream(questions[1]):
    print(piece, end="")
answers += chain.batch(questions[1:])
