"""Small re-creations of the chat templates that models come with: the same shape of text, the same refusals.

Each keeps what can hurt a chunk on its way through: trimming, escaping, cutting at ``</think>``, roles that must
alternate, roles that are refused or silently left out, and places that move with what stands around them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvpacket_rag.chat import Message

BOS, EOS = "<s>", "</s>"
CONTROL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_sep|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
# In these models' vocabularies as words of their own, but not marked special; decoding keeps them.
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
WORDS += ["<｜User｜>", "<｜Assistant｜>"]


def _template(name: str) -> str:
    return (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


CHATML, SMOLLM2, QWEN25, QWEN3 = map(_template, ("chatml", "smollm2", "qwen25", "qwen3"))
DEEPSEEK_R1, LLAMA31, MISTRAL = map(_template, ("deepseek_r1", "llama31", "mistral"))
GEMMA2, GEMMA3, PHI3, PHI35, PHI4 = map(_template, ("gemma2", "gemma3", "phi3", "phi35", "phi4"))
LLAMA32 = LLAMA31.replace("'26 Jul 2024'", "strftime_now('%d %b %Y')")  # today's date, unless another is passed

ALL = {
    "chatml": CHATML,
    "smollm2": SMOLLM2,
    "llama31": LLAMA31,
    "llama32": LLAMA32,
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "deepseek r1": DEEPSEEK_R1,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "phi35": PHI35,
    "phi4": PHI4,
}


def tokenizer_with(template: str | None, adds_bos: bool = False) -> Any:
    """A tokenizer of single bytes whose control tokens are those of every template here.

    Args:
        template: its chat template.
        adds_bos: it puts the beginning-of-sequence token before every text, as Llama's and Gemma's do.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token=BOS, eos_token=EOS)
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL_TOKENS[1:]})
    tokenizer.add_tokens(CONTROL_TOKENS[:1], special_tokens=True)  # special, but not among all_special_tokens
    tokenizer.add_tokens(WORDS)
    if adds_bos:
        start = (BOS, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[start])
    tokenizer.chat_template = template
    return tokenizer


def _turn(message: Message) -> dict[str, Any]:
    """A message as transformers takes it."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": call.id}
        for call in message.tool_calls
    ]
    extra = {"tool_calls": calls} if calls else {}
    return {"role": message.role, "content": message.content, **extra, "tool_call_id": message.tool_call_id}


def uncut(template: str, chat: list[Message], **template_kwargs: Any) -> str:
    """What the template makes of a chat, by transformers alone."""
    options = {"tokenize": False, "add_generation_prompt": True, **template_kwargs}
    return str(tokenizer_with(template).apply_chat_template([_turn(message) for message in chat], **options))
