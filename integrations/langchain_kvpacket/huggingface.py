"""Arguments of langchain-huggingface's local classes as arguments of these, so that code written for them runs here.

``HuggingFacePipeline`` is :class:`KVPacketLLM` and ``ChatHuggingFace`` is :class:`ChatKVPacket`. An argument that
would change answers and has no counterpart is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpacket_rag import KVPacketEngine, PromptError
from kvpacket_rag.backbone import Backbone

_NAMES = {
    "device": "device",
    "device_map": "device",
    "dtype": "dtype",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "min_p": "min_p",
    "model": "model",
    "model_id": "model",
    "model_name": "model",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_sequence": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "torch_dtype": "dtype",
}
# What is done anyway, and so may be asked for.
_ONLY: dict[str, tuple[Any, ...]] = {
    "backend": ("default", "pipeline"),
    "logprobs": (False,),
    "n": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "return_full_text": (False,),
    "skip_prompt": (True,),
    "skip_special_tokens": (True,),
    "task": ("text-generation",),
}
_NO_EFFECT = {
    "attn_implementation",
    "batch_size",
    "clean_up_tokenization_spaces",
    "low_cpu_mem_usage",
    "pad_token_id",
    "stream_usage",
    "trust_remote_code",
    "use_cache",
    "use_safetensors",
}


def constructor_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor, theirs unpacked; what is passed by itself counts more than what is packed.

    Raises:
        PromptError: one asks for what cannot be done.
    """
    own = dict(arguments)
    layers = [
        _from_llm(own.pop("llm", None)),
        _from_pipeline(own.pop("pipeline", None)),
        _from_tokenizer(own.pop("tokenizer", None)),
        _translated(own.pop("model_kwargs", None) or {}),
        _translated(own.pop("pipeline_kwargs", None) or {}),
        _translated(own, is_packed=False),
    ]
    return {name: value for layer in layers for name, value in layer.items()}


def call_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of one call, ``pipeline_kwargs`` unpacked.

    Raises:
        PromptError: one asks for what cannot be done.
    """
    own = dict(arguments)
    packed = _translated(own.pop("pipeline_kwargs", None) or {})
    return packed | _translated(own, is_packed=False)


def _translated(arguments: Mapping[str, Any], is_packed: bool = True) -> dict[str, Any]:
    """The same in our words; names that are unknown here are refused, or left to the model's own check."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _NAMES:
            if value is not None:
                found[_NAMES[name]] = _value(_NAMES[name], value)
        elif name in _ONLY:
            if value is not None and value not in _ONLY[name]:
                raise PromptError(f"{name} is {value!r}, and here it can only be {' or '.join(map(repr, _ONLY[name]))}")
        elif name == "max_length":
            raise PromptError("max_length counts the prompt too; pass max_new_tokens, which counts the answer alone")
        elif name not in _NO_EFFECT and name != "do_sample":
            if is_packed:
                raise PromptError(f"{name}={value!r} has no counterpart here; leave it out, or use {', '.join(_NAMES)}")
            found[name] = value
    if arguments.get("do_sample"):
        found.setdefault("temperature", 1.0)
    elif arguments.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _value(name: str, value: Any) -> Any:
    if name == "device":
        device = value.get("", value) if isinstance(value, dict) else value
        if isinstance(device, dict):
            raise PromptError(f"device_map is {value!r}; packets need the model on one device, such as 'cuda:0'")
        if isinstance(device, int):
            return "cpu" if device < 0 else f"cuda:{device}"
        return str(device)
    if name == "dtype":
        return str(value).removeprefix("torch.")
    return [value] if name == "stop" and isinstance(value, str) else value


def _from_llm(llm: Any) -> dict[str, Any]:
    """What a chat model takes over from the text model it is made around."""
    if llm is None:
        return {}
    if not hasattr(llm, "shared_fields"):
        raise PromptError(f"llm is a {type(llm).__name__}, expected a KVPacketLLM, whose engine is then shared")
    fields: dict[str, Any] = llm.shared_fields()
    return fields


def _from_pipeline(pipeline: Any) -> dict[str, Any]:
    """An engine over the model of a transformers pipeline, and the pipeline's own generation arguments."""
    if pipeline is None:
        return {}
    model = pipeline.model
    backbone = Backbone(model, pipeline.tokenizer, getattr(model, "name_or_path", "") or type(model).__name__)
    engine = KVPacketEngine.around(backbone)
    # Where transformers keeps what a pipeline was given; it has no public place.
    given = {**getattr(pipeline, "_generate_kwargs", {}), **getattr(pipeline, "_forward_params", {})}
    given.pop("tokenizer", None)
    return {**_translated(given), "engine": engine}


def _from_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """The template of a tokenizer that was handed over beside the model, perhaps for its template alone."""
    template = getattr(tokenizer, "chat_template", None)
    return {"chat_template_kwargs": {"chat_template": template}} if template else {}
