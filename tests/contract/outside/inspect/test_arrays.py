"""Attention of other programs: `mhacli.record_of` and `mha show` of their files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from support import checkpoints

import mhacli

L, H, T = 2, 3, 5
TOKENS = ["the", "old", "mill", "and", "the"]


def weights(seed: int = 0, causal: bool = True, n: int = T) -> np.ndarray:
    """Weights `[layer, head, query, key]` in float32."""
    scores = np.random.default_rng(seed).normal(size=(L, H, n, n)) * 2
    if causal:
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    powers = np.exp(scores)
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


AXES = "layer,head,query,key"
W = weights()


def test_weights_of_layers_are_shown_as_they_are_and_not_verified() -> None:
    layers = [layer[None] for layer in W]
    record = mhacli.record_of(layers, tokens=TOKENS)
    for layer in range(L):
        assert np.array_equal(np.asarray(record.pattern(layer=layer)), W[layer])
    assert record.pattern(layer=1, head=2).queries.tokens == tuple(TOKENS)
    assert record.self_check.ok is None
    assert record.self_check.error is None
    assert "not verified: weights as given" in repr(record)
    assert not any(layer.verified for layer in record.layers)
    head = record.heads[4]
    assert (head.layer, head.head) == (1, 1)
    entropy = -(W[1, 1] * np.log(np.where(W[1, 1] > 0, W[1, 1], 1))).sum(axis=-1).mean()
    assert head.entropy == pytest.approx(entropy, abs=1e-5)
    assert head.max_score is None


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        (W, AXES),
        (W.transpose(1, 0, 2, 3), ("head", "layer", "query", "key")),
        (np.asfortranarray(W.astype(">f4")), AXES),
        (W.swapaxes(2, 3), "layer,head,key,query"),
        (W[:, None], "layer,batch,head,query,key"),
        ([torch.tensor(layer)[None] for layer in W], None),
        (tuple(torch.tensor(layer)[None].requires_grad_() for layer in W), None),
    ],
)
def test_axes_are_those_that_are_named(given: Any, axes: str | None) -> None:
    record = mhacli.record_of(given, axes=axes)
    assert np.array_equal(np.asarray(record.pattern(layer=1)), W[1])


def test_two_records_of_arrays_are_compared_saved_and_drawn(tmp_path: Path) -> None:
    a, b = (mhacli.record_of(weights(seed), axes=AXES, tokens=TOKENS) for seed in (0, 1))
    assert mhacli.diff(a, a).verdict == mhacli.diff(b, b).verdict
    assert mhacli.diff(a, b).verdict != mhacli.diff(a, a).verdict
    a.save(str(tmp_path / "a.safetensors"))
    again = mhacli.load(tmp_path / "a.safetensors")
    assert again.heads == a.heads
    assert again.self_check == a.self_check
    assert "not verified" in a.page().html


def test_weights_of_queries_and_keys_are_computed_again_and_compared() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, T, 4, generator=g) for n in (4, 2, 2))
    right = torch.nn.functional.scaled_dot_product_attention(
        q, k, torch.eye(T).expand(1, 2, T, T), is_causal=True, enable_gqa=True
    )
    of_scores = mhacli.record_of(q=[q], k=[k], v=[v], causal=True)
    assert np.allclose(np.asarray(of_scores.pattern(layer=0)), right[0], atol=1e-6)
    z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert np.allclose(of_scores.arrays["layers.0.z"], z, atol=1e-6)
    compared = mhacli.record_of([right], q=[q], k=[k])
    assert compared.self_check.ok is True
    assert compared.self_check.error < 1e-6
    other = mhacli.record_of([right.flip(1)], q=[q], k=[k])
    assert other.self_check.ok is False
    assert not other.layers[0].verified
    both = mhacli.record_of([right.flip(1), right], q=[q, q], k=[k, k])
    assert both.self_check.ok is False


def wrong(change: str) -> np.ndarray:
    array = W.copy()
    if change == "nan":
        array[1, 2, 3, 1] = np.nan
    if change == "below 0":
        array[1, 2, 3, :2] += [-2, 2]
    if change == "sum":
        array[1, 2, 3] *= 1.01
    if change == "zeros":
        array[1, 2, 3] = 0
    return array


@pytest.mark.parametrize("change", ["nan", "below 0", "sum", "zeros"])
def test_numbers_that_are_no_weights_are_refused_with_their_place_or_shown_raw(change: str) -> None:
    with pytest.raises(mhacli.MhaError, match="layer 1, sequence 0, head 2, query 3") as fault:
        mhacli.record_of(wrong(change), axes=AXES)
    assert "raw" in (fault.value.hint or "")
    record = mhacli.record_of(wrong(change), axes=AXES, raw=True)
    shown = np.asarray(record.pattern(layer=1))
    assert np.array_equal(shown, wrong(change)[1], equal_nan=True)


def test_rows_may_be_off_by_the_rounding_of_their_dtype_only() -> None:
    half = W.astype(np.float16)
    assert mhacli.record_of(half, axes=AXES).config.dtype == "float16"
    bf16 = torch.tensor(W).bfloat16()
    assert mhacli.record_of(bf16, axes=AXES).config.dtype == "bfloat16"
    with pytest.raises(mhacli.MhaError, match="sums to"):
        mhacli.record_of(bf16.float(), axes=AXES)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mhacli.record_of(W), "layer,head,query,key or batch,head,query,key"),
        (lambda: mhacli.record_of(W[0]), "head,query,key or layer,query,key"),
        (lambda: mhacli.record_of(W, axes="layer,head,query"), "with query and key"),
        (lambda: mhacli.record_of(W, axes="head,query,key"), "names 3 axes"),
        (lambda: mhacli.record_of(W, axes="layer,layer,query,key"), "each once"),
        (lambda: mhacli.record_of(W, axes=AXES, tokens=TOKENS[:4]), "4 tokens"),
        (lambda: mhacli.record_of(W, axes=AXES, tokens=[TOKENS, TOKENS]), "5, 5 tokens"),
        (lambda: mhacli.record_of((W > 0).astype(int), axes=AXES), "dtype int64"),
        (lambda: mhacli.record_of([W[0][None], W[1][None, :, :4, :4]]), "layer 1"),
        (lambda: mhacli.record_of(), "needs attentions"),
        (lambda: mhacli.record_of(W, axes=AXES, causal=True), "causal= is for q and k alone"),
        (lambda: mhacli.record_of(W, axes=AXES, scale=0.5), "scale= needs q and k"),
        (lambda: mhacli.record_of(W, axes=AXES, scale="half"), "not a number"),
        (lambda: mhacli.record_of(W, axes=AXES, tokens=[1, 2, 3, 4, 5]), "tokens are no texts"),
        (lambda: mhacli.record_of(W, axes=AXES, tokens=torch.ones(1, 5)), "tokens are no texts"),
        (
            lambda: mhacli.record_of(W, axes=AXES, q=[W[0][None]], k=[W[0][None]]),
            "1 layers, and attentions 2",
        ),
        (lambda: mhacli.record_of(q=W[0], k=W[0]), "list of layers"),
        (lambda: mhacli.record_of(q=[W[0][None]], k=[W[0][None, :2]]), "do not fit"),
    ],
)
def test_what_may_be_read_in_several_ways_is_refused(call: Any, said: str) -> None:
    with pytest.raises(mhacli.MhaError, match=said):
        call()


def record(*, tokens: Any = TOKENS, **more: Any) -> Any:
    return mhacli.record_of(more.pop("w", W), axes=AXES, tokens=tokens, **more)


def test_arrays_are_compared_with_the_model_that_computed_them() -> None:
    model = checkpoints.model("llama", attn_implementation="eager")
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        out = model(torch.tensor([[5, 7, 9, 7, 3]]), output_attentions=True)
    own = seen.record
    tokens = own.sequences[0].tokens
    for given in (None, tokens):
        same = mhacli.record_of([*out.attentions], tokens=given)
        for pair in ((own, same), (same, own)):
            found = mhacli.diff(*pair)
            assert (found.verdict, found["first"]) == ("agree", None)
            assert "heads changed" not in found.summary
            masks = [site for site in found["layers"][0]["sites"] if site["site"] == "allowed"]
            assert "not known" in masks[0]["why"]
    changed = [layer.clone() for layer in out.attentions]
    changed[1][0, 2, 4] = changed[1][0, 2, 4].flip(0)
    found = mhacli.diff(own, mhacli.record_of(changed, tokens=tokens))
    assert (found.verdict, found["first"]["layer"]) == ("differ", "layer 1")
    assert found["first"]["site"] == "pattern"
    other = mhacli.record_of([*out.attentions], tokens=[*tokens[:-1], "other"])
    assert mhacli.diff(own, other)["first"]["where"] == "tokens"


@pytest.mark.parametrize(
    ("other", "verdict", "said"),
    [
        (lambda: record(), "agree", "none of 6 heads changed"),
        (lambda: record(tokens=None), "agree", "no difference in 26 sites"),
        (lambda: record(w=np.concatenate([W, W[:1]])), "agree", "none of 6 heads"),
        (lambda: record(w=np.concatenate([W, W[:, :1]], axis=1)), "differ", "layer 0 pattern"),
        (lambda: record(w=weights(n=4), tokens=TOKENS[:4]), "differ", "in the tokens"),
        (lambda: record(w=2 * W, raw=True), "differ", "layer 0 pattern"),
        (lambda: record(w=W.astype(np.float16)), "agree", "no difference"),
    ],
)
def test_two_records_of_arrays_are_compared_as_far_as_they_fit(
    other: Any, verdict: str, said: str
) -> None:
    found = mhacli.diff(record(), other())
    assert found.verdict == verdict
    assert said in found.summary


# ------------------------------------------------------------------------------------------- files


def test_files_of_arrays_are_compared_with_each_other_and_with_records(
    mha: Any, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", w=W)
    other = W.copy()
    other[1, 2, 3] = other[1, 2, 3, ::-1]
    np.save(tmp_path / "b.npy", other)
    save_file({"w": W}, tmp_path / "c.safetensors")
    record().save(str(tmp_path / "record.safetensors"))
    axes = ("--axes", AXES)
    mha("diff", "a.npz", "c.safetensors", *axes)
    mha("diff", "record.safetensors", "a.npz", *axes)
    mha("diff", "c.safetensors", "record.safetensors", *axes)
    document = mha("diff", "a.npz", "b.npy", *axes, "--json", code=3).json
    assert (document["first"]["layer"], document["first"]["site"]) == ("layer 1", "pattern")
    assert "layer,head,query,key" in mha("diff", "a.npz", "b.npy", code=2).said
    assert mha("diff", "a.npz", "b.npy", "a text", *axes, code=2).error
    assert "numpy" in mha("diff", checkpoints.folder("llama"), "a.npz", "a text", code=1).said
    assert (
        "--axes"
        in mha("diff", checkpoints.folder("llama"), "c.safetensors", "a", *axes, code=2).said
    )


def written(folder: Path, form: str) -> str:
    name = f"w.{form}"
    if form == "npy":
        np.save(folder / name, W)
    elif form == "npz":
        np.savez(folder / name, attention=W)
    else:
        save_file({"attention": W}, folder / name)
    return name


@pytest.mark.parametrize("form", ["npy", "npz", "safetensors"])
def test_a_file_of_weights_is_shown(form: str, mha: Any, tmp_path: Path) -> None:
    name = written(tmp_path, form)
    (tmp_path / "t.txt").write_text("\n".join(TOKENS) + "\n")
    (tmp_path / "t.json").write_text(json.dumps(TOKENS))
    refused = mha("show", name, code=2).said
    assert "layer,head,query,key or batch,head,query,key" in " ".join(refused.split())
    words = ["show", name, "--axes", AXES, "--layer", "1", "--head", "2"]
    ended = mha(*words, "--labels", "t.txt")
    assert ended.stdout.rstrip().endswith("not verified: weights as given")
    assert " .00 " in ended.stdout
    assert "mill" in ended.stdout
    document = mha(*words, "--labels", "t.json", "--json").json
    assert document["self_check"]["ok"] is None
    assert document["self_check"]["max_abs_error"] is None
    assert document["sequences"][0]["tokens"] == TOKENS
    mha(*words, "--labels", "t.txt", "--html", "w.html")
    assert "mill" in (tmp_path / "w.html").read_text()


def test_layers_in_numbered_arrays_are_in_the_order_of_the_numbers(
    mha: Any, tmp_path: Path
) -> None:
    layers = [W[i % 2] * 1.0 for i in range(11)]
    np.savez(tmp_path / "w.npz", *layers)
    document = mha("show", "w.npz", "--axes", "head,query,key", "--json").json
    assert [layer["layer"] for layer in document["layers"]] == [*range(11)]
    np.savez(tmp_path / "x.npz", first=W[0], other=W[1])
    assert "first, other" in mha("show", "x.npz", "--axes", "head,query,key", code=1).said


def test_layers_have_the_numbers_in_the_names_of_their_arrays(mha: Any, tmp_path: Path) -> None:
    save_file({"layers.11.attn_1": W[1], "layers.3.attn_1": W[0]}, tmp_path / "w.safetensors")
    words = ("show", "w.safetensors", "--axes", "head,query,key", "--json")
    document = mha(*words).json
    assert [layer["layer"] for layer in document["layers"]] == [3, 11]
    assert {head["layer"] for head in document["heads"]} == {3, 11}
    assert np.allclose(document["layers"][1]["pattern"], W[1][None], atol=1e-6)
    assert "layer 11" in mha(*words[:-1], "--layer", "11", "--head", "2").stdout
    for names in (["l1", "l01"], []):
        np.savez(tmp_path / "x.npz", **{name: W[0] for name in names})
        assert mha("show", "x.npz", "--axes", "head,query,key", code=1).error


@pytest.mark.parametrize(
    "text",
    [
        "the\r\nold\r\nmill\r\nand\r\nthe\r\n",
        "\ufeffthe\nold\nmill\nand\nthe",
        json.dumps([TOKENS]),
    ],
)
def test_labels_of_windows_and_of_json_are_the_tokens(text: str, mha: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(text, newline="")
    np.save(tmp_path / "w.npy", W)
    document = mha("show", "w.npy", "--axes", AXES, "--labels", "t.txt", "--json").json
    assert document["sequences"][0]["tokens"] == TOKENS
    (tmp_path / "t.txt").write_text("the\n\nmill\n")
    assert "3 tokens" in mha("show", "w.npy", "--axes", AXES, "--labels", "t.txt", code=2).said


def test_a_file_of_bfloat16_is_read_as_that(mha: Any, tmp_path: Path) -> None:
    save_tensors({"w": torch.tensor(W).bfloat16()}, tmp_path / "w.safetensors")
    document = mha("show", "w.safetensors", "--axes", AXES, "--json").json
    assert document["model"]["dtype"] == "bfloat16"


def test_pickles_and_archives_that_declare_too_much_are_refused(mha: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "pickle" in mha("show", "o.npy", "--axes", "query", code=1).said
    header = np.lib.format.magic(1, 0)
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 900000, 900000), }"
    text += " " * (-len(text) - 11 & 63) + "\n"
    data = header + len(text).to_bytes(2, "little") + text.encode() + b"0000"
    (tmp_path / "d.npy").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("w.npy", data)
    for name in ("d.npy", "d.npz"):
        assert "damaged" in mha("show", name, "--axes", "head,query,key", code=1).said


def test_without_torch_a_file_is_drawn_and_the_table_says_what_is_missing(
    mha: Any, tmp_path: Path
) -> None:
    name = written(tmp_path, "npz")
    hidden = {"torch": "raise ModuleNotFoundError('No module torch', name='torch')"}
    words = ["show", name, "--axes", AXES, "--layer", "1", "--head", "2"]
    ended = mha(*words, modules=hidden)
    assert "torch" in ended.stderr
    assert "without statistics" in ended.stdout
    assert "mixed" not in ended.stdout
    assert "x0" in ended.stdout
