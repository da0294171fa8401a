"""Writes docs/notebook.ipynb: its cells, and the results that they show when a kernel runs them one
after the other.

    python docs/notebook.py PATH_OF_A_CHECKPOINT

The path is that of any checkpoint; the notebook that is kept shows all-MiniLM-L6-v2. Cells run in a
temporary folder, in which the checkpoint is called MiniLM. What they print, such as the progress of
loading, is left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode, v4

FILE = Path(__file__).with_suffix(".ipynb")
TITLE = """# mha: from a sentence to a checkpoint

Twelve cells. They need `pip install "mhacli[hf]"` and, from the ninth on, the path of a checkpoint
that transformers loads."""
CELLS = (
    (
        "A layer with random weights over a sentence: all its heads, and one of them.",
        """\
import mhacli

record = mhacli.inspect("the cat sat on the mat", mhacli.Config(n_heads=4, causal=True))
record""",
    ),
    (
        "One head: a row is a query, a column a key, a number the attention weight.",
        """\
record.pattern(head=2)""",
    ),
    (
        "The weights are an array; those of a query sum to 1.",
        """\
record.pattern(head=2).values.sum(axis=1).round(5).tolist()""",
    ),
    (
        (
            "The statistics of a head; `to_polars()`, `to_pandas()` and `to_arrow()` make a table"
            " of all."
        ),
        """\
row = record.heads.to_dicts()[2]
names = ("entropy", "effective_keys", "distance", "previous", "sink")
{name: round(row[name], 3) for name in names}""",
    ),
    (
        "The same layer without the causal mask. What changed, and where first?",
        """\
other = mhacli.inspect("the cat sat on the mat", mhacli.Config(n_heads=4))
mhacli.diff(record, other)""",
    ),
    (
        "A record is a file, which `mhacli.load` reads.",
        """\
record.save("cat.safetensors", force=True)
mhacli.load("cat.safetensors").self_check.ok""",
    ),
    (
        "An attention of your own. Is it right?",
        """\
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        parts = (self.q, self.k, self.v)
        q, k, v = (part(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


mhacli.check(Attention, arguments={"d_model": 64, "n_heads": 8})""",
    ),
    (
        "With the scale it is.",
        """\
class Scaled(Attention):
    def forward(self, x):
        parts = (self.q, self.k, self.v)
        q, k, v = (part(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts)
        pattern = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.out((pattern @ v).transpose(1, 2).flatten(2))


mhacli.check(Scaled, arguments={"d_model": 64, "n_heads": 8}).summary""",
    ),
    (
        "A checkpoint: name the folder of yours. Is it in order?",
        """\
path = "MiniLM"
mhacli.doctor(path)""",
    ),
    (
        "What its heads do with a sentence, in a call of your own.",
        """\
from transformers import AutoModel, AutoTokenizer

bert, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
with mhacli.inspecting(bert, tokenizer, keep=["pattern"]) as seen:
    bert(**tokenizer("the cat sat on the mat", return_tensors="pt"))
model = seen.record
model""",
    ),
    (
        "The heads that attend most to the previous token.",
        """\
heads = sorted(model.heads, key=lambda head: -(head.previous or 0))
[(head.layer, head.head, round(head.previous, 2)) for head in heads[:5]]""",
    ),
    (
        (
            "The first of them. `model.page()` shows every head, with each weight where the pointer"
            " rests."
        ),
        """\
model.pattern(layer=heads[0].layer, head=heads[0].head)""",
    ),
)


def notebook(path: str) -> NotebookNode:
    """The notebook with what its cells show of the checkpoint at a path. Raises CellExecutionError
    where a cell fails.
    """
    cells = [v4.new_markdown_cell(TITLE, id="title")]
    for number, (words, code) in enumerate(CELLS, 1):
        cells += [
            v4.new_markdown_cell(words, id=f"text-{number}"),
            v4.new_code_cell(code, id=f"code-{number}"),
        ]
    made = v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "MiniLM").symlink_to(Path(path).resolve())
        kernel = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(
                kernel_dirs=[]
            ),  # this interpreter, whatever kernels are installed
            transport="ipc",
            connection_file=f"{folder}/kernel.json",
        )
        client = NotebookClient(
            made, kernel, record_timing=False, resources={"metadata": {"path": folder}}
        )
        settings = {
            "IPYTHONDIR": folder,
            "OMP_NUM_THREADS": "1",
        }  # no user's profile; one order of summing
        client.execute(cleanup_kc=True, env=os.environ | settings)
    for cell in made.cells[2::2]:
        cell.outputs = [output for output in cell.outputs if output.output_type == "execute_result"]
    kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = {"kernelspec": kernelspec, "language_info": {"name": "python"}}
    return made


if __name__ == "__main__":
    nbformat.write(notebook(sys.argv[1]), FILE)
