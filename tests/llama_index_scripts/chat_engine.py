"""A chat engine with HuggingFaceLLM around a model that is loaded already, asked synchronously and asynchronously."""

import asyncio
import logging
import os
import sys

import torch
from llama_index.core import Document, Settings, VectorStoreIndex, set_global_tokenizer
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.huggingface import HuggingFaceLLM
from transformers import AutoModelForCausalLM, AutoTokenizer

logging.basicConfig(stream=sys.stdout, level=logging.INFO)


def messages_to_prompt(messages):
    prompt = ""
    for message in messages:
        prompt += f"<|im_start|>{message.role.value}\n{message.content}<|im_end|>\n"
    return prompt + "<|im_start|>assistant\n"


def completion_to_prompt(completion):
    return f"<|im_start|>user\n{completion}<|im_end|>\n<|im_start|>assistant\n"


name = os.environ["MODEL"]
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(name)
set_global_tokenizer(tokenizer.encode)
llm = HuggingFaceLLM(
    model=model,
    tokenizer=tokenizer,
    model_name=name,
    tokenizer_name=name,
    context_window=2048,
    max_new_tokens=16,
    generate_kwargs={"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.95},
    messages_to_prompt=messages_to_prompt,
    completion_to_prompt=completion_to_prompt,
    tokenizer_outputs_to_remove=["token_type_ids"],
    is_chat_model=True,
    device_map="auto",
)
Settings.llm = llm
Settings.embed_model = MockEmbedding(embed_dim=4)

print(llm.complete("Paul Graham is "))
index = VectorStoreIndex.from_documents(
    [
        Document(text="The controller shows error E41 when the door sensor has been silent for ninety seconds."),
        Document(text="The cold room on the second floor is kept at minus twenty degrees by the night shift."),
    ]
)
chat_engine = index.as_chat_engine(
    chat_mode="condense_plus_context",
    memory=ChatMemoryBuffer.from_defaults(token_limit=1000),
    system_prompt="You help with machines.",
)
print(chat_engine.chat("What does E41 mean?"))
for token in chat_engine.stream_chat("And how cold is the cold room?").response_gen:
    print(token, end="")


async def main():
    response = await chat_engine.astream_chat("Who keeps it cold?")
    async for token in response.async_response_gen():
        print(token, end="")


asyncio.run(main())
