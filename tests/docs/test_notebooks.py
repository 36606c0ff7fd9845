"""The notebooks of examples/notebooks run to their last cell, with real MPI processes."""

import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples/notebooks"
TIMEOUT = 80  # seconds of a cell


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{beside}{os.pathsep}{os.environ['PATH']}")
    book = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "committed without outputs"
    nbclient.NotebookClient(book, timeout=TIMEOUT, kernel_name="python3").execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    kinds = {kind for output in outputs for kind in output.get("data", ())}
    assert {"image/svg+xml", "text/html"} <= kinds
