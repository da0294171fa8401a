"""`mha effect --model`: what is measured without options, verification, estimates, formats, and
what is refused.
"""

from __future__ import annotations

import json
import re
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoints, some
from support.checkpoints import N_HEADS, N_LAYERS
from support.removal import PROJECTIONS

import mhacli

TEXT = "the cat sat on the mat"
N = 13
"""Tokens of the text for GPT-2."""
MEASURES = ("d_logit", "d_logprob", "kl", "rank", "d_output")


def effect(mha: Any, *words: str, family: str = "gpt2", text: str = TEXT, **choices: Any) -> Any:
    """The run of `mha effect` of a family."""
    return mha("effect", text, "--model", checkpoints.folder(family), *words, **choices)


def document(mha: Any, *words: str, **choices: Any) -> Any:
    return effect(mha, *words, "--json", **choices).json


@pytest.fixture(scope="module")
def masked() -> Path:
    """A BERT whose tokenizer has a token for masks, the last of the vocabulary."""
    return checkpoints.folder("bert", tokenizer={"mask_token": "[MASK]"}, vocab_size=301)


@pytest.fixture(scope="module")
def undecided() -> Path:
    """A mixture of experts between which the last bit of a number decides, so that no second
    computation agrees.
    """
    folder = checkpoints.folder("mixtral", router_jitter_noise=0.0, output_router_logits=True)
    unlike = folder.with_name("undecided")
    if not unlike.exists():
        shutil.copytree(folder, made := folder.with_name(f"undecided-{id(folder)}"))
        tensors = load_file(made / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("gate.weight"):
                tensor.copy_(
                    tensor[:1]
                    + 1e-9 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
                )
            elif "experts" in name:
                tensor.mul_(3)
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        made.replace(unlike)
    return unlike


# --------------------------------------------------------------------------------- what is measured


def test_the_target_is_the_prediction_at_the_last_token(mha: Any) -> None:
    result = document(mha, "--layer", "0")
    ids = result["sequences"][0]["ids"]
    with torch.no_grad():
        logits = checkpoints.model("gpt2")(torch.tensor([ids])).logits[0, -1]
    summary = result["effect"]
    assert (summary["position"], summary["target_id"], summary["rank"]) == (
        N - 1,
        int(logits.argmax()),
        0,
    )
    assert summary["logit"] == pytest.approx(float(logits.max()), abs=2e-5)


def test_the_first_mask_is_measured_where_there_is_one(mha: Any, masked: Path) -> None:
    text = "the cat [MASK] on the [MASK]"
    result = mha("effect", text, "--model", masked, "--layer", "0", "--json").json
    ids = result["sequences"][0]["ids"]
    assert result["effect"]["position"] == ids.index(300) < len(ids) - 1


def test_a_checkpoint_without_a_language_head_has_only_its_output_measured(
    mha: Any, tmp_path: Path
) -> None:
    folder = checkpoints.copy_of("bert", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    result = mha("effect", TEXT, "--model", folder, "--json", "--head", "1.2").json
    model = checkpoints.load(folder, "AutoModel")
    ids = torch.tensor([result["sequences"][0]["ids"]])
    with torch.no_grad():
        before = model(ids).last_hidden_state[0, -1]
        projection = model.encoder.layer[1].attention.output.dense
        keep = torch.ones(48)
        keep[16:24] = 0
        hook = projection.register_forward_pre_hook(lambda _, args: (args[0] * keep,))
        after = model(ids).last_hidden_state[0, -1]
        hook.remove()
    (change,) = result["effects"]
    assert result["effect"]["metric"] == "d_output"
    assert change["d_output"] == pytest.approx(
        float((after - before).norm() / before.norm()), abs=2e-5
    )
    assert [change[name] for name in MEASURES] == [None, None, None, None, change["d_output"]]
    assert "--target" in mha("effect", TEXT, "--model", folder, "--target", "a", code=2).said


def test_several_tokens_are_no_target_unless_the_first_is_requested(mha: Any) -> None:
    refused = effect(mha, "--layer", "0", "--target", " cat", code=2)
    assert "--target-first" in refused.said
    assert (
        document(mha, "--layer", "0", "--target", " cat", "--target-first")["effect"]["target"]
        == " c"
    )


@pytest.mark.real
def test_a_target_outside_the_vocabulary_is_refused_and_its_token_can_be_named(
    mha: Any, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(TEXT.split())])}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>"])
    library.save(str(tmp_path / "words.json"))
    of_words = ("--head", "0.0", "--tokenizer", str(tmp_path / "words.json"))
    assert "giraffe" in effect(mha, *of_words, "--target", "giraffe", code=2).said
    assert (
        "giraffe" in effect(mha, *of_words, "--target", "cat", "--versus", "giraffe", code=2).said
    )
    assert document(mha, *of_words, "--target", "<unk>")["effect"]["target_id"] == 0


def test_edges_that_the_mask_forbids_are_marked_and_change_nothing(mha: Any) -> None:
    changes = document(mha, "--edges", "--head", "1.2", "--position", "5")["effects"]
    assert [change.get("masked", False) for change in changes] == [key > 5 for key in range(N)]
    assert [change["d_output"] == 0 for change in changes] == [key > 5 for key in range(N)]


def test_an_earlier_span_does_not_depend_on_a_later_one(mha: Any) -> None:
    spans = ("--span", "a=/cat/", "--span", "b=/mat/", "--cut", "b:a")
    (change,) = document(mha, *spans)["effects"]
    assert (change["spans"], change["layers"], change["d_output"]) == (["b", "a"], [0, 1, 2], 0)


# ------------------------------------------------------------------------------------- verification


@pytest.mark.parametrize(
    ("words", "n"),
    [
        ((), 4),
        (("--edges", "--layer", "2", "--verify", "5"), 5),
        pytest.param(("--verify", "1"), 1, marks=pytest.mark.real),
        pytest.param(("--verify", "99"), 18, marks=pytest.mark.real),
    ],
)
def test_as_many_removals_are_verified_as_there_should_be(
    mha: Any, words: tuple[str, ...], n: int
) -> None:
    verified = document(mha, *words)["effect"]["verified"]
    assert (verified["n"], verified["ok"], verified["identical"]) == (n, True, True)
    assert verified["max_abs_error"] <= verified["tolerance"] < 1e-3


@pytest.mark.parametrize(
    "form", some(("--json", "--csv", "--svg", "--all"), default=("--json", "--csv"))
)
def test_removals_that_cannot_be_verified_end_with_3_and_no_numbers(
    mha: Any, tmp_path: Path, undecided: Path, form: str
) -> None:
    words = (form, "picture.svg") if form == "--svg" else (form,)
    ended = mha(
        "effect",
        TEXT,
        "--model",
        undecided,
        *"--edges --layer 0 --verify 13".split(),
        *words,
        code=3,
    )
    assert not list(tmp_path.iterdir())
    if form == "--json":
        assert ended.json["effect"]["verified"]["ok"] is False
        assert ended.error["code"] == "self-check"
    elif form == "--csv":
        assert ended.stdout == ""
    else:
        assert "KL" not in ended.stdout


def test_removals_in_memory_that_cannot_be_verified_raise(undecided: Path) -> None:
    model = checkpoints.load(undecided, "AutoModelForCausalLM")
    ids = torch.randint(5, 99, (1, N), generator=torch.Generator().manual_seed(0))
    with pytest.raises(mhacli.MhaError) as fault:
        mhacli.effects(model, ids, edges=True, layers=[0], n_verified=N)
    assert fault.value.code == "not-verified"


# ------------------------------------------------------------------------- estimates of first order


@pytest.mark.parametrize(
    ("family", "at"),
    [
        ("gpt2", None),
        ("llama", 5),
    ],
)
def test_an_estimate_is_the_slope_at_the_untouched_model(
    mha: Any, family: str, at: int | None
) -> None:
    place = () if at is None else ("--at", str(at))
    result = document(mha, "--screen", "99", "--dtype", "float64", *place, family=family)
    model = checkpoints.model(family, dtype="float64")
    ids, target = torch.tensor([result["sequences"][0]["ids"]]), result["effect"]["target_id"]

    @torch.no_grad()
    def logit(layer: int, head: int, factor: float) -> float:
        scale = torch.ones(1, ids.shape[1], 48, dtype=torch.float64)
        scale[:, slice(None) if at is None else at, 8 * head : 8 * head + 8] = factor
        projection = model.get_submodule(PROJECTIONS[family, "self"].format(layer))
        hook = projection.register_forward_pre_hook(lambda _, args: (args[0] * scale,))
        value = float(model(ids, use_cache=False).logits[0, -1, target])
        hook.remove()
        return value

    assert len(result["effects"]) == N_LAYERS * N_HEADS
    tolerance = 1e-6 if family == "gpt2" else 1e-2  # the norms of Llama are computed in float32
    for change in result["effects"]:
        place = change["layer"], change["head"]
        slope = (logit(*place, 1 - 1e-4) - logit(*place, 1 + 1e-4)) / 2e-4
        assert change["first_order"] == pytest.approx(slope, abs=tolerance), change


def test_the_largest_estimates_are_removed_and_as_many_others_and_their_order_compared(
    mha: Any,
) -> None:
    every = {(row["layer"], row["head"]): row for row in document(mha, "--screen", "99")["effects"]}
    largest = sorted(every, key=lambda place: -abs(every[place]["first_order"]))[:4]
    result = document(mha, "--screen", "4")
    rows = {(row["layer"], row["head"]): row for row in result["effects"]}
    assert len(rows) == 8
    assert set(largest) < set(rows)
    sizes = np.array(
        [[abs(row[name]) for name in ("first_order", "d_logit")] for row in rows.values()]
    )
    ranks = sizes.argsort(axis=0).argsort(axis=0)
    screening = result["effect"]["screening"]
    assert screening["correlation"] == pytest.approx(np.corrcoef(ranks.T)[0, 1])
    assert [screening[name] for name in ("n_heads", "n_largest", "n_others")] == [18, 4, 4]


# -------------------------------------------------------------------------------------- other forms


def test_a_saved_record_is_shown_again(mha: Any) -> None:
    words = ("--head", "1.2,0.3")
    shown = effect(mha, *words, "--save", "r.safetensors").stdout
    assert mha("show", "r.safetensors").stdout == shown
    saved = mha("show", "r.safetensors", "--json").json
    assert [change["d_logit"] for change in saved["effects"]] == [
        row["d_logit"] for row in document(mha, *words)["effects"]
    ]


def test_a_page_and_a_picture_name_what_is_removed(mha: Any, tmp_path: Path) -> None:
    effect(mha, "--head", "1.2,0.3", "--html", "page.html", "--svg", "picture.svg")
    page, picture = ((tmp_path / name).read_text() for name in ("page.html", "picture.svg"))
    assert all(name in page for name in ("1.2", "0.3", "0.3 + 1.2"))
    assert "<svg" in picture


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "mentions"),
    [
        ("--head 0.9", "9"),
        ("--head 1", "1"),
        ("--layer 7", "7"),
        ("--position 99", "99"),
        ("--at 99", "99"),
        ("--target two,words", "--target"),
        ("--cut a:b", "a"),
        ("--cut a", "--cut"),
        ("--cut a:b --edges", "--edges"),
        ("--replace one", "one"),
        ("--span a=/cat/", "--span"),
        ("--cut a:b --span a=/zebra/ --span b=/cat/", "zebra"),
        ("--screen 2 --head 0.0", "--screen"),
        ("--screen 2 --edges", "--screen"),
        ("--verify 0", "0"),
        ("--edges --replace mean", "--replace"),
        ("--edges --at 1", "--at"),
    ],
)
def test_what_cannot_be_removed_or_measured_is_a_usage_error(
    mha: Any, words: str, mentions: str
) -> None:
    ended = effect(mha, *words.split(), "--json", code=2)
    assert mentions in ended.said


@pytest.mark.parametrize("words", ["--head encoder.0.1", "--layer encoder.0"])
def test_edges_of_an_encoder_are_refused(mha: Any, words: str) -> None:
    assert "encoder" in effect(mha, "--edges", *words.split(), family="t5", code=2).said


def test_it_takes_one_text(mha: Any) -> None:
    effect(mha, "another", code=2)
    mha("effect", TEXT, "another", code=2)


def test_edges_are_verified_where_the_mask_of_a_layer_is_true_and_false(mha: Any) -> None:
    words = ("--model", checkpoints.folder("mistral"), "--edges", "--head", "1.2", "--json")
    document = mha("effect", "the cat sat on the mat and ran", *words).json
    assert document["effect"]["verified"]["n"] > 0


@pytest.mark.parametrize("heads", ["0.1,1.3", "2.1,2.4"])
def test_the_numbers_of_an_interaction_add_up_as_they_are_printed(mha: Any, heads: str) -> None:
    shown = effect(mha, "--head", heads).stdout
    (line,) = [line for line in shown.splitlines() if "interaction" in line]
    together, total, interaction = map(Decimal, re.findall(r"-?[0-9]*\.[0-9]+", line))
    assert together - total == interaction
