"""Arguments of langchain-huggingface's local classes as arguments of these, so that code written for them runs here.

``HuggingFacePipeline`` is :class:`KVPacketLLM` and ``ChatHuggingFace`` is :class:`ChatKVPacket`. An argument that
would change answers and has no counterpart is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpacket_rag import KVPacketEngine, PromptError
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.pretrained import passed_on

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
OTHER_WORDS = frozenset(_NAMES)
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
    "batch_size",
    "clean_up_tokenization_spaces",
    "low_cpu_mem_usage",
    "pad_token_id",
    "stream_usage",
    "trust_remote_code",
    "use_cache",
    "use_safetensors",
}
# Where transformers keeps what a pipeline was given; there is no public place.
_OF_PIPELINES = ("_generate_kwargs", "_preprocess_params", "_forward_params", "_postprocess_params")
_OF_LOADING = ("device", "device_map", "dtype", "torch_dtype", "model_kwargs")
_BESIDE_PIPELINES = ("store", "adapter", "min_match_tokens")
# Prompts are not padded nor cut, and begin with one beginning-of-sequence token whatever is said.
_IDLE_IN_PIPELINES = {"add_special_tokens", "padding", "tokenizer", "truncation"}


def constructor_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor, theirs unpacked; what is passed by itself counts more than what is packed.

    Raises:
        KVPacketError: one asks for what cannot be done.
    """
    own = dict(arguments)
    name = next((str(own[word]) for word in ("model", "model_id", "model_name") if own.get(word)), "")
    return _merged(
        _from_llm(own.pop("llm", None)),
        _from_pipeline(own.pop("pipeline", None), name, own),
        _from_tokenizer(own.pop("tokenizer", None)),
        _from_model_kwargs(_packed(own, "model_kwargs")),
        _translated(_packed(own, "pipeline_kwargs")),
        _translated(own, is_packed=False),
    )


def call_arguments(arguments: Mapping[str, Any], temperature: float | None) -> dict[str, Any]:
    """Arguments of one call, ``pipeline_kwargs`` unpacked.

    Args:
        arguments: of the call.
        temperature: the model's own, which ``do_sample`` leaves as it is, if it can.

    Raises:
        PromptError: one asks for what cannot be done.
    """
    own = dict(arguments)
    packed = _translated(_packed(own, "pipeline_kwargs"))
    return _merged({"temperature": temperature}, packed, _translated(own, is_packed=False))


def _packed(arguments: dict[str, Any], name: str) -> Mapping[str, Any]:
    """Taken out of the arguments."""
    packed = arguments.pop(name, None)
    if packed is None:
        return {}
    if not isinstance(packed, Mapping):
        raise PromptError(f"{name} is a {type(packed).__name__}, expected a dict of names and values")
    return packed


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of arguments as one, later ones first, with ``do_sample`` made a temperature.

    As in transformers, False takes the most likely token whatever the temperature, unless a later layer sets one, and
    True draws at the temperature that is set, or at 1.

    Raises:
        PromptError: it is True, and the temperature is 0.
    """
    values: dict[str, Any] = {}
    samples = None
    for layer in layers:
        if layer.get("do_sample") is not None:
            samples = bool(layer["do_sample"])
        elif layer.get("temperature") is not None and not samples:
            samples = None
        values |= {name: value for name, value in layer.items() if name != "do_sample"}
    if samples is False:
        values["temperature"] = 0.0
    elif samples:
        if values.get("temperature") == 0:
            raise PromptError(
                "do_sample is True, but the temperature is 0, which draws nothing; pass a temperature above 0, or "
                "do_sample=False"
            )
        values["temperature"] = values.get("temperature") or 1.0
    return values


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
        elif name not in _NO_EFFECT:
            if is_packed and name != "do_sample":
                raise PromptError(f"{name}={value!r} has no counterpart here; leave it out, or use {', '.join(_NAMES)}")
            found[name] = value
    return found


def _from_model_kwargs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Ours in our words, and the rest for transformers' ``from_pretrained``.

    Raises:
        KVPacketError: one cannot have its effect.
    """
    ours = {name: value for name, value in arguments.items() if name in {*_NAMES, *_ONLY, "do_sample", "max_length"}}
    theirs, _ = passed_on({name: value for name, value in arguments.items() if name not in ours}, {})
    return {**_translated(ours), **({"model_kwargs": theirs} if theirs else {})}


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


def _from_pipeline(pipeline: Any, name: str, own: dict[str, Any]) -> dict[str, Any]:
    """An engine over the model of a transformers pipeline, and the pipeline's own generation arguments.

    Args:
        pipeline: for text generation.
        name: of the model, if it does not know one itself.
        own: arguments beside the pipeline; what the engine is made with is taken out.

    Raises:
        PromptError: an argument is of loading the model, or beside an engine, or the pipeline's cannot be done here.
    """
    if pipeline is None:
        return {}
    if loading := [word for word in ("engine", *_OF_LOADING) if own.get(word) not in (None, "auto", {})]:
        raise PromptError(
            f"{', '.join(loading)} came with a pipeline, which has loaded its model already; pass it to transformers' "
            "pipeline(...) instead, or leave the pipeline out and name the model. store, adapter and min_match_tokens "
            "may stand beside a pipeline"
        )
    given: dict[str, Any] = {}
    for place in _OF_PIPELINES:
        given |= getattr(pipeline, place, {})
    kind = getattr(given.pop("return_type", None), "name", None)  # as transformers keeps return_full_text
    if kind == "TENSORS":
        raise PromptError("return_tensors is True, and answers here are texts; leave it out")
    given = {key: value for key, value in given.items() if key not in _IDLE_IN_PIPELINES}
    settings = _translated({**given, "return_full_text": {"FULL_TEXT": True}.get(kind or "")})
    model = pipeline.model
    name = getattr(model, "name_or_path", "") or name or type(model).__name__
    options = {word: own.pop(word) for word in _BESIDE_PIPELINES if word in own}
    return {**settings, "engine": KVPacketEngine.around(Backbone(model, pipeline.tokenizer, name), **options)}


def _from_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """The template of a tokenizer that was handed over beside the model, perhaps for its template alone."""
    template = getattr(tokenizer, "chat_template", None)
    return {"chat_template_kwargs": {"chat_template": template}} if template else {}
