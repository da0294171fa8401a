"""`mha diff` as a process that has no torch: what it prints, how it ends, and what real pairs of records come to."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from support.checkpoints_saved import Checkpoints, request_of
from support.processes import Launch, Outcome, attempt, forms

from mhacli.cli.commands.diff import _end_unless_equal
from mhacli.errors import MhaError
from mhacli.results.diff.result import Differences
from mhacli.results.record import storage
from mhacli.spec.config import Config

TEXT = "the cat sat on the mat"
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a": (TEXT, {}),
    "double": (TEXT, {"dtype": "float64"}),
    "seeded": (TEXT, {"seed": 1}),
    "rug": ("the cat sat on the rug", {}),
    "full": (TEXT, {"causal": False}),
    "wide": (TEXT, {"d_model": 48}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a record of each of `OTHERS`, all of one layer."""
    from mhacli.compute.layer.run import RecordingOptions, inspect

    folder = tmp_path_factory.mktemp("records")
    for name, (text, choices) in OTHERS.items():
        config = Config(**{"device": "cpu", "threads": 1, "causal": True, **choices})
        inspect([text], config, options=RecordingOptions(repeat=1)).save(str(folder / name))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records of a tiny checkpoint, and of copies of it with another number in one weight of layer 1."""
    from mhacli.compute.checkpoint.prepare import prepare_checkpoint

    folder = tmp_path_factory.mktemp("models")
    original = Path(Checkpoints(folder).of("bert"))

    def look(name: str, place: Path) -> None:
        run, _ = prepare_checkpoint(request_of(str(place), TEXT))
        run.run()
        run.record().save(str(folder / name))

    look("original", original)
    for projection in ("query", "value"):
        copy = folder / f"copy-{projection}"
        shutil.copytree(original, copy)
        weights = load_file(copy / "model.safetensors")
        (name,) = [name for name in weights if f"layer.1.attention.self.{projection}.weight" in name]
        weights[name][3, 5] += 0.25
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        look(projection, copy)
    return folder


def compared(
    folder: Path, a: str, b: str, *words: str, code: int, form: tuple[str, ...] = (), columns: str = "80", **how: Any
) -> Outcome:
    """The outcome of a comparison of two of the records."""
    return attempt(folder, "diff", a, b, *words, code=code, form=form, launch=Launch(env={"COLUMNS": columns}), **how)


# ------------------------------------------------------------------------------------------------------------------- real pairs


def test_a_record_and_itself_agree(saved: Path) -> None:
    done = compared(saved, "a", "a", "--tolerance", "0", code=0)
    assert done.stdout.startswith("A = a\nB = a\n")
    assert " 8 sites, bit for bit\n" in done.stdout
    assert done.stderr == ""


def test_two_number_formats_of_the_same_agree_within_the_coarser(saved: Path) -> None:
    done = compared(saved, "a", "double", code=0, columns="200")
    assert re.search(r" 8 sites, bit for bit in \d; .* \(tolerance 1e-05\)", done.stdout.splitlines()[2])
    assert ["dtype", "float32", "float64"] in [line.split() for line in done.stdout.splitlines()]
    compared(saved, "a", "double", "--tolerance", "1e-12", code=3)
    compared(saved, "a", "double", "--tolerance", "0", code=3)


def test_two_seeds_differ_from_the_first_numbers_on(saved: Path) -> None:
    done = compared(saved, "a", "seeded", code=3, columns="200")
    a, b = (storage.load(str(saved / name)).arrays for name in ("a", "seeded"))
    largest = abs(b["qk"].astype(float) - a["qk"])[..., *(a["allowed"][0, 0].nonzero())].max()
    first = done.stdout.splitlines()[2]
    assert " qk, " in first
    assert f"(largest difference {largest:.4g} at head " in first
    assert done.stderr == ""
    assert ["seed", "0", "1"] in [line.split() for line in done.stdout.splitlines()]


def test_one_other_token_is_the_input_and_what_it_does_not_touch_is_compared(saved: Path) -> None:
    done = compared(saved, "a", "rug", code=3, columns="200")
    assert " the tokens: 1 token replaced (5 “mat” by “rug”), 1 token" in done.stdout
    assert "  … sat on the -mat +rug" in done.stdout.splitlines()


def test_a_mask_and_a_width_that_are_others_are_named(saved: Path) -> None:
    assert (
        " the mask (0 cells visible only in A, 15 only in B"
        in compared(saved, "a", "full", code=3, columns="200").stdout
    )
    assert " embed (d_model 64 against 48)" in compared(saved, "a", "wide", code=3).stdout


@pytest.mark.parametrize(("name", "site"), [("query", "qk"), ("value", "z")])
def test_one_weight_of_a_checkpoint_is_found_by_layer_and_site(models: Path, name: str, site: str) -> None:
    done = compared(models, "original", name, code=3, form=("--json",))
    document = json.loads(done.stdout)
    assert document["first"] == {"where": "site", "layer": "layer 1", "site": site}
    assert {one["status"] for one in document["layers"][0]["sites"]} == {"identical"}
    before = document["layers"][1]["sites"]
    names = [one["site"] for one in before]
    assert {one["status"] for one in before[: names.index(site)]} <= {"identical"}


def test_a_checkpoint_agrees_with_itself_in_every_layer(models: Path) -> None:
    done = compared(models, "original", "original", "--tolerance", "0", code=0)
    assert "layer 0" in done.stdout
    assert ", bit for bit\n" in done.stdout


def test_a_checkpoint_and_a_layer_of_ours_cannot_be_compared(saved: Path, models: Path) -> None:
    place = str(saved / "a")
    done = compared(models, "original", place, code=3)  # their tokens differ too
    assert " the tokens: " in done.stdout.splitlines()[2]


# ---------------------------------------------------------------------------------------------------------------------- process


def test_records_with_nothing_in_common_are_an_error() -> None:
    nothing = Differences(1e-5, None, settings=(), alike=(), n_sequences=(1, 1), texts=(), layers=())
    with pytest.raises(MhaError) as caught:
        _end_unless_equal(nothing)
    fault = caught.value
    assert fault.message == "the two records have nothing in common that could be compared"
    assert (fault.code, fault.exit_code) == ("nothing-in-common", 1)


@forms
def test_records_that_differ_end_with_3_and_nothing_on_stderr(saved: Path, form: tuple[str, ...]) -> None:
    done = compared(saved, "a", "seeded", code=3, form=form)
    assert done.stderr == ""
    assert not form or json.loads(done.stdout)["verdict"] == "differ"


@pytest.mark.parametrize(
    ("words", "code", "says", "form"),
    [
        (["a", "missing"], 1, "missing does not exist", ()),
        (["a", "notes"], 1, "notes", ("--json",)),
        (["a", "a", "--tolerance", "-1"], 2, "--tolerance -1 is negative: the least is 0", ()),
        (["a", "a", "--head", "4"], 2, "--head 4", ()),
        (["a", "a", "--head", "4"], 2, "--head 4", ("--json",)),
        (["a", "a", "--sequence", "1"], 2, "--sequence 1", ("--json",)),
        (["a", "a", "--layer", "0"], 2, "--layer works only with records of a checkpoint", ("--json",)),
        (["a"], 2, "mha diff needs two records", ()),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_refused(
    saved: Path, words: list[str], code: int, says: str, form: tuple[str, ...]
) -> None:
    (saved / "notes").write_text("not a record, but long enough for a header\n")
    attempt(saved, "diff", *words, code=code, form=form, says=[says])


def test_the_document_is_the_same_bytes_each_time_and_says_the_command(saved: Path) -> None:
    one, other = (compared(saved, "a", "seeded", code=3, form=("--json",)) for _ in range(2))
    assert one.stdout == other.stdout
    document = json.loads(one.stdout)
    assert document["command"] == ["mha", "diff", "--json", "a", "seeded"]
    assert document["schema"] == "mha.diff/1"


@pytest.mark.parametrize("colour", [False, True])
def test_hostile_tokens_and_names_reach_the_terminal_as_escapes(saved: Path, tmp_path: Path, colour: bool) -> None:
    record = storage.load(str(saved / "a"))
    (text,) = record.sequences
    evil = replace(text, tokens=("\x1b]52;c;x\x07", "\u202ecat", "[red]", *text.tokens[3:]))
    replace(record, sequences=(evil,)).save(str(tmp_path / "\x1b[2Jb"))
    shutil.copy(saved / "a", tmp_path / "a")
    words = ["--color", "always"] if colour else []
    done = compared(tmp_path, "a", "\x1b[2Jb", *words, code=3, columns="200", colour=colour)
    assert "\\x1b[2Jb" in done.stdout
    assert "[red]" in done.stdout


@pytest.mark.parametrize("columns", ["1", "10000"])
def test_any_width_will_do(saved: Path, columns: str) -> None:
    compared(saved, "a", "seeded", "--all", code=3, columns=columns)
