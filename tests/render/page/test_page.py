"""The page of a record: its script's data, decoded here by the published schema; its size; and its text."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from support.heads_made import surveyed
from support.hostile import HOSTILE, WEB, escaped
from support.layers_made import WORDS, layered, text_of
from support.records import decoded as decoding
from support.records import make_record, walked, with_sinks

from mhacli.errors import UsageError
from mhacli.render.base.options import ViewOptions
from mhacli.render.heads.drawable import drawable_heads
from mhacli.render.page.document import page, quantised_text
from mhacli.render.page.elements import sentence, tag, text
from mhacli.render.page.maps import EXACT, coded, decoded
from mhacli.render.page.payload import CellEncoding, exact_maps, fitting_maps, map_request
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import HEAD_TYPES, HeadsRequest, HeadStatistics, Kept, Sink
from mhacli.results.record.record import Generated, NonAttentionLayer, UserModule
from mhacli.spec.config import Config

MEGABYTE = 1_048_576
LONG, SHORT, OTHER = (
    ("the", "cat", "sat", "on", "a", "red", "mat"),
    ("the", "dog", "ran"),
    ("le", "chat", "noir", "dort"),
)
NO_KEY = 0xFFFFFFFF


class Parsed(HTMLParser):
    """The elements of a page, its scripts and styles as they are, and its text by the id of the section that it stands in."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.raw, self.texts, self.rows = [], [], [], {}, {}
        self._section, self._inside, self._row = "", [], None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "br"):
            self._inside.append(tag)
        if tag in ("script", "style"):
            self.raw.append([tag, dict(attrs), ""])
        if tag in ("section", "header"):
            self._section = dict(attrs).get("id", "")
        if tag == "tr":
            self._row = []
            self.rows.setdefault(self._section, []).append(self._row)
        if tag in ("td", "th"):
            self._row.append("")

    def handle_endtag(self, tag):
        assert self._inside.pop() == tag, f"{tag} ends where it did not begin"

    def handle_data(self, data):
        if self._inside and self._inside[-1] in ("script", "style"):
            self.raw[-1][2] += data
            return
        self.texts[self._section] = self.texts.get(self._section, "") + data
        if self._row and {"td", "th"} & {*self._inside}:
            self._row[-1] += data


def content(record, **options):
    """What the script of a record's page reads, and the page itself."""
    source = page(record, ViewOptions(**options))
    (found,) = [text for _, attributes, text in Parsed(source).raw if attributes.get("id") == "record"]
    return json.loads(found), source


def unpacked(text, kind):
    return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), kind)


def mask_of(found, index):
    mask = found["masks"][found["maps"][index]["mask"]]
    n = mask["rows"] * mask["columns"]
    return np.unpackbits(unpacked(mask["bits"], np.uint8))[:n].reshape(mask["rows"], mask["columns"]).astype(bool)


def shares_of(found, index):
    """The shares of a map as a reader of the schema gets them: −1 where masked."""
    own, allowed = found["maps"][index], mask_of(found, index)
    kind = {"f32": "<f4", "u8": "u1"}[own["code"]]
    numbers = unpacked(own["cells"], kind).reshape(allowed.shape)
    if own["code"] == "f32":
        return np.where(allowed, numbers.astype(float), -1)
    weights = own["largest"] * (numbers.astype(float) / 254) ** 2
    weights[numbers == 255] = np.nan
    weights[:, own["sink_columns"]] += sinks_of(found, index)
    return np.where(allowed, weights, -1)


def sinks_of(found, index):
    own = found["maps"][index]
    return unpacked(own["of_sinks"], "<f4").reshape(-1, len(own["sink_columns"]))


def expected_shares(record, sequence, head):
    """The pattern without padding, from the record's arrays."""
    q0, k0 = record.first_query(sequence), record.first_key(sequence)
    rows = slice(q0, q0 + len(record.sequences[sequence].tokens))
    columns = slice(k0, k0 + len(record.keys[sequence].tokens))
    allowed = record.arrays["allowed"][sequence, 0, rows, columns]
    return np.where(allowed, record.arrays["pattern"][sequence, head, rows, columns].astype(float), -1)


def by_blocks(shares, size):
    """Means over the queries that see a key of what all keys of a block get, in loops."""
    n_rows, n_columns = shares.shape
    blocks = np.full((-(-n_rows // size), -(-n_columns // size)), -1.0)
    for row, column in np.ndindex(*blocks.shape):
        queries = [q for q in range(row * size, min(n_rows, row * size + size)) if (shares[q] >= 0).any()]
        cells = shares[queries, column * size : column * size + size]
        if (cells >= 0).any():
            blocks[row, column] = np.where(cells >= 0, cells, 0).sum() / len(queries)
    return blocks


def all_drawn(record, **options):
    heads = drawable_heads(record, ViewOptions(**options))
    return [map_request(head, b, options.get("rows")) for head in heads for b in range(len(record.sequences))]


def reread(maps):
    """Maps as the script reads them."""
    masks = [{"rows": mask.rows, "columns": mask.columns, "bits": mask.bits} for mask in maps.masks]
    return {"maps": [json.loads(one.json) for one in maps.maps], "masks": masks}


# ------------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("causal", [False, True])
def test_every_cell_of_a_short_record_is_exact(causal):
    record = make_record(LONG, SHORT, causal=causal, n_heads=3)
    found, _ = content(record)
    assert (found["schema"], found["sequences"], len(found["maps"]), found["quantised"]) == ("mha.page/1", 2, 6, None)
    for head in range(3):
        for sequence in range(2):
            index = head * 2 + sequence
            assert np.array_equal(shares_of(found, index), expected_shares(record, sequence, head))
            assert (found["maps"][index]["exact"], found["maps"][index]["block"]) == (True, 1)
            assert np.array_equal(unpacked(found["maps"][index]["seen"], "<f4"), np.ones(7 if sequence == 0 else 3))
    assert [found["texts"][i] for i in found["layers"][0]["queries"]] == [list(LONG), list(SHORT)]
    assert found["layers"][0]["keys"] == found["layers"][0]["queries"]
    assert len(found["masks"]) == 2


def test_keys_of_a_context_are_its_tokens():
    record = make_record(SHORT, LONG, context=[OTHER, SHORT])
    found, _ = content(record)
    (layer,) = found["layers"]
    assert [found["texts"][i] for i in layer["queries"]] == [list(SHORT), list(LONG)]
    assert [found["texts"][i] for i in layer["keys"]] == [list(OTHER), list(SHORT)]
    assert len(found["texts"]) == 3
    assert shares_of(found, 3).shape == (7, 3)
    assert np.array_equal(shares_of(found, 3), expected_shares(record, 1, 1))


def test_padding_on_the_left_is_left_out():
    record = make_record(LONG, SHORT)
    arrays = {
        name: np.concatenate([array[:1], np.roll(array[1:], (4, 4), (-2, -1))]) if array.ndim == 4 else array
        for name, array in record.arrays.items()
    }
    record = replace(record, config=replace(record.config, padding="left"), arrays=arrays)
    found, source = content(record)
    assert np.array_equal(shares_of(found, 3), record.arrays["pattern"][1, 1, 4:, 4:].astype(float))
    assert "padding is left out" in Parsed(source).texts["notes"]


def test_a_number_that_is_none_stays_none_in_every_code():
    record = make_record(LONG, causal=True)
    record.arrays["pattern"][0, 1, 4, :5] = np.nan
    found, source = content(record)
    assert np.array_equal(np.isnan(shares_of(found, 1)[4]), np.arange(7) < 5)
    assert "5 cells marked ? are not a number" in Parsed(source).texts["notes"]
    codes = coded(np.array([0.5, np.nan, 0.0]), 0.5)
    assert codes.tolist() == [254, 255, 0]
    assert decoded(codes, 0.5).tolist()[::2] == [0.5, 0.0]


def test_weights_of_64_bits_are_reported_as_rounded():
    record = make_record(LONG)
    found, source = content(record)
    assert found["bits"] == 32
    assert "rounded" not in Parsed(source).texts["notes"]
    record.arrays["pattern"] = record.arrays["pattern"].astype(float) / 3
    found, source = content(record)
    assert found["bits"] == 64
    assert "as the record holds them, rounded to 32-bit floats" in Parsed(source).texts["notes"]
    assert shares_of(found, 1) == pytest.approx(record.arrays["pattern"][0, 1], rel=6e-8)


def test_sinks_are_the_keys_that_the_record_says_are_some():
    record = make_record(LONG, causal=True)
    said = HeadStatistics(head=1, sinks=(Sink(0, 0, 0.5, 0.1), Sink(0, 3, 0.5, 0.1), Sink(0, 5, 0.11, 0.1)))
    found, source = content(replace(record, heads=(record.heads[0], said)))
    assert [own["sinks"] for own in found["maps"]] == [[], [0, 3]]
    assert [own["first_tokens"] for own in found["maps"]] == [[], [0]]
    weights = expected_shares(record, 0, 1)
    assert np.array_equal(sinks_of(found, 1), np.where(weights < 0, 0, weights)[:, [0, 3]])
    rest = np.where(weights < 0, 0, weights).copy()
    rest[:, [0, 3]] = 0
    left = rest.sum(axis=1)
    renormalised = np.where(left[:, None] > 1e-6, rest / np.maximum(left, 1e-9)[:, None], 0)
    own = renormalised[
        2:
    ].max()  # rows from the third on have a choice beside sinks, as have all rows that see two keys
    assert found["scale"]["largest_without_sinks"] >= own - 1e-9
    assert found["scale"]["largest"] == pytest.approx(record.arrays["pattern"][0, :, 1:].max(), abs=1e-7)
    uniform = np.tri(7) / np.arange(1, 8)[:, None]
    assert [own["uniform"] for own in found["maps"]] == pytest.approx([0, uniform[:, [0, 3]].sum() / 7])
    notes = Parsed(source).texts["notes"]
    assert re.search(r"sinks: 0 “\S+” in 1 map, 3 “on” in 1 map\. They get", notes)


def test_where_no_key_is_a_sink_nothing_is_reported_to_be_taken_out():
    found, source = content(make_record(LONG, causal=True), hide_sinks=True)
    assert [(own["sinks"], own["removed"]) for own in found["maps"]] == [([], 0.0)] * 2
    notes = Parsed(source).texts["notes"]
    assert "no key is a sink" in notes
    assert "taken out" not in notes


def test_blocks_know_what_uniform_attention_gives_a_first_token_that_is_a_sink():
    record = with_sinks(surveyed("the cat sat on the mat " * 50, "a dog", causal=True, n_heads=2), 0, 1)
    found, _ = content(record)
    expected = [np.mean(1 / np.arange(1, n + 1)) for n in (300, 2)]
    assert [own["sinks"] for own in found["maps"]] == [[0]] * 4
    assert [own["uniform"] for own in found["maps"]] == pytest.approx([*expected, *expected], rel=1e-5)


def test_a_learned_sink_takes_what_no_key_gets():
    record = layered(text_of(WORDS), n_layers=1, n_heads=2, sinks=True)
    found, source = content(record)
    pattern = record.arrays["layers.0.pattern"][0, 1].astype(float)
    assert unpacked(found["maps"][1]["learned"], "<f4") == pytest.approx(1 - pattern.sum(axis=1), abs=1e-6)
    assert "sink logits, which are not keys, take" in Parsed(source).texts["notes"]


def test_a_pair_of_texts_gives_each_kind_of_layer_its_own():
    record = layered(text_of(WORDS), context=[text_of(OTHER, parts=())], n_layers=2, n_heads=3)
    found, _ = content(record)
    assert [layer["label"] for layer in found["layers"]] == [
        "encoder layer 0", "encoder layer 1", "decoder layer 0", "cross layer 0", "decoder layer 1", "cross layer 1",
    ]  # fmt: skip
    sizes = [(len(found["texts"][own["queries"][0]]), len(found["texts"][own["keys"][0]])) for own in found["layers"]]
    assert sizes == [(6, 6), (6, 6), (15, 15), (15, 6), (15, 15), (15, 6)]
    assert [head["layer"] for head in found["heads"]] == [i // 3 for i in range(18)]
    assert found["heads"][10]["label"] == "cross layer 0 · head 1"
    assert shares_of(found, 10) == pytest.approx(record.arrays["layers.3.pattern"][0, 1], abs=0)


def test_blocks_of_head_statistics_are_carried_as_they_are():
    record = surveyed(
        "the cat sat on the mat " * 50, "a dog", causal=True, n_heads=2, wanted=HeadsRequest(kept=Kept((3, 170), 2))
    )
    block = record.survey.block
    found, source = content(record)
    assert {own["block"] for own in found["maps"]} == {block}
    assert block > 1
    weights = shares_of(found, 2)
    assert np.array_equal(np.maximum(weights, 0), record.arrays["map"][0, 1])
    asked = found["maps"][2]["asked"]
    assert (asked["places"], asked["k"]) == ([3, 170], 2)
    assert unpacked(asked["keys"], "<u4").reshape(2, 2).tolist() == record.arrays["top_keys"][0, 1].tolist()
    assert np.array_equal(unpacked(asked["shares"], "<f4").reshape(2, 2), record.arrays["top_shares"][0, 1])
    assert found["maps"][3]["asked"] is None  # the other text ends before any of them
    assert found["scale"]["kind"] == "log"
    notes = Parsed(source).texts["notes"]
    assert f"a cell stands for {block} × {block} tokens" in notes
    assert "never whole matrices" in notes


# -------------------------------------------------------------------------------------------------------------- budget


def test_a_code_is_never_further_from_a_weight_than_half_of_its_step_there():
    weights = np.concatenate([np.linspace(0, 0.7, 2001), 10.0 ** -np.arange(1, 9)])
    found = decoded(coded(weights, 0.7), 0.7)
    roots = np.sqrt(weights / 0.7)
    steps = 0.7 * ((roots + 0.5 / 254) ** 2 - roots**2)
    assert (np.abs(found - weights) <= steps + 1e-12).all()


ROOMS = [(200_000, "f32", 1), (25_000, "u8", 1), (11_000, "u8", 2), (1, "u8", 2)]


@pytest.mark.parametrize(("room", "code", "factor"), ROOMS)
def test_the_finest_maps_that_fit_are_taken_and_mean_what_the_record_says(room, code, factor):
    tokens = [f"t{i}" for i in range(43)]
    record = layered(text_of(tokens, parts=()), n_layers=2, n_heads=5, causal=True)
    maps = fitting_maps(all_drawn(record), room, rows_first=False)
    assert maps.encoding == CellEncoding(code, factor)
    assert maps.is_small == (maps.n_bytes <= room) == (room > 1)
    found = reread(maps)
    for index in (0, 7):
        pattern = expected_shares(record.of_layer(index // 5), 0, index % 5)
        own = by_blocks(pattern, factor)
        weights = shares_of(found, index)
        assert np.array_equal(weights < 0, own < 0)
        difference = np.abs(weights - own).max()
        assert difference <= maps.error + 1e-6
        assert maps.error <= {"f32": 1e-7, "u8": 5e-3}[code]
        if code == "u8":
            assert difference > 1e-7


def test_an_estimate_that_was_too_hopeful_is_found_out():
    record = layered(text_of([f"t{i}" for i in range(43)], parts=()), n_layers=2, n_heads=5, causal=True)
    uniform = np.tri(45) / np.arange(1, 46)[:, None]
    for index in range(1, 10, 2):  # those that are tried
        record.arrays[f"layers.{index // 5}.pattern"][0, index % 5] = uniform
    maps = fitting_maps(all_drawn(record), 27_000, rows_first=False)
    assert maps.encoding == CellEncoding("u8", 1)
    assert maps.n_bytes <= 27_000
    assert len(maps.maps) == 10


def test_what_is_left_beside_sinks_loses_nothing_to_a_coarse_code():
    record = with_sinks(layered(text_of(WORDS), n_layers=1, n_heads=1, causal=True), 0)
    record.arrays["layers.0.pattern"][..., 0] += 3
    record.arrays["layers.0.pattern"] /= record.arrays["layers.0.pattern"].sum(-1, keepdims=True)
    found = reread(fitting_maps(all_drawn(record), 1, rows_first=False))
    own = found["maps"][0]
    columns = own["sink_columns"]
    assert (own["code"], columns) == ("u8", own["sinks"])
    assert not unpacked(own["cells"], "u1").reshape(15, 15)[:, columns].any()
    exact = expected_shares(record.of_layer(0), 0, 0)
    assert np.array_equal(shares_of(found, 0)[:, columns], exact[:, columns])


def test_the_strongest_keys_of_every_query_are_exact_where_cells_are_not():
    tokens = [f"t{i}" for i in range(60)]
    record = layered(text_of(tokens, parts=()), n_layers=1, n_heads=3, causal=True)
    drawn = all_drawn(record)
    coarse = fitting_maps(drawn, 1, rows_first=False)
    assert (coarse.n_keys, coarse.n_rows) == (0, 0)
    maps = fitting_maps(drawn, coarse.n_bytes + 4_300, rows_first=False)
    assert maps.encoding.code == "u8"
    assert 0 < maps.n_keys < 8
    for head, own in enumerate(reread(maps)["maps"]):
        pattern = record.arrays["layers.0.pattern"][0, head]
        k = own["top"]["k"]
        keys, weights = (
            unpacked(own["top"][name], kind).reshape(62, k) for name, kind in (("keys", "<u4"), ("shares", "<f4"))
        )
        for query in range(62):
            order = sorted(range(query + 1), key=lambda key: (-pattern[query, key], key))[:k]
            n = len(order)
            assert keys[query].tolist() == [*order, *[NO_KEY] * (k - n)]
            assert weights[query, :n].tolist() == pattern[query, order].tolist()


def test_rows_that_were_requested_come_before_the_strongest_keys():
    tokens = [f"t{i}" for i in range(60)]
    record = layered(text_of(tokens, parts=()), n_layers=1, n_heads=3, causal=True)
    room = fitting_maps(all_drawn(record), 1, rows_first=False).n_bytes + 2_500
    maps = fitting_maps(all_drawn(record, rows=(5, 40)), room, rows_first=True)
    assert (maps.n_rows, maps.n_keys) == (2, 0)
    own = reread(maps)["maps"][2]["rows"]
    assert own["places"] == [5, 40]
    rows = unpacked(own["shares"], "<f4").reshape(2, 62)
    assert np.array_equal(rows, expected_shares(record.of_layer(0), 0, 2)[[5, 40]].astype(np.float32))


def test_a_page_asks_for_the_rows_that_its_options_name(monkeypatch):
    record = layered(text_of([f"t{i}" for i in range(300)], parts=()), n_layers=1, n_heads=8)
    asked = []

    def spied(drawn, room, *, rows_first):
        asked.append(rows_first)
        return fitting_maps(drawn, room, rows_first=rows_first)

    monkeypatch.setattr("mhacli.render.page.document.fitting_maps", spied)
    for rows, places in ((None, [301]), ((7, 200), [7, 200])):
        found, source = content(record, rows=rows)
        assert [own["rows"]["places"] for own in found["maps"]] == [places] * 8
        assert ("the row of the last query" in Parsed(source).texts["notes"]) == (rows is None)
        assert not found["maps"][0]["exact"]
    assert asked == [False, True]


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.full)], ids=["causal", "all"])
def large(request):
    """Twelve layers of twelve heads over 512 tokens with random shares, and what its page carries."""
    record = layered(text_of(SHORT), n_layers=12, n_heads=12, causal=request.param)
    rng, allowed = np.random.default_rng(5), np.tri(512, dtype=bool) | (not request.param)
    of_five_tokens = ("entropy", "strongest_key", "scores", "visible", "participation")
    arrays = {name: array for name, array in record.arrays.items() if not name.endswith(of_five_tokens)}
    for layer in range(12):
        raised = np.exp(2 * rng.standard_normal((1, 12, 512, 512), dtype=np.float32)) * allowed
        arrays[f"layers.{layer}.pattern"] = raised / raised.sum(-1, keepdims=True)
        arrays[f"layers.{layer}.allowed"] = allowed[None, None]
    text = text_of([f"w{i * 7919 % 1009}" for i in range(510)], parts=())
    record = replace(record, sequences=(text,), arrays=arrays)
    return record, *content(record)


@pytest.mark.full
def test_a_page_of_144_heads_and_512_tokens_is_below_a_megabyte(large):
    record, found, source = large
    assert len(source.encode()) <= MEGABYTE
    assert len(found["maps"]) == 144
    factor, error = found["quantised"]["block"], found["quantised"]["error"]
    assert found["quantised"]["text"] in Parsed(source).texts["notes"]
    assert factor <= 8
    for index in (0, 77, 143):
        own = by_blocks(expected_shares(record.of_layer(index // 12), 0, index % 12), factor)
        assert np.abs(shares_of(found, index) - own).max() <= error + 1e-6
    assert error < 0.005


def test_rows_beyond_those_that_a_page_takes_are_reported():
    record = layered(text_of([f"t{i}" for i in range(300)], parts=()), n_layers=1, n_heads=6)
    found, source = content(record, rows=tuple(range(50)))
    assert found["maps"][0]["rows"]["places"] == [*range(32)]
    assert "the rows of chosen queries, at most 32 a text; 18 chosen rows had no room" in Parsed(source).texts["notes"]


def test_the_error_that_a_page_shows_is_never_less_than_it_is():
    record = layered(text_of([f"t{i}" for i in range(43)], parts=()), n_layers=2, n_heads=5)
    for room in (30_000, 11_000, 1):
        maps = fitting_maps(all_drawn(record), room, rows_first=False)
        told = re.search(r"is stored at most (\S+) off", quantised_text(maps))
        assert maps.error <= float(told[1]) <= 1.1 * maps.error
        assert ("so that the page stays below" in quantised_text(maps)) == maps.is_small


def test_everything_is_in_a_full_page_whatever_its_size():
    tokens = [f"w{i}" for i in range(300)]
    record = layered(text_of(tokens, parts=()), n_layers=2, n_heads=2)
    found, source = content(record, full=True)
    assert found["quantised"] is None
    assert len(source.encode()) > MEGABYTE
    for index in range(4):
        assert np.array_equal(shares_of(found, index), expected_shares(record.of_layer(index // 2), 0, index % 2))


def test_a_page_that_its_tokens_fill_says_that_it_is_larger():
    record = make_record([f"{'long' * 900}{i:03}" for i in range(300)])
    found, source = content(record)
    assert len(source.encode()) > MEGABYTE
    assert "It is still above 1.0 MiB" in Parsed(source).texts["notes"]
    assert found["maps"][0]["code"] != "f32"


# ------------------------------------------------------------------------------------------------------------- the page


def test_nothing_of_a_token_becomes_an_element_or_a_script():
    tokens = [*WEB, *HOSTILE, "a b", "\u2028", "-->"]
    record = make_record(tokens, context=[[*reversed(tokens)]])
    record = replace(walked(record), command=("mha", "run", WEB[0], "\x1b[2J"), weights=WEB[1])
    plain = Parsed(page(make_record(LONG, context=[SHORT]), ViewOptions()))
    found, source = content(record)
    parsed = Parsed(source)
    assert set(parsed.tags) - set(plain.tags) <= {
        "details",
        "summary",
        "pre",
    }  # of the walk, which the plain one has not
    assert parsed.tags.count("script") == 2
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on") or name in ("src", "style", "srcset")]
    assert {value for _, name, value in parsed.attributes if name == "href"} == {"#chosen"}
    shown = [escaped(token).replace(" ", "␣") for token in tokens]
    assert found["texts"][0][:9] == shown[:9]
    assert [label.removeprefix("◌") for label in found["texts"][0]] == [s for s in shown]
    (raw,) = [text for _, attributes, text in parsed.raw if attributes.get("id") == "record"]
    assert raw.isascii()
    assert not set("<>&") & {*raw}
    assert "<script>alert(1)</script>" in parsed.texts["top"]
    assert "\\x1b[2J" in parsed.texts["provenance"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2060-\u2069\ufeff]", source)


def test_an_attribute_ends_where_it_should():
    parsed = Parsed(tag("a", text("<b>"), title='"><img src=x', data_head="&quot;"))
    assert parsed.tags == ["a"]
    assert parsed.attributes == [("a", "title", '"><img src=x'), ("a", "data-head", "&quot;")]
    assert parsed.texts == {"": "<b>"}


def test_the_policy_allows_our_script_and_style_alone():
    source = page(make_record(), ViewOptions())
    parsed = Parsed(source)
    (policy,) = [
        value for tag, name, value in parsed.attributes if (tag, name) == ("meta", "content") and "src" in value
    ]
    (script,) = [text for tag, attributes, text in parsed.raw if tag == "script" and not attributes]
    (style,) = [text for tag, _, text in parsed.raw if tag == "style"]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; base-uri 'none'; "
        "form-action 'none'"
    )
    assert "\r" not in source
    assert not re.search("</|<!--", script.replace("</>", ""))
    assert ("html", "lang", "en") in parsed.attributes
    assert ("meta", "charset", "utf-8") in parsed.attributes


def sure(record, kinds):
    """The record with heads of these kinds, each as sure as is said."""
    layers = [
        replace(head, kind=kind, certainty=certainty)
        for head, (kind, certainty) in zip(record.heads, kinds, strict=True)
    ]
    return replace(record, heads=tuple(layers))


def test_the_head_that_is_surest_of_its_kind_is_seen_first():
    kinds = [("mixed", 0.99), ("local", 0.4), ("sink", 0.7), ("uniform", 0.98), ("induction", 0.7), ("local", None)]
    record = sure(layered(text_of(WORDS), n_layers=2, n_heads=3), kinds)
    found, source = content(record)
    assert found["begin"] == 2
    assert (
        "shown first: layer 0 · head 2, the head with the largest excess over uniform attention: first token .70"
        in Parsed(source).texts["notes"]
    )
    assert content(record, heads=(1, 0))[0]["begin"] == 0
    assert content(make_record(LONG))[0]["begin"] == 0


@pytest.mark.parametrize(("n_tokens", "scale"), [(62, "linear"), (63, "log")])
def test_long_texts_are_drawn_on_a_log_scale_unless_another_is_requested(n_tokens, scale):
    record = layered(text_of([f"t{i}" for i in range(n_tokens)], parts=()), n_layers=1, n_heads=2)
    found, source = content(record)
    assert len(found["texts"][0]) == n_tokens + 2
    assert found["scale"]["kind"] == scale
    assert f"initial scale: {scale}" in Parsed(source).texts["notes"]
    assert content(record, map_scale="rank")[0]["scale"]["kind"] == "rank"
    assert content(record, map_scale="linear")[0]["scale"]["kind"] == "linear"


def test_what_the_first_token_gets_has_another_name_than_sinks():
    parsed = Parsed(page(layered(text_of(WORDS), n_layers=2, n_heads=3), ViewOptions()))
    assert "first" in parsed.rows["statistics"][0]
    assert "sink" not in parsed.texts["statistics"]


def test_a_record_of_head_statistics_says_that_its_steps_leave_out_attention():
    record = surveyed("the cat sat on the mat and the dog", causal=True)
    said = Parsed(page(record, ViewOptions())).texts["walk"]
    assert "total" not in said
    assert "these steps alone: " in said
    assert "attention itself and what follows are not counted" in said
    assert "All of it, attention too, took" in said
    whole = Parsed(page(walked(make_record(causal=True)), ViewOptions())).texts["walk"]
    assert "total" in whole
    assert "these steps alone" not in whole


def test_statistics_can_be_read_without_a_script():
    record = layered(text_of(WORDS), n_layers=2, n_heads=3)
    source = page(record, ViewOptions())
    parsed = Parsed(source)
    headings, *rows = parsed.rows["statistics"]
    assert headings[:4] == ["layer", "head", "head type", "H"]
    assert [row[:2] for row in rows[:6]] == [[str(i // 3), str(i % 3)] for i in range(6)]
    for row, head in zip(rows, record.heads, strict=False):
        assert row[3] == f"{head.entropy:.2f}"
        assert row[headings.index("prev")] == f"{head.previous:.3f}".removeprefix("0")
        assert HEAD_TYPES[head.kind].name in row[2]
    assert rows[6][2].startswith("if uniform") or rows[6][2].startswith("uniform")
    assert [value for _, name, value in parsed.attributes if name == "data-head"] == list("012345")
    assert ("th", "scope", "col") in parsed.attributes
    weights = [value for _, name, value in parsed.attributes if name == "data-value"]
    assert weights[0] == f"{100 * record.heads[0].entropy_share:.0f}"
    assert "H = entropy in nats" in parsed.texts["statistics"]


def test_statistics_follow_the_order_that_was_requested_and_name_the_head_that_they_are_of():
    record = layered(text_of(WORDS), n_layers=1, n_heads=4)
    parsed = Parsed(page(record, ViewOptions(sort="entropy", heads=(3, 1, 2))))
    ranked = sorted((head for head in record.heads if head.head), key=lambda head: -head.entropy)
    assert [row[0] for row in parsed.rows["statistics"][1:4]] == [str(head.head) for head in ranked]
    places = [value for _, name, value in parsed.attributes if name == "data-head"]
    assert places == [str(head.head - 1) for head in ranked]


def test_the_walk_is_a_table_and_its_story_text():
    record = walked(make_record(causal=True))
    parsed = Parsed(page(record, ViewOptions()))
    headings, *rows = parsed.rows["walk"]
    assert headings == ["step", "axes", "what", "memory", "FLOPs", "size", "time", "values"]
    assert [row[0] for row in rows] == ["1 qk", "2 scores", "3 pattern", "4 z", "5 out"]
    assert rows[2][1] == "batch 1 · head 2 · query 3 · key 3"
    assert "pattern = the formula of pattern" in rows[2][2]
    assert "weights: o_proj.weight [6, 7]" in rows[4][2]
    assert "2 NaN" in rows[4][7]
    assert "cell: head 0, query 1 “cat”, key 0 “the”" in parsed.texts["walk"]
    assert "all three routes agree" in parsed.texts["walk"]


def test_a_decoding_has_a_row_for_each_step():
    record = decoding(make_record(LONG, causal=True), prompt_len=2)
    parsed = Parsed(page(record, ViewOptions()))
    assert "decoding: “the cat sat on a red mat”" in parsed.texts["top"]
    headings, *rows = parsed.rows["walk"]
    assert [row[0] for row in rows] == ["step 0, prefill", *(f"step {n}, decode" for n in range(1, 6))]
    assert rows[0][1] == "the cat"
    assert rows[3][headings.index("time")] == "4\u00a0ms"
    assert rows[3][headings.index("q")] == "[1,\u00a02,\u00a01,\u00a03]"


def test_what_a_record_does_not_hold_is_noted():
    record = make_record(LONG)
    bare = replace(record, arrays={name: array for name, array in record.arrays.items() if name not in ("pattern",)})
    found, source = content(bare)
    assert (found["heads"], found["maps"]) == ([], [])
    parsed = Parsed(source)
    assert "--keep pattern keeps it" in parsed.texts["nothing"]
    assert not {"thumbnails", "matrix-area", "tokens-area"} & {
        value for _, name, value in parsed.attributes if name == "id"
    }
    module = UserModule("mine.py:Mine", (), "m(x)", (("batch", 1),), 1, (1, 7, 6), (1, 7, 6), "printed <b>")
    own = replace(record, module=module, heads=(), arrays={}, sequences=record.sequences)
    parsed = Parsed(page(own, ViewOptions()))
    assert "shapes of mine.py:Mine" in parsed.texts["top"]
    assert "keeps shapes and no matrices" in parsed.texts["nothing"]
    part = layered(text_of(WORDS), n_layers=2, without=[NonAttentionLayer(1, "mamba")])
    arrays = {name: a for name, a in part.arrays.items() if name not in ("layers.1.pattern", "layers.1.map")}
    found, source = content(replace(part, arrays=arrays))
    notes = Parsed(source).texts["notes"]
    assert "not drawn, because the record has neither pattern nor map: layer 2" in notes
    assert "without an attention matrix: layer 1 (mamba)" in notes
    assert {head["layer"] for head in found["heads"]} == {0}


def test_training_and_generation_are_reported():
    parsed = Parsed(page(make_record(LONG, dropout=0.25), ViewOptions()))
    assert "the pattern is drawn before dropout (0.25)" in parsed.texts["notes"]
    made = Generated((12,), 3, 3)
    parsed = Parsed(page(layered(text_of(WORDS), generated=made, causal=True), ViewOptions()))
    assert "3 tokens generated" in parsed.texts["top"]


def test_options_choose_what_is_drawn_and_the_page_says_so():
    record = make_record(LONG, SHORT, OTHER, n_heads=3)
    found, source = content(record, heads=(2, 0), sequences=(2, 1), hide_sinks=True, map_scale="rank")
    assert [head["head"] for head in found["heads"]] == [2, 0]
    assert (found["numbers"], found["sequences"], found["hide_sinks"]) == ([2, 1], 2, True)
    assert found["scale"]["kind"] == "rank"
    assert np.array_equal(shares_of(found, 1), expected_shares(record, 1, 2))
    notes = Parsed(source).texts["notes"]
    assert "shown: heads 0, 2 only" in notes
    assert "shown: sequences 1, 2 of 3 only" in notes
    assert [row[0] for row in Parsed(source).rows["statistics"][1:]] == ["0", "2"]
    layers = layered(text_of(WORDS))
    found, source = content(layers, layers=((None, 1),))
    assert [layer["label"] for layer in found["layers"]] == ["layer 1"]
    assert "shown: layer 1 only" in Parsed(source).texts["notes"]
    with pytest.raises(UsageError) as fault:
        page(record, ViewOptions(heads=(3,)))
    assert fault.value.message.startswith("--head 3 ")
    with pytest.raises(UsageError) as fault:
        page(record, ViewOptions(sequences=(3,)))
    assert fault.value.message.startswith("--sequence 3 ")


def test_random_rows_have_a_title_of_their_own():
    record = make_record(LONG)
    parsed = Parsed(page(replace(record, config=replace(record.config, random=(1, 7))), ViewOptions()))
    assert "attention over random rows" in parsed.texts["top"]
    assert Config(random=(1, 7)).random == (1, 7)


@pytest.mark.full
def test_the_same_record_gives_the_same_bytes_in_any_process_and_without_torch(tmp_path):
    record = surveyed("the cat sat on the mat and the dog", causal=True)
    record.save(str(tmp_path / "record"))
    loaded = page(storage.load(str(tmp_path / "record")), ViewOptions())
    program = (
        "import hashlib, sys; from mhacli.results.record import storage;"
        "from mhacli.render.base.options import ViewOptions;"
        "from mhacli.render.page.document import page; made = page(storage.load(sys.argv[1]), ViewOptions());"
        "assert 'torch' not in sys.modules; print(hashlib.sha256(made.encode()).hexdigest())"
    )
    for seed, columns in (("1", "40"), ("2", "200")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "record")],
            env={"PYTHONHASHSEED": seed, "COLUMNS": columns, "LC_ALL": "C", "FORCE_COLOR": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == hashlib.sha256(loaded.encode()).hexdigest()


def test_no_maps_take_no_room():
    assert exact_maps([]).n_bytes == 0


# ----------------------------------------------------------------------------------------- what weights are made of


def with_values(record, n_kv_heads):
    """The record with random values of so many kv heads, one of them 3 wide."""
    k_len = max(len(text.tokens) for text in record.keys)
    v = np.random.default_rng(3).normal(size=(len(record.sequences), n_kv_heads, k_len, 3)).astype(np.float32)
    return replace(record, arrays={**record.arrays, "v": v})


def test_scores_products_results_and_values_are_those_of_each_sequences_own_tokens():
    record = with_values(make_record(LONG, ("a", "dog"), n_heads=4), n_kv_heads=2)
    left = replace(record, config=replace(record.config, padding="left"))
    for drawn in (record, left):
        found, _ = content(drawn)
        assert [layer["absent"] for layer in found["layers"]] == [{}]
        for index, (head, sequence) in enumerate((head, sequence) for head in range(4) for sequence in range(2)):
            q0, k0 = drawn.first_query(sequence), drawn.first_key(sequence)
            queries = slice(q0, q0 + len(drawn.sequences[sequence].tokens))
            keys = slice(k0, k0 + len(drawn.keys[sequence].tokens))
            parts = {name: unpacked(text, "<f4") for name, text in found["maps"][index]["parts"].items()}
            for name in ("qk", "scores"):
                assert np.array_equal(parts[name], drawn.arrays[name][sequence, head, queries, keys].ravel())
            assert np.array_equal(parts["z"], drawn.arrays["z"][sequence, head, queries].ravel())
            assert np.array_equal(parts["v"], drawn.arrays["v"][sequence, head // 2, keys].ravel())


def test_scores_come_only_where_maps_are_exact_and_leave_room():
    record = make_record(LONG, n_heads=4)
    drawn = all_drawn(record)
    everything = fitting_maps(drawn, 1 << 20, rows_first=False)
    assert all(one.parts.scores and one.parts.qk and one.parts.z for one in everything.maps)
    some = fitting_maps(drawn, everything.n_bytes - 1, rows_first=False)
    assert some.encoding == EXACT
    assert all(one.parts.scores and one.parts.qk and one.parts.z is None for one in some.maps)
    assert some.n_bytes < everything.n_bytes
    assert all(one.parts.z for one in exact_maps(drawn).maps)
    coarse = fitting_maps(drawn, 1, rows_first=False)
    assert all(one.parts.scores is None for one in coarse.maps)


def test_what_a_record_does_not_have_is_named_with_what_keeps_it():
    run = content(make_record(LONG))[0]["layers"][0]["absent"]
    assert list(run) == ["v"]
    assert "--keep qk,scores,pattern,z,out,v" in run["v"]
    model = content(layered(text_of(WORDS), n_layers=1, n_heads=3))[0]["layers"][0]["absent"]
    assert "--keep" not in model["v"]
    assert set(content(surveyed("the cat sat on the mat", causal=True))[0]["layers"][0]["absent"]) == {
        "scores",
        "qk",
        "z",
        "v",
    }


def test_an_option_in_a_sentence_is_code_and_nothing_else_is():
    assert sentence("<b> & --keep-limit makes room") == "&lt;b&gt; &amp; <code>--keep-limit</code> makes room"
    assert sentence("a -- b, --y, non-finite") == "a -- b, <code>--y</code>, non-finite"


def test_what_makes_a_score_is_that_of_the_layer():
    record = make_record(LONG)
    plain = content(record)[0]["layers"][0]
    assert (plain["scale"], plain["softcap"], plain["bias"], plain["dropout"]) == (record.config.scale, None, False, 0)
    capped = content(replace(record, config=replace(record.config, softcap=30.0, positions="alibi")))[0]["layers"][0]
    assert (capped["softcap"], capped["bias"]) == (30.0, True)
    assert content(make_record(LONG, dropout=0.25))[0]["layers"][0]["dropout"] == 0.25


def test_words_and_the_types_that_occur_come_with_their_explanations():
    record = layered(text_of(WORDS), n_layers=2, n_heads=3)
    terms = content(record)[0]["terms"]
    assert terms["attention weight"].startswith("How much of its attention")
    for head in record.heads:
        assert terms[HEAD_TYPES[head.kind].name] == HEAD_TYPES[head.kind].explanation
    assert "mean over i of exp(H_i)" in page(record, ViewOptions())
