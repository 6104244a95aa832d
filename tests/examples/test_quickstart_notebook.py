"""The notebook runs top to bottom, with live progress, a curve and transcripts in its outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def outputs_of(cell) -> str:
    """Everything a cell shows, as text; pictures by their type."""
    shown = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        shown += [str(value) for kind, value in data.items() if kind.startswith("text/")]
        shown += [kind for kind in data if kind.startswith("image/")]
        shown.append(output.get("text", ""))
    return "\n".join(shown)


@pytest.mark.slow
def test_the_notebook_runs_top_to_bottom(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, shown, own, extended, method = (outputs_of(c) for c in notebook.cells if c.cell_type == "code")
    assert "12/12" in trained and "success" in trained  # the panel of the last step
    assert "image/png" in shown and "| success |" in shown and "Before RL" in shown
    assert "Larger" in own and "15/15" in extended and "IProgress" not in trained
    assert 0.0 <= float(extended.split()[-1]) <= 1.0 and "10/10" in method and 0.0 <= float(method.split()[-1]) <= 1.0


def test_the_notebook_is_committed_with_outputs_and_tells_nothing_of_a_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or outputs_of(cell), cell.source
        assert "execution" not in cell.metadata  # when each cell ran
    shown = "\n".join(outputs_of(cell) for cell in notebook.cells)
    assert not re.findall(r"/tmp|/home|/root|elapsed|threads", shown)
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", "\n".join(cell.source for cell in notebook.cells))
    assert (NOTEBOOK.parent / picture).is_file()
