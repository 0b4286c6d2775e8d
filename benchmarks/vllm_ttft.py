"""Time to the first token in vLLM: from packets, against vLLM's own prefill of the same tokens.

    python benchmarks/vllm_ttft.py [--tokens 420,840,1680] [--questions 5] [--dtype float32] [--vllm-python PYTHON]

Each question is asked alone, prefix caching off, from packets and then as text; the first tokens from packets are held
against the engine's. vLLM runs in an environment of its own, see ``make test-scale``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvpacket_rag import GenerationSettings, KVPacketEngine, Message
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.demo import corpus_folder
from kvpacket_rag.models import resolve_model
from kvpacket_rag.reading import Reuse
from kvpacket_rag.serving.vllm_prompt import VLLMPrompter

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
FIRST = GenerationSettings(max_new_tokens=4)
_SHORTEST = 40  # tokens of a section


def sections(engine: KVPacketEngine, num_tokens: int) -> list[str]:
    """Of the demo's corpus, together as long as asked for; the titles alone are left out."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus_folder().glob("*.md"))]
    chosen: list[str] = []
    for section in (section.strip() for text in texts for section in text.split("\n## ")):
        if engine.count_tokens(section) >= _SHORTEST and sum(map(engine.count_tokens, chosen)) < num_tokens:
            chosen.append(section)
    return chosen


def chats(texts: list[str], count: int) -> Iterator[list[Message]]:
    """Questions about the same sections."""
    for number in range(count):
        yield [Message("user", "\n\n".join(texts) + f"\n\nIn {number + 2} words: what is this about?")]


def rounds(prompts: list[Any]) -> list[dict[str, Any]]:
    """Warm-up, measurement in turns from packets and as text, and longer answers from packets."""
    bodies = [prompt.body() | {"sampling": {"max_tokens": 1}} for prompt in prompts]
    texts = [{"prompt": body["prompt"], "sampling": body["sampling"]} for body in bodies]
    answers = [body | {"sampling": {"max_tokens": FIRST.max_new_tokens}} for body in bodies]
    turns = [request for both in zip(bodies, texts, strict=True) for request in both]
    batches = [turns[:2], turns[2:], answers]
    return [{"requests": batch, "one_by_one": True} for batch in batches]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="420,840,1680")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-scale" / "vllm" / "bin" / "python"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = KVPacketEngine.load(MODEL, store=folder / "store", dtype=options.dtype)
        texts = [sections(engine, int(n)) for n in options.tokens.split(",")]
        for chosen in texts:
            engine.encode(chosen)
        prompter = VLLMPrompter(engine)
        prompter.card.save(folder / "card.json")
        sets = [list(chats(chosen, options.questions + 1)) for chosen in texts]
        every = Reuse(on_miss="error")  # a chunk that is read as text would make it another measurement
        prompts = [[prompter.prompt(chat, reuse=every) for chat in chosen] for chosen in sets]
        expected = [[list(engine.generate(chat, FIRST).token_ids) for chat in chosen] for chosen in sets]
        job = {
            "llm": {"model": str(resolve_model(MODEL)), "dtype": options.dtype, "enable_prefix_caching": False},
            "connector": {"card": str(folder / "card.json"), "store": str(folder / "store")},
            "rounds": [turn for chosen in prompts for turn in rounds(chosen)],
        }
        print(describe(engine.backbone.dtype, torch.device("cpu")))
        report(run(job, folder, options.vllm_python), prompts, expected)


def run(job: dict[str, Any], folder: Path, python: str) -> list[list[dict[str, Any]]]:
    """Answers by round."""
    given, got = folder / "job.json", folder / "answers.json"
    given.write_text(json.dumps(job))
    script = ROOT / "benchmarks" / "vllm_offline.py"
    subprocess.run([python, "-P", str(script), str(given), str(got)], check=True, env=os.environ, stdout=2)
    return json.loads(got.read_text())["rounds"]  # type: ignore[no-any-return]


def report(found: list[list[dict[str, Any]]], prompts: list[list[Any]], expected: list[list[list[int]]]) -> None:
    """A line a length."""
    print("tokens  from packets  packets, ms  prefill, ms  times sooner  answers as the engine's")
    for number, (chosen, answers) in enumerate(zip(prompts, expected, strict=True)):
        _, turns, given = found[3 * number : 3 * number + 3]
        ours, theirs = (1000 * statistics.median(a["seconds"] for a in turns[first::2]) for first in (0, 1))
        alike = sum(a["token_ids"] == wanted for a, wanted in zip(given, answers, strict=True))
        length, covered = len(chosen[0].token_ids), chosen[0].packet_tokens
        print(
            f"{length:6}  {covered:12}  {ours:11.0f}  {theirs:11.0f}  {theirs / ours:12.1f}  {alike} of {len(answers)}"
        )


if __name__ == "__main__":
    main()
