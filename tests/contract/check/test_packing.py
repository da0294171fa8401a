"""Several documents in one row: `packing` says whether one sees another, as plain passes do, in
every way in which the call tells them apart, and accuses only what promises to isolate them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import checkpoints, rows, user_code
from support.mha import run

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

FOLDER = Path(__file__).parent / "cases" / "packing"
models: Any = user_code.load(FOLDER / "models.py")
LENGTHS = (7, 11, 6)
"""Documents of the plain passes; their lengths are not those of mha."""
N, CLOSE = sum(LENGTHS), 1e-5
NUMBERS = torch.arange(1, 4).repeat_interleave(torch.tensor(LENGTHS))[None]
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]
STARTS = torch.tensor([0, 7, 18, 24], dtype=torch.int32)
SAME = (NUMBERS.mT == NUMBERS)[None, None]
GIVEN: dict[str, Any] = {
    "cu_seqlens": STARTS,
    "max_seqlen": 11,
    "document_ids": NUMBERS,
    "doc_ids": NUMBERS,
    "sample_ids": NUMBERS,
    "segment_ids": NUMBERS,
    "segment_label": NUMBERS - 1,
    "seq_idx": NUMBERS,
    "position_ids": PLACES,
    "mask": SAME.tril(),
    "story": NUMBERS,
}
"""What tells the documents of the plain passes apart."""


class Packed(NamedTuple):
    """A model, the arguments that tell documents apart, and the verdicts: as it is, and with
    `packed`. `ok` are those of the behaviour. With `alone`, it is wrong beside the text alone.
    """

    name: str
    given: Sequence[str]
    verdicts: tuple[str, str]
    ok: tuple[bool | None, bool | None]
    alone: bool = False
    common: bool = False


RIGHT, WRONG, NOTE = ("right", "right"), ("wrong", "wrong"), ("right", "wrong")
OPEN = ("right", "unknown")
HOLDS, FAILS = (True, True), (False, False)
TABLE = (
    Packed("CuSeqlens", ["cu_seqlens"], RIGHT, HOLDS),
    Packed("CuSeqlensOffByOne", ["cu_seqlens"], WRONG, FAILS, common=True),
    Packed("CuSeqlensNeeded", ["cu_seqlens", "max_seqlen"], RIGHT, HOLDS),
    Packed("DocumentIds", ["document_ids"], RIGHT, HOLDS),
    Packed("DocumentIdsFromZero", ["document_ids"], RIGHT, HOLDS),
    Packed("SampleIds", ["sample_ids"], RIGHT, HOLDS),
    Packed("DocumentIdsAndPositions", ["doc_ids", "position_ids"], RIGHT, HOLDS),
    Packed("PositionsUnread", ["doc_ids"], RIGHT, HOLDS),
    Packed("FirstLayerOnly", ["document_ids"], WRONG, FAILS),
    Packed("CausalMaskReplaced", ["doc_ids", "position_ids"], WRONG, FAILS, alone=True),
    Packed("DocumentIdsIgnored", ["doc_ids"], WRONG, FAILS),
    Packed("NextDocument", ["seq_idx"], WRONG, FAILS),
    Packed("CacheForgetsDocuments", ["doc_ids"], WRONG, FAILS),
    Packed("EncoderDocumentIds", ["document_ids"], RIGHT, HOLDS),
    Packed("EncoderOfPairs", ["segment_label"], NOTE, (None, False), common=True),
    Packed("SegmentsTellApart", ["segment_ids"], RIGHT, (None, True)),
    Packed("MaskOfPositions", ["position_ids"], RIGHT, HOLDS),
    Packed("PositionsOnly", ["position_ids"], NOTE, (None, False), common=True),
    Packed("BlockMask", ["mask"], RIGHT, HOLDS),
    Packed("OnesForgetDocuments", ["document_ids"], NOTE, (True, False)),
    Packed("Plain", [], OPEN, (None, None)),
    Packed("UnusualName", [], OPEN, (None, None)),
    Packed("Attention", ["doc_ids"], RIGHT, HOLDS),
    Packed("AttentionToNeighbours", ["doc_ids"], WRONG, FAILS),
)


def built(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(models, name)().eval()


def drawn(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if "Attention" in type(model).__name__:
        return torch.randn(1, N, 32, generator=generator)
    return torch.randint(3, 61, (1, N), generator=generator)


@torch.no_grad()
def leak(call: Callable[..., torch.Tensor], text: torch.Tensor, other: torch.Tensor) -> float:
    """The largest change of a document's outputs when all others change."""
    out, start, largest = call(text), 0, 0.0
    for n in LENGTHS:
        changed = other.clone()
        changed[:, start : start + n] = text[:, start : start + n]
        moved = (call(changed) - out)[:, start : start + n]
        largest, start = max(largest, moved.abs().max().item()), start + n
    return largest


def answer(report: mhacli.Examination) -> Any:
    return next(each for each in report.behaviour if each.name == "packing")


@pytest.mark.parametrize("case", rows(TABLE, lambda case: case.name))
def test_a_model_isolates_documents_as_plain_passes_show(case: Packed) -> None:
    model = built(case.name)
    first = 0 if "FromZero" in case.name else 1
    given = {name: GIVEN[name] for name in case.given}
    given |= {name: NUMBERS - 1 + first for name in ("document_ids",) if name in given}
    if given:
        moved = leak(lambda x: model(x, **given), drawn(model, 1), drawn(model, 2))
        is_isolated = moved < CLOSE
        if case.name == "OnesForgetDocuments":
            ones = {**given, "attention_mask": torch.ones(1, N)}
            assert is_isolated
            assert leak(lambda x: model(x, **ones), drawn(model, 1), drawn(model, 2)) > CLOSE
        else:
            assert is_isolated == (case.ok[1] is True or case.alone)
        if case.alone:
            text = drawn(model, 1)
            with torch.no_grad():
                apart = (model(text, **given)[:, :7] - model(text[:, :7])[:, :7]).abs().max()
            assert apart > CLOSE
    for packed, verdict, ok in zip((False, True), case.verdicts, case.ok, strict=True):
        report = user_code.check(built(case.name), packed=packed)
        codes = [finding.code for finding in report.findings]
        assert (report.verdict, codes) == (verdict, ["documents-leak"] * (verdict == "wrong"))
        assert (answer(report).ok, answer(report).name) == (ok, "packing"), answer(report)
        if ok is None and case.name != "PositionsOnly":
            assert answer(report).reason.startswith("not tried: ")
        else:
            others = [each for each in report.behaviour if each.tried and each.name != "packing"]
            assert answer(report).tried.length == max(each.tried.length for each in others)


HALVES = "torch.cat([torch.arange(T // 2), torch.arange(T - T // 2)])[None]"
STORIES = "story=(torch.arange(T) // (T // 3 + 1)).expand(2, T)"
BLOCKS = "torch.block_diag(torch.ones(T // 2, T // 2), torch.ones(T - T // 2, T - T // 2))"


@pytest.mark.parametrize(
    ("name", "words", "verdict"),
    [
        ("UnusualName", STORIES, "right"),
        pytest.param("UnusualNameIgnored", STORIES, "wrong", marks=pytest.mark.real),
        pytest.param(
            "CuSeqlensOffByOne",
            "cu_seqlens=torch.tensor([0, T // 2, T])",
            "wrong",
            marks=pytest.mark.real,
        ),
        pytest.param(
            "CuSeqlens", "cu_seqlens=torch.tensor([0, T // 2, T])", "right", marks=pytest.mark.real
        ),
        pytest.param("MaskOfPositions", f"position_ids={HALVES}", "right", marks=pytest.mark.real),
        pytest.param("PositionsOnly", f"position_ids={HALVES}", "wrong", marks=pytest.mark.real),
        pytest.param(
            "BlockMask", f"mask={BLOCKS}.tril().bool()[None, None]", "right", marks=pytest.mark.real
        ),
        pytest.param("Plain", "", "unknown", marks=pytest.mark.real),
    ],
)
def test_an_example_packs_the_documents_that_are_judged(
    name: str, words: str, verdict: str
) -> None:
    n = 2 if "expand" in words else 1
    example = f"lambda m, T: m(torch.randint(61, ({n}, T)), {words})"
    report = user_code.check(built(name), packed=True, example=example)
    assert report.verdict == verdict, report.summary
    if verdict == "unknown":
        assert "nothing tells documents apart" in report.sentence
    elif verdict == "wrong":
        assert [finding.code for finding in report.findings] == ["documents-leak"]


def test_a_statement_holds_if_one_way_to_tell_documents_apart_is_right() -> None:
    stated = "q >= k and doc[q] == doc[k]"
    report = user_code.check(built("CacheForgetsDocuments"), packed=True, sees=stated)
    assert {each.name: each.ok for each in report.behaviour}["sees"] is True


@pytest.mark.parametrize(
    "example",
    [
        None,
        """lambda m, T: m(torch.randn(T, 4, 8), torch.randn(T, 4, 8), torch.randn(T, 4, 8),
        torch.tensor([0, 3, T], dtype=torch.int32), T)""",
    ],
)
@pytest.mark.parametrize(
    ("name", "isolates"),
    [("attend", True), ("attend_to_one_before", False), ("attend_to_all", False)],
)
def test_a_function_isolates_documents_before_its_gradients_are_judged(
    name: str, isolates: bool, example: str | None
) -> None:
    report = user_code.check(f"{FOLDER / 'functions.py'}:{name}", example=example)
    assert answer(report).ok is isolates
    found = {finding.code: finding for finding in report.findings}
    assert found.keys() == (set() if isolates else {"documents-leak"})
    if not isolates:
        leak = found["documents-leak"]
        assert leak.file is not None
        assert leak.line is not None
        line = Path(leak.file).read_text().splitlines()[leak.line - 1]
        assert line.startswith(f"def {name}(")


def test_documents_are_packed_into_rows_of_the_longest_length() -> None:
    report = user_code.check(built("ShortRowsOnly"))
    assert [finding.code for finding in report.findings] == ["documents-leak"]
    report = user_code.check(built("ShortRowsOnly"), length=32)
    assert (report.verdict, answer(report).tried.length) == ("right", 32)


def test_the_place_of_a_leak_is_named() -> None:
    report = user_code.check(built("FirstLayerOnly"))
    (finding,) = report.findings
    assert "document 2 of 3 changes with the others, first in layers.1" in finding.message
    assert answer(report).at.module.startswith("layers.1")
    assert str(finding.file).endswith("models.py")


@pytest.mark.real
def test_the_command_takes_packed(tmp_path: Path) -> None:
    target = f"{FOLDER / 'models.py'}:PositionsOnly"
    done = run(tmp_path, "check", target, "--packed", "--json", code=3)
    document = done.json
    (found,) = [each for each in document["behaviour"] if each["name"] == "packing"]
    assert (document["verdict"], found["ok"]) == ("wrong", False)


# ------------------------------------------------------------------------- families of transformers


FAMILIES = [
    name
    for name in checkpoints.OF_TEXT
    if checkpoints.FAMILIES[name].automatic in (checkpoints.CAUSAL, checkpoints.MASKED)
]
WORDS = {
    "none": "without a mask",
    "ones": "with a mask of ones",
    "block": "with a mask in four dimensions",
}


def masks_of(family: checkpoints.Family) -> dict[str, torch.Tensor | None]:
    allowed = SAME.tril() if family.causal else SAME
    block = torch.zeros(1, 1, N, N).masked_fill(~allowed, -torch.inf)
    return {"none": None, "ones": torch.ones(1, N, dtype=torch.long), "block": block}


def isolating(name: str, model: Any) -> dict[tuple[str, bool | None], bool]:
    """Whether plain passes isolate documents, by mask and caching, where the model takes them."""
    family, parameters = checkpoints.FAMILIES[name], inspect.signature(model.forward).parameters
    cells: dict[tuple[str, bool | None], bool] = {}
    generator = torch.Generator().manual_seed(0)
    text, other = torch.randint(3, checkpoints.VOCABULARY, (2, 1, N), generator=generator)
    for mask, values in masks_of(family).items():
        for cache in (None, False) if "use_cache" in parameters else (None,):
            given: dict[str, Any] = {} if values is None else {"attention_mask": values}
            if "position_ids" in parameters:
                first = 1 if name == "roberta" else 0
                given["position_ids"] = PLACES + first
            elif mask != "block":
                continue  # nothing tells documents apart
            if cache is not None:
                given["use_cache"] = cache
            try:
                moved = leak(lambda ids: model(ids, **given).logits, text, other)  # noqa: B023
            except (ValueError, RuntimeError):
                continue
            cells[mask, cache] = moved < 1e-4
    return cells


def sentence(cells: dict[tuple[str, bool | None], bool], told: str) -> str:
    """What mha must say of the cells."""
    if all(cells.values()):
        return f"{told} isolates documents"
    where = []
    for mask, words in WORDS.items():
        of_mask = {cache: isolates for (each, cache), isolates in cells.items() if each == mask}
        if of_mask and all(of_mask.values()):
            where.append(words)
        elif any(of_mask.values()):
            assert of_mask == {None: False, False: True}
            where.append(f"with use_cache=False and {words}")
    if not where:
        return f"{told} does not isolate"
    return f"{told} isolates only {', or '.join(where)}"


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.real)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "gpt2" else [pytest.mark.real]) for name in FAMILIES],
)
def test_families_isolate_as_plain_passes_do(name: str, implementation: str) -> None:
    if implementation == "sdpa" and checkpoints.FAMILIES[name].implementation != "sdpa":
        pytest.skip("the family has no such implementation")
    model = checkpoints.model(name, attn_implementation=implementation)
    cells = isolating(name, model)
    for packed in (False, True):
        report = mhacli.check(model, packed=packed)
        found = answer(report)
        every = cells
        if not packed and not checkpoints.FAMILIES[name].causal:
            every = {cell: is_right for cell, is_right in cells.items() if cell[0] == "block"}
        told = "attention_mask in four dimensions"
        if any(mask != "block" for mask, _ in every):
            told = "position_ids"
        if not every:
            assert "not tried" in found.reason
            continue
        assert found.reason.partition(": document")[0].partition(";")[0] == sentence(every, told)
        if packed:
            asked = every.get(
                ("none", False), every.get(("none", None), every.get(("block", None)))
            )
            if ("none", None) in every or ("none", False) in every or asked:
                assert found.ok is asked
            assert report.ok == bool(asked), report.summary
            leaks = asked is True and not every.get(("none", None), True)
            assert ("usual call" in report.sentence) is leaks
            assert found.sign is (None if leaks else found.ok)
        else:
            assert found.ok is (True if all(every.values()) else None)
            assert not any(finding.code == "documents-leak" for finding in report.findings)
