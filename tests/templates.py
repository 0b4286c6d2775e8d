"""Small re-creations of the chat templates that models come with: the same shape of text, the same refusals.

Each keeps what can hurt a chunk on its way through: trimming, escaping, cutting at ``</think>``, roles that must
alternate, and roles that are refused or silently left out.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "[INST]",
    "[/INST]",
]

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# A string is iterable, so the tool branch escapes every tool message as JSON.
LLAMA31 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if message['role'] == 'tool' and (message['content'] is mapping or message['content'] is iterable) -%}
{{- message['content'] | tojson -}}
{%- else -%}
{{- message['content'] | trim -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

# Thinking of past turns is cut off; switched off, an empty thought is put into the generation prompt.
QWEN3 = """\
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif message.role in ('system', 'user', 'assistant') -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

GEMMA = """\
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + (message['content'] | trim) + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# The system text stands inside the last message of the user.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}{%- set turns = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('After the optional system message, roles must alternate user and assistant') }}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message['content'] + '[/INST]' -}}
{%- else -%}
{{- ' ' + message['content'] | trim + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""

# Knows two roles and silently leaves out the rest.
PHI = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<|user|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

ALL = {"chatml": CHATML, "llama31": LLAMA31, "qwen3": QWEN3, "gemma": GEMMA, "mistral": MISTRAL, "phi": PHI}


def tokenizer_with(template: str | None) -> Any:
    """A tokenizer of single bytes whose control tokens are those of every template here."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL_TOKENS[1:]})
    tokenizer.add_tokens(CONTROL_TOKENS[:1], special_tokens=True)  # special, but not among all_special_tokens
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer
