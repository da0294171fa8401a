"""The keys of all screens, as the help lists them."""

from collections.abc import Mapping

from textual.binding import Binding, BindingType

_FAR = 10**9
"""More places than any row has."""


def _keys(display: str, tip: str, actions: Mapping[str, str], short: str = "") -> list[BindingType]:
    """The keys of a line of the help with their actions. The last line of the screen has the
    `short` word, if there is one.
    """
    (names, action), *others = actions.items()
    first = Binding(names, action, short, key_display=display, tooltip=tip)
    return [first, *(Binding(names, action, show=False) for names, action in others)]


_ENDS = [
    *_keys("q Esc", "go back; on the first screen, quit", {"escape,q": "app.back"}, "back"),
    *_keys("?", "this list", {"question_mark": "app.read('help')"}, "help"),
    *_keys("Q Ctrl-C", "quit, from any screen", {"Q,ctrl+c": "app.quit"}),
]
_HEADS = [
    *_keys(
        "h H",
        "the next or previous head; ] and [ do the same",
        {"h,right_square_bracket": "head(1)", "H,left_square_bracket": "head(-1)"},
        "head",
    ),
    *_keys(
        "l L",
        "this head of the next or previous layer; } and { do the same",
        {"l,right_curly_bracket": "layer(1)", "L,left_curly_bracket": "layer(-1)"},
        "layer",
    ),
]
KEYS = {
    "everywhere": [
        *_ENDS,
        *_keys(
            "↑ ↓ ← →",
            "move the cursor; a click does the same",
            {
                "up": "move(-1, 0)",
                "down": "move(1, 0)",
                "left": "move(0, -1)",
                "right": "move(0, 1)",
            },
        ),
        *_keys(
            "PgUp PgDn", "a page up or down", {"pageup": "page(-1, 0)", "pagedown": "page(1, 0)"}
        ),
        *_keys(
            "Home End",
            "the first or last of the row",
            {"home": f"move(0, -1, {_FAR})", "end": f"move(0, 1, {_FAR})"},
        ),
        *_keys(
            "^Home ^End",
            "the first or last row",
            {"ctrl+home": f"move(-1, 0, {_FAR})", "ctrl+end": f"move(1, 0, {_FAR})"},
        ),
        *_keys(
            "e",
            "effects of removed heads or weights, in a record of mha effect",
            {"e": "effects"},
            "effects",
        ),
        Binding(
            "e",
            "say('the record has no effects: mha effect … --save makes one that has')",
            show=False,
        ),
        *_keys("s", "how shades follow attention weights: linear or log", {"s": "scale"}, "scale"),
        *_keys(
            "x",
            "remove sinks and renormalise the rest of each row, or put them back",
            {"x": "sinks"},
            "sinks",
        ),
        *_keys(
            "w",
            "the walkthrough: every tensor with its axes, formula, meaning and cost",
            {"w": "app.read('walk')"},
            "walk",
        ),
        *_keys(
            "i",
            "where the numbers come from: command, versions, seed, self-check",
            {"i": "app.read('origin')"},
        ),
        *_keys(
            ", .",
            "the previous or next sequence",
            {"comma": "sequence(-1)", "full_stop": "sequence(1)"},
        ),
    ],
    "all heads": [
        *_keys(
            "Enter",
            "open the head; so does a click on it while it is chosen",
            {"enter,ctrl+j": "open"},
            "open",
        ),
        *_HEADS,
    ],
    "a head": [
        *_HEADS,
        *_keys(
            "+ - 0",
            "larger or smaller cells, or all of them",
            {"plus,equals_sign": "zoom(1)", "minus": "zoom(-1)", "0": "zoom(0)"},
            "zoom",
        ),
        *_keys(
            "/",
            "jump to a token by typing it, or to a place by its number",
            {"slash": "jump"},
            "find",
        ),
        *_keys("n N", "the next or previous match", {"n": "match(1)", "N": "match(-1)"}),
        *_keys(
            "⇧PgUp ⇧PgDn",
            "a page to the left or right",
            {"shift+pageup": "page(0, -1)", "shift+pagedown": "page(0, 1)"},
        ),
        *_keys("End", "the last key that the query sees", {"end": "end"}),
        *_keys("t T", "more or fewer of the strongest keys", {"t": "most(1)", "T": "most(-1)"}),
        *_keys(
            "Tab",
            "which part the arrows move in: matrix, list, keys, queries",
            {"tab": "app.focus_next", "shift+tab": "app.focus_previous"},
        ),
        *_keys("y", "copy the row as JSON to the terminal's clipboard (OSC 52)", {"y": "copy"}),
    ],
    "effects": [
        *_keys(
            "Home End",
            "the largest or the smallest change",
            {"home": "largest(0)", "end": "largest(-1)"},
            "largest",
        ),
        *_keys("Enter", "open the head that was removed", {"enter,ctrl+j": "open"}, "open"),
        Binding("e", "app.back", show=False),
    ],
    "a text to read": [
        *_ENDS,
        *_keys("↑ ↓", "a line up or down", {"up": "scroll_up", "down": "scroll_down"}, "scroll"),
        *_keys(
            "PgUp PgDn", "a page up or down", {"pageup,b": "page_up", "pagedown,space": "page_down"}
        ),
        *_keys(
            "Home End", "the beginning or the end", {"home,g": "scroll_home", "end,G": "scroll_end"}
        ),
    ],
}
