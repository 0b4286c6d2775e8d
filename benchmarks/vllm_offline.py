"""Runs requests through vLLM's own Python API, in vLLM's own environment; a job in, answers out, both as JSON.

    VLLM_PYTHON benchmarks/vllm_offline.py job.json answers.json

A job holds ``llm`` (arguments of vLLM's LLM), ``connector`` (settings of the connector, or null) and ``rounds``. A
round holds ``requests``, may ask for them ``one_by_one``, and may ``move`` a file or folder [from, to] before it
begins. A request holds ``prompt``, ``cache_salt`` and ``kv_transfer_params`` as for ``/v1/completions``, and
``sampling``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

LLM_ARGUMENTS = {"enforce_eager": True, "max_model_len": 2048, "block_size": 32, "disable_log_stats": False}


def load(job: dict[str, Any]) -> Any:
    """vLLM with the connector, if one is asked for."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    arguments = LLM_ARGUMENTS | job["llm"]
    if job.get("connector"):
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVPacketConnector",
            kv_connector_module_path="kvpacket_rag.serving.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=job["connector"],
        )
    return LLM(**arguments)


def ask(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of one batch, and the seconds it took."""
    from vllm import SamplingParams

    prompts, params = [], []
    for request in requests:
        salt = request.get("cache_salt")
        prompts.append({"prompt_token_ids": request["prompt"]} | ({"cache_salt": salt} if salt else {}))
        extra = {"kv_transfer_params": request["kv_transfer_params"]} if request.get("kv_transfer_params") else None
        params.append(SamplingParams(temperature=0, extra_args=extra, **request.get("sampling", {})))
    started = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    outputs = [answer.outputs[0] for answer in answers]
    return [
        {"token_ids": list(output.token_ids), "finish_reason": output.finish_reason, "seconds": seconds}
        for output in outputs
    ]


def main(job_file: str, answers_file: str) -> None:
    """Run a job."""
    job = json.loads(Path(job_file).read_text())
    llm = load(job)
    rounds = []
    for turn in job["rounds"]:
        if move := turn.get("move"):
            Path(move[0]).rename(move[1])
        batches = [[request] for request in turn["requests"]] if turn.get("one_by_one") else [turn["requests"]]
        rounds.append([answer for batch in batches for answer in ask(llm, batch)])
    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    Path(answers_file).write_text(json.dumps({"rounds": rounds, "counts": counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
