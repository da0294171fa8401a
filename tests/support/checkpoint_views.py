"""Records of checkpoints of every kind, and what is drawn of them."""

from __future__ import annotations

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.checkpoint.view import layers_view
from mhacli.results.record.record import Generated, NonAttentionLayer, SpanTokens
from support.layers_made import WORDS, corner, layered, spoiled, text_of
from support.records import drawn

HOSTILE = (
    "\x1b[31mred",
    "\u202eevil",
    "漢字漢字漢字",
    "[bold]b[/bold]",
    "á́",
    "\n",
    "x" * 300,
    "[red]",
    "\x9b2J",
    "\u200b",
)
SHORT = text_of(("a", "dog"), parts=())
SPANS = (SpanTokens("animals", ((4, 5),)), SpanTokens("rest", ((8, 9, 10),)))
KEPT = layered(causal=True, generated=Generated((9,), 6, 5))
RECORDS = {
    "run": layered(spans=SPANS),
    "heads": layered(keep=False, n_layers=4, n_heads=12),
    "batch": layered(text_of(WORDS), SHORT, kept=corner()),
    "left": layered(text_of(WORDS), SHORT, causal=True, padding="left", sinks=True),
    "pair": layered(text_of(WORDS[:7]), context=[text_of(WORDS)], n_layers=2),
    "generated": KEPT,
    "sinks": layered(causal=True, windows=(None, 3), sinks=True, n_kv_heads=2),
    "hybrid": layered(without=(NonAttentionLayer(1, "linear_attention"),), n_layers=2),
    "bad": spoiled(layered(n_layers=2), 1, "the keyword \x1b[2J[foo] is not understood"),
    "wide": layered(SHORT, n_heads=70, n_layers=2),
    "hostile": layered(text_of(HOSTILE), spans=(SpanTokens("\x1b]0;", ((1,),)),)),
    "one": layered(text_of((), parts=()), n_layers=1, n_heads=1),
}  # fmt: skip


def view(record, width=80, colour=False, **options):
    return drawn(layers_view(record, ViewOptions(**options), Screen(width, colour)), width)
