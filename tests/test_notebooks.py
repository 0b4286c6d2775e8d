"""The notebooks run from top to bottom, keep their outputs and stay short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


@each
def test_a_notebook_runs_without_an_error(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place).execute()


@each
def test_a_notebook_says_first_what_one_learns_and_keeps_its_outputs(path: Path) -> None:
    first, code = cells(path, "markdown")[0].source, cells(path, "code")
    assert first.startswith("# ") and "You learn" in first
    assert len(code) + len(cells(path, "markdown")) < 20
    assert all(cell.execution_count for cell in code) and any(cell.outputs for cell in code)
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]


def test_the_folders_readme_names_every_notebook() -> None:
    listed = (FOLDER / "README.md").read_text()
    assert NOTEBOOKS and all(f"`{path.name}`" in listed for path in NOTEBOOKS)
