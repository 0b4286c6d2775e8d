"""Replicas of vLLM with the connector, by Ray Serve LLM, behind one address that speaks OpenAI's API.

In vLLM's environment, with ``pip install "ray[serve]" jsonref hf_transfer pandas pyarrow smart_open`` (Ray's own extra
``llm`` pins another vLLM)::

    kvpacket vllm-card --index library --out card.json
    serve run kvpacket_rag.serving.ray_serve:app model=MODEL card=card.json store=library num_replicas=2

Every replica reads the packets by itself and keeps none of a request's, so any of them answers any request, and more of
them may come and go. Replicas on several machines need the packets in an object store: ``store=s3://… cache=FOLDER``.
``kvpacket serve --backend vllm=http://HOST:8000`` cuts prompts and passes ``kv_transfer_params`` on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray.serve import Application
from ray.serve.llm import LLMConfig, build_openai_app

from kvpacket_rag.serving.vllm_admit import GUARD, Settings
from kvpacket_rag.serving.vllm_card import ServingCard
from kvpacket_rag.store import is_url


class Replicas(BaseModel):
    """What ``serve run`` takes, as ``name=value`` or as ``args`` of a config file.

    Attributes:
        model: folder or hub name, as vLLM takes it.
        name: of the model in requests.
        card: file that ``kvpacket vllm-card`` wrote; dtype and length of a request are its.
        store: see :class:`Settings`, as namespace, cache and cache_bytes.
        num_replicas: to start.
        cpus: of each replica on a machine without GPU; 0 for one GPU each.
        engine: further arguments of vLLM's engine.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    name: str = "served"
    card: str
    store: str
    namespace: str = ""
    cache: str = ""
    cache_bytes: int = 0
    num_replicas: int = Field(1, ge=1)
    cpus: float = Field(0, ge=0)
    engine: dict[str, Any] = {}

    def settings(self) -> Settings:
        """Of the connector; replicas run in folders of their own, so no path is relative."""
        given = {name: getattr(self, name) for name in ("card", "store", "namespace", "cache", "cache_bytes")}
        paths = [name for name in ("card", "store", "cache") if given[name] and not is_url(given[name])]
        return Settings.of(given | {name: str(Path(given[name]).expanduser().absolute()) for name in paths})

    def config(self) -> LLMConfig:
        """As Ray Serve LLM takes it."""
        settings = self.settings()
        card = ServingCard.load(settings.card)
        engine = {
            "dtype": card.signature.dtype,
            "max_model_len": card.plan.max_positions,
            "logits_processors": [GUARD],
            "kv_transfer_config": settings.transfer_config(),
        }
        return LLMConfig(
            model_loading_config={"model_id": self.name, "model_source": self.model},
            deployment_config={"num_replicas": self.num_replicas},
            placement_group_config={"bundles": [{"CPU": self.cpus}]} if self.cpus else None,
            engine_kwargs=engine | self.engine,
        )


def app(args: Mapping[str, Any]) -> Application:
    """The application, for ``serve run``.

    Args:
        args: see :class:`Replicas`.

    Raises:
        KVPacketError: the card cannot be read, or store and cache do not go together.
    """
    return build_openai_app({"llm_configs": [Replicas.model_validate(args).config()]})
