"""A query engine as LlamaIndex's documentation shows it with HuggingFaceLLM: a model by name, own prompts."""

import logging
import os
import sys

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.huggingface import HuggingFaceLLM

logging.basicConfig(stream=sys.stdout, level=logging.INFO)

system_prompt = "<|im_start|>system\nYou answer briefly.<|im_end|>"
query_wrapper_prompt = PromptTemplate("<|im_start|>user\n{query_str}<|im_end|>\n<|im_start|>assistant\n")
llm = HuggingFaceLLM(
    context_window=3900,
    max_new_tokens=16,
    generate_kwargs={"temperature": 0.7, "do_sample": False},
    system_prompt=system_prompt,
    query_wrapper_prompt=query_wrapper_prompt,
    tokenizer_name=os.environ["MODEL"],
    model_name=os.environ["MODEL"],
    device_map="auto",
    stopping_ids=[1, 2],
    tokenizer_kwargs={"max_length": 3900},
    model_kwargs={"low_cpu_mem_usage": True},
)
Settings.llm = llm
Settings.embed_model = MockEmbedding(embed_dim=4)
Settings.chunk_size = 1024

documents = [
    Document(text="Ada Marlow signed the lease of the harbour office in March 2021 for a term of seven years."),
    Document(text="Refunds are paid within nine working days to the card that was charged, never in cash."),
]
index = VectorStoreIndex.from_documents(documents)

query_engine = index.as_query_engine()
for question in ("Who signed the lease of the harbour office?", "For how long was it signed?"):
    print(query_engine.query(question))

streaming = index.as_query_engine(streaming=True, response_mode="tree_summarize")
streaming.query("How are refunds paid?").print_response_stream()
