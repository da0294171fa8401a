"""Colour scales on every kind of terminal: lightness rises with the weight in equal steps, and text is readable."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from support.painted import characters

ANSI = {
    "vga": "000 a00 0a0 a50 00a a0a 0aa aaa 555 f55 5f5 ff5 55f f5f 5ff fff",
    "xterm": "000000 cd0000 00cd00 cdcd00 0000ee cd00cd 00cdcd e5e5e5 7f7f7f ff0000 00ff00 ffff00 5c5cff ff00ff 00ffff ffffff",
    "windows": "0c0c0c c50f1f 13a10e c19c00 0037da 881798 3a96dd cccccc 767676 e74856 16c60c f9f1a5 3b78ff b4009e 61d6d6 f2f2f2",
}
"""What terminals make of the first sixteen colours. Source: https://en.wikipedia.org/wiki/ANSI_escape_code, "3-bit and 4-bit"."""
SCALES = ("ramp", "upper", "sink", "less", "more")
LEVELS = range(256)
N_STEPS = {("ramp", "256"): 8, ("ramp", "standard"): 5, ("upper", "256"): 8, ("upper", "standard"): 5}
FEW = 3
"""The least number of steps of a scale of which not much room is needed."""
_SCRIPT = """
import json, sys
from rich.console import Console
from rich.text import Text
from mhacli.render.base.colours import half_block, shade, sink_shade
from mhacli.render.base.colours import change_style
from io import StringIO
scales = {
    "ramp": lambda n: ("x", shade(n)), "upper": lambda n: half_block(n, None), "sink": lambda n: ("x", sink_shade(n)),
    "less": lambda n: ("x", change_style(-n)), "more": lambda n: ("x", change_style(n)),
}
said = {}
for name, scale in scales.items():
    paper = StringIO()
    text = Text()
    for level in range(256):
        text.append(*scale(level))
    Console(file=paper, width=400, color_system=sys.argv[1], force_terminal=True, legacy_windows=False).print(text)
    said[name] = paper.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module", params=["truecolor", "256", "standard"])
def drawn(request):
    """What a terminal is sent for all levels of each scale: rich keeps codes per process, so each system has its own."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT, request.param], capture_output=True, text=True, check=True)
    looks = {
        name: [look for sign, look in characters(text) if sign != "\n"]
        for name, text in json.loads(done.stdout).items()
    }
    return request.param, looks


def rgb(code: tuple[int, ...], palette: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour in an escape code, of the foreground or the background."""
    if code[0] in (38, 48) and code[1] == 2:
        return code[2], code[3], code[4]
    if code[0] in (38, 48):
        number = code[2]
    else:
        number = code[0] % 10 + (8 if code[0] >= 90 else 0)
    if number < 16:
        digits = ANSI[palette].split()[number]
        wide = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
        return tuple(bytes.fromhex(wide))  # type: ignore[return-value]
    if number >= 232:
        return (8 + 10 * (number - 232),) * 3
    cube = (0, 95, 135, 175, 215, 255)
    return cube[(number - 16) // 36], cube[(number - 16) // 6 % 6], cube[(number - 16) % 6]


def luminance(colour: tuple[int, int, int]) -> float:
    """Relative luminance. Source: IEC 61966-2-1 (sRGB); WCAG 2.2, "relative luminance"."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def lightness(colour: tuple[int, int, int]) -> float:
    """L* of 0 … 100. Source: CIE 15:2004, section 8.2.1."""
    y = luminance(colour)
    return 116 * (y ** (1 / 3) if y > (6 / 29) ** 3 else y / (3 * (6 / 29) ** 2) + 4 / 29) - 16


def test_the_larger_a_weight_the_lighter_its_cell_on_every_terminal(drawn):
    system, looks = drawn
    for name in SCALES:
        codes = [look.fore if name == "upper" else look.back for look in looks[name]]
        assert len(codes) == len(LEVELS)
        steps = [code for n, code in enumerate(codes) if not n or code != codes[n - 1]]
        for palette in ANSI:
            found = [lightness(rgb(code, palette)) for code in steps]
            tolerance = (
                0.6 if system == "truecolor" else 0.0
            )  # neighbours in 256 steps differ by less than rounding does
            assert all(b > a - tolerance for a, b in pairwise(found)), (name, palette, found)
        assert len(set(steps)) == len(steps) >= N_STEPS.get((name, system), FEW), name


EVENNESS = {"truecolor": 0.2, "256": 0.2, "standard": 0.7}
"""How far a step of a scale may be from the mean step, as a part of it: the 16 colours are the terminal's choice."""


def test_the_steps_of_a_scale_are_equally_light(drawn):
    system, looks = drawn
    for name in SCALES:
        codes = [look.fore if name == "upper" else look.back for look in looks[name]]
        sample = range(0, 256, 51) if system == "truecolor" else LEVELS
        steps = list(dict.fromkeys(codes[level] for level in sample))
        for palette in ANSI:
            found = [lightness(rgb(code, palette)) for code in steps]
            mean = (found[-1] - found[0]) / (len(found) - 1)
            assert max(abs(b - a - mean) for a, b in pairwise(found)) <= EVENNESS[system] * mean, (name, found)


def test_a_change_is_as_light_as_the_opposite_one(drawn):
    system, looks = drawn
    for less, more in zip(looks["less"], looks["more"], strict=True):
        of_less, of_more = (lightness(rgb(look.back, "xterm")) for look in (less, more))
        assert abs(of_less - of_more) <= (15 if system == "standard" else 5)


def test_text_can_be_read_on_every_step(drawn):
    system, looks = drawn
    least = 3 if system == "standard" else 4  # terminals do not agree on what the sixteen are
    for name in ("ramp", "less", "more"):
        for palette in ("vga", "xterm"):
            for look in looks[name]:
                light, dark = sorted((luminance(rgb(code, palette)) for code in (look.fore, look.back)), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= least, (name, palette, look)


def test_a_sink_has_a_colour_that_the_ramp_never_has(drawn):
    _, looks = drawn
    assert not {look.back for look in looks["sink"][1:]} & {look.back for look in looks["ramp"]} - {
        looks["ramp"][0].back
    }
