"""The terminal output of three screens at three widths and three kinds of colour, compared with *.txt.

Each width and each kind of colour occurs once per screen. An escape character is written as ␛. `MHA_NEW_SCREENS=1
pytest -n0 tests/render/screens` rewrites the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCREENS = {
    "truecolor": {"run": 80, "map": 200, "heatmap": 120},
    "256": {"run": 120, "map": 80, "heatmap": 200},
    "none": {"run": 200, "map": 120, "heatmap": 80},
}
_SCRIPT = """
import json, sys
from io import StringIO
from rich.console import Console, Group
from support.layers_made import layered
from support.records import make_record
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.heads.head_map import HeadPattern
from mhacli.render.heads.heatmap import heat_scale, heatmap, pooled_map, scale_caption
from mhacli.render.run.view import run_view

sentence = make_record(("the", "cat", "sat", "on", "the", "mat"), causal=True)
longer = HeadPattern(make_record(tuple(f"t{i}" for i in range(26)), causal=True), 0, 0)

def heatmap_with_caption(screen):
    scale = heat_scale([longer], 0.86, ViewOptions(), screen)
    return Group(heatmap(longer, scale, ViewOptions(), screen), scale_caption([longer], scale, screen, 2))

views = {
    "run": lambda screen: run_view(sentence, ViewOptions(), screen),
    "map": lambda screen: pooled_map(layered(causal=True).of_layer(0), 1, 0, ViewOptions(), screen),
    "heatmap": heatmap_with_caption,
}
emitted = {}
for name, width in json.loads(sys.argv[2]).items():
    colour = None if sys.argv[1] == "none" else sys.argv[1]
    paper = StringIO()
    console = Console(file=paper, width=width, color_system=colour, force_terminal=colour is not None, legacy_windows=False)
    console.print(views[name](Screen(width, colour is not None)))
    emitted[name] = paper.getvalue()
print(json.dumps(emitted))
"""


@pytest.mark.parametrize("colour", SCREENS)
def test_a_terminal_is_sent_what_is_kept(colour: str) -> None:
    command = [sys.executable, "-c", _SCRIPT, colour, json.dumps(SCREENS[colour])]  # rich keeps codes per process
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for name, text in json.loads(done.stdout).items():
        path = HERE / f"{name}_{SCREENS[colour][name]}_{colour}.txt"
        shown = "\n".join(line.rstrip() for line in text.replace("\x1b", "␛").split("\n"))
        if os.environ.get("MHA_NEW_SCREENS"):
            path.write_text(shown)
        assert shown.split("\n") == path.read_text().split("\n"), path.name
