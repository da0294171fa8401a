"""`mha effect` at the prompt: what it measures, its formats, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.checkpoints_saved import TEXT, Checkpoints, reference
from support.effects_made import edge_effect, head_effect, with_effects
from support.model_families import run_plain

from mhacli.cli.app import main
from mhacli.cli.commands import effect as command
from mhacli.cli.commands.effect import MeasurementOptions
from mhacli.cli.options import SourceOptions
from mhacli.cli.shared.checkpoint import ModelOptions
from mhacli.cli.shared.next_steps import suggest_after_effects
from mhacli.compute.effect.removal import Remover

LAYERS, HEADS = 3, 4


class Ended(NamedTuple):
    code: int
    stdout: str

    @property
    def document(self) -> Any:
        """What `--json` prints."""
        return json.loads(self.stdout)


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> str:
    return checkpoints.of("gpt2")


@pytest.fixture
def mha(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command in this process: how it ended, and what it printed."""

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["mha", *words])
        code = main()
        return Ended(code, capsys.readouterr().out)

    return run


@pytest.fixture
def effect(mha: Run, folder: str) -> Run:
    """`mha effect` of one text and checkpoint."""
    return lambda *options: mha("effect", TEXT, "--model", folder, *options)


def ids_of(document: Any) -> list[int]:
    return document["sequences"][0]["ids"]


def test_each_head_is_removed_and_the_target_is_what_the_model_predicts(effect: Run, folder: str) -> None:
    document = effect("--json").document
    logits = run_plain(reference(folder), {"input_ids": torch.tensor([ids_of(document)])}).logits[0, -1]
    assert [(each["layer"], each["head"]) for each in document["effects"]] == [
        (layer, head) for layer in range(LAYERS) for head in range(HEADS)
    ]
    found = document["effect"]
    assert (found["target_id"], found["position"], found["rank"]) == (
        int(logits.argmax()),
        len(ids_of(document)) - 1,
        0,
    )
    assert found["logit"] == pytest.approx(float(logits.max()), abs=1e-5)
    assert found["logprob"] == pytest.approx(float(logits.log_softmax(dim=-1).max()), abs=1e-5)
    assert found["verified"]["ok"]
    assert found["verified"]["n"] == 4


def test_a_line_per_removal_has_the_fields_of_the_document(effect: Run) -> None:
    document = effect("--json").document
    rows = [*csv.DictReader(io.StringIO(effect("--csv").stdout))]
    assert [float(row["d_logit"]) for row in rows] == [each["d_logit"] for each in document["effects"]]


def test_versus_measures_a_difference_of_two_logits(effect: Run) -> None:
    one, other, both = (
        effect("--head", "1.2", "--target", target, *more, "--json").document
        for target, more in (("a", ()), ("b", ()), ("a", ("--versus", "b")))
    )
    difference = one["effects"][0]["d_logit"] - other["effects"][0]["d_logit"]
    assert both["effects"][0]["d_logit"] == pytest.approx(difference, abs=2e-5)
    assert (both["effect"]["target"], both["effect"]["versus"]) == ("a", "b")


def test_heads_are_removed_alone_and_together(effect: Run) -> None:
    effects = effect("--head", "2.1,0.3", "--json").document["effects"]
    assert [(each["removed"], each["layer"], each["head"], each.get("heads")) for each in effects] == [
        ("head", 0, 3, None),
        ("head", 2, 1, None),
        ("heads", None, None, [[0, 3], [2, 1]]),
    ]


def test_edges_of_a_query_go_to_every_key(effect: Run) -> None:
    document = effect("--edges", "--head", "1.2", "--position", "5", "--json").document
    assert [(each["query"], each["key"]) for each in document["effects"]] == [
        (5, key) for key in range(len(ids_of(document)))
    ]
    assert [each["d_output"] for each in document["effects"][6:]] == [0] * (len(ids_of(document)) - 6), "later tokens"
    assert all(each["d_output"] > 0 for each in document["effects"][:6])
    assert [each.get("masked", False) for each in document["effects"]] == [
        key > 5 for key in range(len(ids_of(document)))
    ]


def test_a_span_is_cut_from_another_in_the_layers_that_are_chosen(effect: Run) -> None:
    spans = ("--span", "a=/cat/", "--span", "b=/dog/")
    every = effect(*spans, "--cut", "a:b", "--json").document["effects"]
    one = effect(*spans, "--cut", "a:b", "--layer", "1", "--json").document["effects"]
    back = effect(*spans, "--cut", "b:a", "--json").document["effects"]
    assert [each["layers"] for each in (*every, *one)] == [[0, 1, 2], [1]]
    assert every[0]["d_output"] != one[0]["d_output"]
    assert back[0]["d_output"] == 0, "the cat comes before the dog"


def test_pictures_of_attention_are_judged_by_the_effects_of_edges_or_heads(effect: Run) -> None:
    of_edges, of_heads = (
        effect(*how, "--judge", "--json").document["effect"]["judgements"] for how in (["--edges"], [])
    )
    assert all(-1 <= each["correlation"] <= 1 for each in of_edges)
    assert [each["correlation"] is None for each in of_edges] == [False] * 4
    assert [each["correlation"] is None for each in of_heads] == [False, False, True, False]


def test_a_saved_record_is_shown_again(effect: Run, mha: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "effect.safetensors")
    shown = effect("--head", "1.2", "--save", path).stdout
    assert mha("show", path).stdout == shown
    assert "1.2" in shown


def test_a_page_has_a_row_for_each_removal(effect: Run, tmp_path: Path) -> None:
    path = tmp_path / "effect.html"
    effect("--head", "1.2,0.3", "--html", str(path))
    section = path.read_text().partition('id="effects"')[2].partition("</section>")[0]
    rows = re.findall(r'<th[^>]*scope="row"[^>]*>(\d\.\d[^<]*)</th>', section)
    assert sorted(rows) == ["0.3", "0.3 + 1.2", "1.2"]


def test_without_a_language_head_the_output_is_measured(mha: Run, checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("bert")
    document = mha("effect", TEXT, "--model", folder, "--json").document
    assert document["effect"]["metric"] == "d_output"
    assert all(each["d_logit"] is None and each["d_output"] > 0 for each in document["effects"])
    assert mha("effect", TEXT, "--model", folder, "--target", "a").code == 2


def test_all_kinds_of_attention_of_a_pair_are_removed(mha: Run, checkpoints: Checkpoints) -> None:
    asked = ("effect", TEXT, "--model", checkpoints.of("t5"), "--json")
    document = mha(*asked).document
    kinds = [each["kind"] for each in document["effects"]]
    assert [kinds.count(kind) for kind in ("encoder", "decoder", "cross")] == [8, 8, 8]
    assert document["effect"]["verified"]["ok"]
    single = mha(*asked, "--head", "cross.1.2").document["effects"]
    assert [(each["kind"], each["layer"], each["head"]) for each in single] == [("cross", 1, 2)]


def test_heads_of_all_kinds_of_a_pair_are_removed_together(mha: Run, checkpoints: Checkpoints) -> None:
    three = "cross.0.1,decoder.0.1,encoder.0.1"
    asked = ("effect", TEXT, "--model", checkpoints.of("t5"), "--head", three)
    *alone, together = mha(*asked, "--json").document["effects"]
    assert list(zip(together["kinds"], together["heads"], strict=True)) == [
        ("encoder", [0, 1]),
        ("decoder", [0, 1]),
        ("cross", [0, 1]),
    ]
    text = mha(*asked).stdout
    assert "encoder 0.1 + decoder 0.1 + cross 0.1" in text
    total = sum(each["d_logit"] for each in alone)
    found = re.search(r"the sum of each alone (\S+):\s+interaction (\S+)", text)
    assert found is not None
    assert [float(word) for word in found.groups()] == pytest.approx([total, together["d_logit"] - total], abs=1e-4)


@pytest.mark.parametrize("options", [("--head", "encoder.0.1"), ("--layer", "encoder.0")], ids=" ".join)
def test_edges_of_an_encoder_are_refused(mha: Run, checkpoints: Checkpoints, options: tuple[str, str]) -> None:
    assert mha("effect", TEXT, "--model", checkpoints.of("t5"), "--edges", *options).code == 2


@pytest.mark.every_row
@pytest.mark.parametrize("options", [
    ("--head", "9.0"), ("--head", "0.9"), ("--head", "1"), ("--layer", "7"), ("--position", "99"), ("--at", "99"),
    ("--target", "two words"), ("--cut", "a:b"), ("--cut", "a"), ("--cut", "a:b", "--edges"), ("--replace", "one"),
    ("--cut", "a:b", "--judge"), ("--span", "a=/cat/"), ("--cut", "a:b", "--span", "a=/zebra/", "--span", "b=/cat/"),
    ("--screen", "2", "--head", "0.0"), ("--screen", "2", "--edges"), ("--screen", "0"),
    ("--verify", "0"), ("--edges", "--replace", "mean"), ("--edges", "--at", "1"), ("--cut", "a:b", "--at", "1"),
    ("--replace", "resample"), ("--with", TEXT),
    ("--replace", "resample", "--with", "the"), ("--edges", "--replace", "resample", "--with", TEXT),
], ids=" ".join)  # fmt: skip
def test_what_does_not_exist_is_a_usage_error(effect: Run, options: tuple[str, ...]) -> None:
    ended = effect(*options)
    assert ended.code == 2
    assert ended.stdout == ""


def test_heads_are_resampled_from_a_text_of_which_the_tokens_correspond(effect: Run) -> None:
    same = effect("--replace", "resample", "--with", TEXT, "--head", "0.1", "--json").document
    assert [(each["replace"], each["d_logit"], each["direct"]) for each in same["effects"]] == [("resample", 0, 0)]
    assert same["effect"]["resampled_from"] == TEXT
    other = TEXT.replace("the mat", "a mat")
    changed = effect("--replace", "resample", "--with", other, "--head", "0.1", "--json").document
    assert changed["effects"][0]["d_logit"] != 0
    assert changed["effect"]["verified"]["ok"]
    longer = ("--replace", "resample", "--with", f"{TEXT} and so on", "--head", "0.1")
    assert effect(*longer, "--at", "1").code == 0
    assert effect("--replace", "resample", "--with", "a longer text that begins otherwise", "--head", "0.1").code == 2


def test_texts_of_as_many_tokens_correspond_by_position(effect: Run) -> None:
    exchanged = TEXT.replace("the mat and", "and the mat")
    document = effect("--replace", "resample", "--with", exchanged, "--head", "0.1", "--json").document
    assert document["effects"][0]["d_logit"] != 0
    assert document["effect"]["verified"]["ok"]


def test_a_target_outside_the_vocabulary_is_refused_and_the_token_for_it_can_be_named(
    effect: Run, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(TEXT.split())])}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>"])
    library.save(str(tmp_path / "words.json"))
    of_words = ("--head", "0.0", "--tokenizer", str(tmp_path / "words.json"), "--json")
    assert effect(*of_words, "--target", "giraffe").code == 2
    assert effect(*of_words, "--target", "cat", "--versus", "giraffe").code == 2
    assert effect(*of_words, "--target", "<unk>").document["effect"]["target_id"] == 0


def test_a_target_of_several_tokens_is_taken_by_its_first_on_request(effect: Run) -> None:
    found = effect("--head", "0.0", "--target", "cat", "--target-first", "--json").document["effect"]
    assert found["target"] == "c"


def test_it_takes_one_text(mha: Run, folder: str) -> None:
    assert mha("effect", TEXT, "another", "--model", folder).code == 2
    assert mha("effect", TEXT, "another").code == 2


def test_without_a_checkpoint_heads_of_our_own_layer_are_removed(mha: Run, tmp_path: Path) -> None:
    weights, saved = str(tmp_path / "w.safetensors"), str(tmp_path / "r.safetensors")
    assert mha("run", TEXT, "--heads", "8", "--seed", "3", "--save-weights", weights).code == 0
    ended = mha("effect", TEXT, "--weights", weights, "--head", "5,2", "--save", saved)
    document = mha("effect", TEXT, "--heads", "8", "--seed", "3", "--head", "5,2", "--json").document
    assert [(each["removed"], each["head"]) for each in document["effects"]] == [
        ("head", 2),
        ("head", 5),
        ("heads", None),
    ]
    assert mha("show", saved, "--json").document["effects"] == document["effects"]
    assert mha("show", saved).stdout == ended.stdout
    assert document["effect"]["metric"] == "d_output"


@pytest.mark.parametrize("options", [
    ("--head", "4"), ("--head", "1.2"), ("--target", "a"), ("--cut", "a:b"), ("--layer", "0"), ("--span", "a=/cat/"),
    ("--position", "99"), ("--at", "99"), ("--train", "--dropout", "0.1"),
], ids=" ".join)  # fmt: skip
def test_what_our_own_layer_does_not_have_is_a_usage_error(mha: Run, options: tuple[str, ...]) -> None:
    assert mha("effect", TEXT, *options).code == 2


def test_removals_that_cannot_be_verified_end_with_3_and_no_table(
    effect: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Remover, "_replace_heads", lambda remover, z, removal, row: z[row].zero_())
    ended = effect()
    assert ended.code == 3
    assert "Δlogit" not in ended.stdout
    assert effect("--csv") == (3, "")
    assert effect("--svg", str(tmp_path / "effect.svg")).code == 3
    assert not list(tmp_path.iterdir())


def test_in_16_bits_it_is_said_that_rounding_may_be_the_reason(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Remover, "_replace_heads", lambda remover, z, removal, row: z[row].zero_())
    hints = []
    for dtype in ("bfloat16", "float32"):
        monkeypatch.setattr(sys, "argv", ["mha", "effect", TEXT, "--model", folder, "--dtype", dtype, "--json"])
        assert main() == 3
        hints.append(json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["hint"])
    assert ["--dtype float32" in (hint or "") for hint in hints] == [True, False]


def test_many_removals_are_announced(effect: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(command, "note", notes.append)
    monkeypatch.setattr(command, "_ANNOUNCED_S", 0.0)
    effect()
    assert re.search(rf"{LAYERS * HEADS} removals: about .*s, and at most .* [KM]iB", notes[0])


def test_an_interrupted_run_prints_what_is_finished(
    effect: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(study: Any) -> None:
        def report_progress(part: float, doing: str) -> None:
            if part > 0:
                raise KeyboardInterrupt

        study.run(report_progress)

    monkeypatch.setattr(command, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        effect("--save", str(tmp_path / "r.safetensors"))
    finished = re.findall(r"^(\d\.\d) ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(finished) == [f"0.{head}" for head in range(HEADS)]
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        effect("--json")
    assert capsys.readouterr().out == ""


def test_what_the_strongest_head_reads_is_suggested_next(capsys: pytest.CaptureFixture[str]) -> None:
    record = with_effects(head_effect(0, 1, 0.25), head_effect(1, 2, -0.5))
    groups = SourceOptions(typed=["a b"]), MeasurementOptions(target=" c"), ModelOptions(model="DIR")
    suggest_after_effects(record, groups, saved="r.safetensors")
    assert capsys.readouterr().out.splitlines() == [
        'next: mha effect "a b" --target " c" --model DIR --edges --head 1.2',
        "next: mha view r.safetensors",
    ]


def test_edges_are_suggested_of_heads_that_have_the_measured_query(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = replace(head_effect(0, 1, 2.0), kind="encoder")
    suggest_after_effects(with_effects(encoder, replace(head_effect(1, 0, 1.0), kind="cross")), (), saved=None)
    assert capsys.readouterr().out.split()[-1] == "cross.1.0"


def test_after_edges_nothing_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    suggest_after_effects(with_effects(edge_effect(0, 1.0)), (), saved=None)
    assert not capsys.readouterr().out
