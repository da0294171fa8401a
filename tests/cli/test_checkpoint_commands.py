"""What the commands do with a checkpoint of two halves, whose layers read different texts: rows, queries and cells are places in
the text of each."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from support.layers_made import layered, text_of
from support.model_families import tiny

from mhacli.checkpoints.folder import Checkpoint
from mhacli.cli.app import main
from mhacli.cli.commands import heads as heads_command
from mhacli.cli.options import ColourOptions
from mhacli.cli.shared.checkpoint import require_configured_heads, row_choice
from mhacli.cli.shared.output import HeadsFormats, PictureOptions
from mhacli.compute.checkpoint import prepare
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import UsageError
from mhacli.render.base.options import ViewOptions
from mhacli.requests.checkpoint import ModelRequest
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.results.record.record import Record, kinds_of, texts_of

CAT, DOG = "THE CAT SAT", "A DOG"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a pair (t5) and of a decoder alone (gpt2), whose tokens are bytes."""
    place = tmp_path_factory.mktemp("checkpoints")
    for name in ("t5", "gpt2"):
        tiny(name).save_pretrained(place / name)
    config = place / "t5" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "decoder_start_token_id": 1}))
    return place


@pytest.fixture
def mha(folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`mha(command, name, *words)`: the exit code, stdout and stderr."""

    def command(name: str, model: str | None, *words: str) -> tuple[int, str, str]:
        chosen = [] if model is None else ["--model", str(folders / model), "--tokenizer", "byte", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["mha", name, *chosen, *words])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def never(*given: object, **named: object) -> object:
    pytest.fail("this is too late")


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("rows", "drawn"), [("last", "10 “T” →"), ("3", "3 “␣” →"), ("generated", "none of the chosen rows")]
)
def test_rows_are_places_in_the_text_that_the_layer_reads(mha: Command, rows: str, drawn: str) -> None:
    more = ["--generate", "2"] if rows == "generated" else []
    code, out, _ = mha("run", "t5", CAT, "--layer", "encoder.0", "--head", "0", "--view", "top", "--from", rows, *more)
    assert (code, drawn in out) == (0, True)


def test_rows_that_the_model_made_tokens_of_are_those_of_the_decoder(mha: Command) -> None:
    words = ["--layer", "decoder.0,cross.0", "--head", "0", "--view", "top", "--from", "generated", "--generate", "3"]
    code, out, _ = mha("run", "t5", CAT, *words)
    assert (code, re.findall(r"(\d+) “.*” →  ", out)) == (0, ["0", "1", "2"] * 2)


def test_the_last_row_of_every_text_is_drawn(mha: Command) -> None:
    code, out, _ = mha("run", "gpt2", CAT, DOG, "--layer", "0", "--head", "0", "--view", "top", "--from", "last")
    assert (code, "10 “T” →" in out, "4 “G” →" in out) == (0, True, True)


@pytest.mark.parametrize("word", ["first", "3-", "-1", "generated,2", ""])
@pytest.mark.parametrize("command", ["run", "show"])
def test_rows_that_are_none_of_the_forms_are_refused_before_a_file_is_opened(
    mha: Command, command: str, word: str
) -> None:
    words = [CAT, "--model", "/nowhere"] if command == "run" else ["/nowhere"]
    code, _, err = mha(command, None, *words, f"--from={word}")
    rule = "is not generated, last or a list such as 0,2 or 0,4-6"
    assert (code, err) == (2, f"mha: error: --from {shlex.quote(word)} {rule}\n")


def test_generated_rows_must_be_generated(mha: Command, tmp_path: Path) -> None:
    said = "mha: error: --from generated needs tokens that the model generated\nhint: add --generate N\n"
    assert mha("run", None, CAT, "--model", "/nowhere", "--from", "generated")[::2] == (2, said)
    layered().save(str(tmp_path / "r"))
    assert mha("show", None, str(tmp_path / "r"), "--from", "generated")[::2] == (2, said)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "most"),
    [((CAT, "--layer", "encoder.0"), 10), ((CAT, "--layer", "decoder.0"), 0), ((CAT, "--layer", "cross.1"), 0),
     ((DOG, "--context", CAT), 10), ((DOG, "--context", CAT, "--layer", "decoder.0"), 5),
     ((DOG, CAT, "--layer", "encoder.0", "--sequence", "0"), 4)],
)  # fmt: skip
def test_places_that_no_text_has_are_refused_before_the_pass(
    mha: Command, words: Sequence[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointRun, "run", never)
    code, _, err = mha("run", "t5", *words, "--from", f"0,{most + 1}")
    assert code == 2
    assert err.startswith(f"mha: error: --from {most + 1} ")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layer", "most"), [("encoder.0", 14), ("decoder.0", 8), ("encoder.1,cross.0", 14)])
def test_show_refuses_places_that_no_drawn_text_has(mha: Command, layer: str, most: int, tmp_path: Path) -> None:
    layered(text_of("abcdefg"), context=[text_of("abcdefghijklm")]).save(str(tmp_path / "r"))
    code, out, err = mha("show", None, str(tmp_path / "r"), "--layer", layer, "--from", f"{most + 1}")
    assert (code, out) == (2, "")
    assert err == f"mha: error: --from {most + 1} is out of range: 0 to {most}\n"
    code, out, _ = mha("show", None, str(tmp_path / "r"), "--layer", layer, "--head", "0", "--from", f"{most}")
    assert (code, "[SEP]" in out) == (0, True)


def test_a_word_names_rows_or_places() -> None:
    assert [row_choice(word) for word in ("last", "generated", "3,7-9", None)] == [
        "last", "generated", (3, 7, 8, 9), None,
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- cells


def test_the_walk_of_a_layer_of_an_encoder_can_be_read_again(mha: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "walk")
    code, _, err = mha("trace", "t5", CAT, "--layer", "encoder.0", "--cell", "0,3,2", "--save", path)
    assert code == 0
    assert err.startswith(f"mha: saved {path}, ")
    assert mha("show", None, path)[0] == 0
    cell = storage.load(path).cell
    assert cell is not None
    assert (cell.query, cell.key, len(cell.pattern_row)) == (3, 2, 11)


# ------------------------------------------------------------------------------------------------ queries, rows and keys


ONE_KIND = "hint: --layer encoder.N, decoder.N or cross.N chooses one kind\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((CAT, "--context", DOG, "--query", "8"), "--query 8 is out of range: 0 to 4 of encoder layers"),
        ((CAT, "--query", "3"), "--query 3 is out of range: only 0 exists of decoder layers"),
        ((CAT, "--query", "11", "--layer", "encoder.1"), "--query 11 is out of range: 0 to 10 of encoder layers"),
        ((CAT, "--query", "1", "--layer", "encoder.1,cross.0"), "--query 1 is out of range: only 0 exists of cross layers"),
        ((CAT, "--rows", "0:2", "--layer", "1"),
         "rows of decoder layers "),
        ((CAT, "--keys", "0:5"), "keys of decoder layers "),
        ((CAT, "--keys", "0:5", "--layer", "encoder.0,cross.0"),
         "--rows and --keys need both ends, because encoder and cross layers read different texts"),
    ],
)  # fmt: skip
def test_places_that_a_kind_of_layer_does_not_have_are_refused_by_its_name(
    mha: Command, words: Sequence[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointRun, "run", never)
    code, _, err = mha("heads", "t5", *words)
    assert code == 2
    assert message in err
    assert err.endswith(ONE_KIND)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [("--query", "3,10", "--layer", "encoder.0"), ("--keys", "0:5", "--layer", "encoder.0"),
     ("--query", "0"), ("--keys", "3:5", "--layer", "cross.0"), ("--rows", "0:1", "--keys", "0:1")],
)  # fmt: skip
def test_places_that_all_chosen_layers_have_are_shown(mha: Command, words: Sequence[str]) -> None:
    assert mha("heads", "t5", CAT, *words)[0] == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", [("--query", "3"), ("--rows", "0:2"), ("--keys", "0:2")])
def test_places_in_texts_that_begin_in_different_columns_are_refused(mha: Command, words: Sequence[str]) -> None:
    code, _, err = mha("heads", "gpt2", CAT, DOG, "--padding", "left", *words)
    assert code == 2
    assert "--query, --rows and --keys " in err
    assert mha("heads", "gpt2", CAT, DOG, "--padding", "right", *words)[0] == 0
    assert mha("heads", "gpt2", CAT, CAT, "--padding", "left", *words)[0] == 0


def test_kinds_and_the_texts_that_they_read() -> None:
    texts, context = (text_of("ab"),), (text_of("abc"),)
    assert texts_of("self", texts, None) == texts_of("decoder", texts, context) == (texts, texts)
    assert texts_of("encoder", texts, context) == (context, context)
    assert texts_of("cross", texts, context) == (texts, context)
    assert kinds_of(None, is_pair=False) == kinds_of(((None, 3),), is_pair=False) == ("self",)
    assert kinds_of(None, is_pair=True) == kinds_of(((None, 3),), is_pair=True) == ("encoder", "decoder", "cross")
    assert kinds_of((("cross", 0), ("encoder", 1)), is_pair=True) == ("encoder", "cross")
    assert kinds_of((("cross", 0),), is_pair=False) == ()


# ---------------------------------------------------------------------------------------------------------- interruption


class Stopped:
    """A look that Ctrl-C ended after the first of two layers that were asked for."""

    n_finished = 1

    def run(self, report_progress: object) -> None:
        raise KeyboardInterrupt

    def record(self) -> Record:
        return layered(n_layers=1, n_heads=2)


def test_of_a_look_that_was_interrupted_the_finished_layers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    options = ViewOptions(layers=((None, 0), ("self", 2)), heads=(1, 3), maps=(0, 3))
    output = heads_command.HeadsOutput(formats=HeadsFormats(), pictures=PictureOptions(), colour=ColourOptions())
    with pytest.raises(KeyboardInterrupt):
        heads_command._run_with_progress(Stopped(), 2, "layers", options, output)
    said = capsys.readouterr()
    assert "layer 0 · head 0" in said.out
    assert "self-check ok" in said.out
    assert said.err == "mha: interrupted: 1 of 2 layers are finished, and nothing was saved\n"
    found = heads_command._finished_options(options, layered(n_layers=1, n_heads=2))
    assert (found.layers, found.heads, found.maps) == (((None, 0),), (1,), (0,))
    every = heads_command._finished_options(ViewOptions(), layered(n_layers=1))
    assert (every.layers, every.heads) == (None, None)


# -------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("command", ["trace", "decode"])
def test_one_layer_is_walked_or_decoded(mha: Command, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "prepare_checkpoint", never)
    assert mha(command, "gpt2", CAT, "--layer", "0,1")[0] == 2


def test_a_path_that_is_not_there_may_be_meant_as_an_id(mha: Command, tmp_path: Path) -> None:
    code, _, err = mha("run", None, CAT, "--model", str(tmp_path / "x"))
    assert (code, err) == (
        1,
        f"mha: error: {tmp_path}/x does not exist\nhint: the id of a checkpoint on a hub looks like org/name\n",
    )


def test_a_head_must_be_one_of_the_half_that_has_most() -> None:
    config = {"encoder_attention_heads": 4, "decoder_attention_heads": 8}
    request = ModelRequest("x", Checkpoint("x", config, {}, ()), (CAT,), HeadsRequest())
    require_configured_heads((0, 7), request)
    with pytest.raises(UsageError, match=r"^--map 8 "):
        require_configured_heads((8,), request, "map")
    require_configured_heads((8,), replace(request, checkpoint=None))
    require_configured_heads(None, request)
