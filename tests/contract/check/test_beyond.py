"""An attention that is right in a short call is compared in further ones: lengths, batches, widths,
sharp scores, dtypes, and gradients. The numbers of the kernels are right by torch's autograd.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import some, user_code
from support.kernels import ATTEND, CAUSALLY, KERNELS, MISTAKES, Layer, kernel
from support.mha import run_python
from torch import Tensor, nn

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = Path(__file__).with_name("cases")
FORMS = user_code.load(CASES / "forms.py")
VARIANTS = user_code.load(CASES / "variants.py")
COMMON = ("last block dropped", "dq without scale", "dk of the first head")


def printed_by(script: str, folder: Path, *, cold: bool = False) -> float:
    """The number that a script prints in the folder of the code: in a fork, which has no module of
    the folder, or in a new process.
    """
    assert len(script.splitlines()) <= 12
    assert "mha" not in script
    if cold:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    else:
        names = [path.stem for path in folder.glob("*.py")]
        without = f"[sys.modules.pop(name, None) for name in {names}]"
        done = run_python(folder, f"import sys\nsys.path.insert(0, '')\n{without}\n{script}")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("function", [ATTEND, CAUSALLY])
@pytest.mark.parametrize("mistake", some([*MISTAKES], default=COMMON))
def test_a_mistake_of_a_kernel_is_found_with_its_tensors_its_calls_and_a_script(
    tmp_path: Path, mistake: str, function: str
) -> None:
    each = MISTAKES[mistake]
    examination = user_code.check(getattr(kernel(tmp_path, mistake), function))
    if function not in each.is_wrong_in:
        assert examination.verdict == "right"
        return
    assert [finding.code for finding in examination.findings] == [each.code]
    assert not examination.ok
    (finding,) = examination.findings
    assert each.where in finding.where
    if each.tensors:
        assert finding.evidence.startswith(f"{each.tensors} differ")
        assert finding.error > finding.tolerance
    if each.where.endswith("127 keys"):
        assert finding.beyond == 127
    assert (finding.reproduce is None) == (each.code == "softmax-overflow")
    if finding.reproduce is not None:
        printed = printed_by(finding.reproduce, tmp_path)
        assert printed == pytest.approx(finding.error, rel=1e-3)


FORM = """import torch

{above}
def attend(q, k, v{more}):
    if k.shape[1] > 64:
        k = k + 1e-2 * torch.arange(k.shape[1])[:, None, None].to(k)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = {scores}
    n_q, n_k = scores.shape[-2:]
    hidden = torch.ones(n_q, n_k).triu(n_k - n_q + 1).bool()
    scores = scores.masked_fill(hidden, -torch.inf) if causal else scores
    return {out}
"""
SCORES = "q @ k.mT * q.shape[-1] ** -0.5"


@pytest.mark.parametrize(
    ("above", "more", "scores", "out"),
    [
        ("", ", causal=True", SCORES, "(scores.softmax(-1) @ v).transpose(1, 2), None"),
        pytest.param(
            "causal = False\n",
            ", /",
            f"({SCORES} / 2).tanh() * 2",
            "(scores.softmax(-1) @ v).transpose(1, 2)",
            marks=pytest.mark.real,
        ),
    ],
    ids=["causal", "capped"],
)
def test_a_script_calls_the_function_as_it_was_called(
    tmp_path: Path, above: str, more: str, scores: str, out: str
) -> None:
    path = tmp_path / "forms_of_mine.py"
    path.write_text(FORM.format(above=above, more=more, scores=scores, out=out))
    (finding,) = user_code.check(user_code.load(path).attend).findings
    assert finding.code == "differs-beyond"
    assert printed_by(finding.reproduce, tmp_path, cold=not above) == pytest.approx(
        finding.error, rel=1e-6
    )


def test_a_script_shows_a_gradient_that_is_cut_and_sixteen_bits(mha: Any) -> None:
    examination = user_code.check(FORMS.detached_keys)
    assert printed_by(examination.findings[0].reproduce, CASES) > 0
    process = mha("check", f"{CASES / 'forms.py'}:detached_keys", "--verbose", code=3)
    assert examination.findings[0].reproduce in process.stdout


@pytest.mark.parametrize(
    ("mistake", "tensor"),
    [
        (None, ""),
        ("dk without scale", "d k_proj.weight"),
        pytest.param("last block dropped", "out", marks=pytest.mark.real),
        pytest.param("backward without a mask", "d x", marks=pytest.mark.real),
    ],
)
def test_a_layer_around_a_kernel_is_compared_with_its_parameters(
    tmp_path: Path, mistake: str | None, tensor: str
) -> None:
    layer = Layer(kernel(tmp_path, mistake).attend_causally)
    examination = user_code.check(layer)
    assert examination.verdict == ("right" if mistake is None else "wrong")
    for finding in examination.findings:
        assert tensor in finding.evidence


@pytest.mark.real
@pytest.mark.parametrize("function", [ATTEND, CAUSALLY])
@pytest.mark.parametrize("block", [16, 64])
def test_a_right_kernel_in_other_blocks_is_right_in_a_layer(
    tmp_path: Path, block: int, function: str
) -> None:
    layer = Layer(getattr(kernel(tmp_path, block=block), function))
    examination = user_code.check(layer)
    assert examination.verdict == "right", examination.summary


RIGHT = (
    "plain checkpointed grouped top_left log_sum_exp powers_of_two in_two_parts in_bfloat16 window"
    " narrow_window chunks capped alibi whole_tiles widths_of_two inference"
).split()


@pytest.mark.parametrize("name", some(RIGHT, default=("grouped", "window", "whole_tiles")))
def test_right_forms_are_right_in_every_call_that_they_take(name: str) -> None:
    examination = user_code.check(getattr(FORMS, name))
    assert examination.verdict == "right", examination.summary
    compared = examination.compared
    assert compared.attention
    assert compared.dtypes == ("float64", "float32", "bfloat16", "float16")
    assert compared.backward.compared == (name != "inference")
    assert max(compared.lengths) == (320 if name == "whole_tiles" else 257)
    is_chosen = "causal-top-left" in [choice.name for choice in examination.choices]
    assert is_chosen == (name == "top_left")
    if name == "whole_tiles":
        assert all(length % 64 == 0 for length in compared.lengths)
    assert any("bfloat16" in note for note in examination.notes) == (name == "in_bfloat16")


def test_a_function_of_16_bits_alone_is_compared_in_these() -> None:
    examination = user_code.check(FORMS.of_16_bits)
    assert examination.verdict == "right"
    assert set(examination.compared.dtypes) == {"bfloat16", "float16"}
    assert max(examination.compared.lengths) == 257

    def forgetting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = min(k.shape[2], 128)
        return FORMS.of_16_bits(q, k[:, :, :n], v[:, :, :n])

    assert user_code.check(forgetting).verdict == "wrong"


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("detached_keys", "dk"),
        ("zeros_for_keys", "dk"),
        ("detached_queries", "dq"),
        ("pattern_without_graph", "dq, dk"),
        ("pattern_of_numbers", "dq, dk"),
    ],
)
def test_a_gradient_that_is_cut_is_named_unless_none_is_wanted(name: str, cut: str) -> None:
    function = getattr(FORMS, name)
    examination = user_code.check(function)
    assert [finding.code for finding in examination.findings] == ["gradient-cut"]
    assert f" {cut}," in examination.findings[0].evidence
    for_inference = user_code.check(function, backward=False)
    assert for_inference.verdict == "right"
    assert not for_inference.compared.backward.compared


def test_code_without_gradients_is_right_unless_they_are_wanted() -> None:
    assert user_code.check(FORMS.inference).compared.backward.reason
    wanted = user_code.check(FORMS.inference, backward=True)
    assert [finding.code for finding in wanted.findings] == ["gradient-cut"]


def test_a_frozen_projection_needs_no_gradient() -> None:
    layer = Layer(FORMS.grouped)
    layer.k_proj.requires_grad_(False)
    assert user_code.check(layer).verdict == "right"


def test_no_call_is_longer_than_the_length_that_is_given(mha: Any) -> None:
    process = mha("check", f"{KERNELS}:attend", "--length", "70", "--no-backward", "--json")
    document = json.loads(process.stdout)
    assert document["verdict"] == "right"
    compared = document["compared"]
    assert max(compared["lengths"]) == 70
    assert "B=1 Tq=1 Tk=70 H=1 Hkv=1 d=16 dv=16" in compared["shapes"]
    assert "B=1 Tq=70 Tk=70 H=1 Hkv=1 d=64 dv=64" in compared["shapes"]
    assert compared["backward"]["compared"] is False


def test_sixteen_bits_that_lose_more_than_the_formula_are_found() -> None:
    def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if q.dtype == torch.bfloat16:
            scores = (scores * 4).round() / 4
        return scores.softmax(-1) @ v

    examination = user_code.check(coarse)
    assert [finding.code for finding in examination.findings] == ["differs-in-16-bits"]
    assert "bfloat16" in examination.findings[0].where


def test_sharp_scores_of_many_keys_are_tried() -> None:
    def capped_from_128(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return torch.cat([scores[..., :128], scores[..., 128:].clamp(max=30)], -1).softmax(-1) @ v

    assert user_code.check(capped_from_128).verdict == "wrong"


def test_positions_end_the_lengths_and_a_longer_one_is_refused_with_the_longest() -> None:
    class Masked(Layer):
        def __init__(self, n: int) -> None:
            super().__init__(nn.functional.scaled_dot_product_attention, n_kv_heads=4)
            self.register_buffer("mask", torch.ones(n, n, dtype=torch.bool).tril())
            self.attend = self.masked

        def masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            n = q.shape[-2]
            scores = (q @ k.mT * 24**-0.5).masked_fill(~self.mask[:n, :n], -torch.inf)
            return scores.softmax(-1) @ v

    assert 63 in user_code.check(Masked(63)).compared.lengths
    with pytest.raises(mhacli.MhaError, match="100 tokens") as refused:
        user_code.check(Masked(63), length=100)
    assert "length=63 " in refused.value.hint


def test_no_step_behind_a_cache_is_longer_than_the_stated_length(tmp_path: Path) -> None:
    shape = "b, t, d = x.shape"
    past = "0 if layer_past is None else layer_past[0].size(-2)"
    noted = f'open(__file__ + ".txt", "a").write(f"{{t + ({past})}} ")'
    path, _ = user_code.write(tmp_path, "cached:RotaryPast", (shape, f"{shape}; {noted}"))
    assert user_code.check(user_code.load(path).RotaryPast, length=32).verdict == "right"
    lengths = Path(f"{path}.txt").read_text().split()
    assert max(map(int, lengths)) == 32


@pytest.mark.parametrize(
    ("name", "code", "where"),
    [
        ("strides_of_queries", "differs-beyond", "only with strided inputs"),
        ("strides_of_gradient", "gradient-differs", "only with strided inputs"),
        ("scale_not_used", "differs-beyond", "only with scale=0.3"),
        ("scale_of_gradient", "gradient-differs", "only with softmax_scale=0.3"),
        ("mask_of_gradient", "gradient-differs", "only with attn_mask=…"),
        ("shared_workspace", "gradient-differs", "only with another call before"),
        ("MaskOfGradient", "gradient-differs", "only with attn_mask=…"),
        ("CacheOf40", "differs-beyond", "behind a cache of 256 tokens"),
    ],
)
def test_what_a_plain_call_does_not_show_is_tried(name: str, code: str, where: str) -> None:
    examination = user_code.check(built(name))
    assert [finding.code for finding in examination.findings] == [code]
    assert where in examination.findings[0].where


def built(name: str) -> Any:
    thing = getattr(VARIANTS, name)
    return thing() if isinstance(thing, type) else thing


@pytest.mark.parametrize(
    "name", ["right_by_hand", "right_views_only", "right_divides", "right_switch"]
)
def test_a_right_one_is_right_in_every_variant(name: str) -> None:
    examination = user_code.check(built(name))
    assert examination.verdict == "right"
    assert examination.not_examined == ()


def test_the_sentence_says_which_arguments_kept_their_values() -> None:
    examination = user_code.check(VARIANTS.unexamined_reach)
    assert examination.sentence.endswith("; not examined: reach")
    assert examination.limits == ()


def test_a_causal_switch_is_tried_both_ways() -> None:
    examination = user_code.check(VARIANTS.sees_later_if_causal)
    assert [finding.modes for finding in examination.findings] == [("causal",)]
    assert "causal=True" in examination.called
    (finding,) = user_code.check(VARIANTS.gradient_if_not_causal).findings
    assert (finding.code, finding.modes) == ("gradient-cut", ("full",))
    stated = user_code.check(VARIANTS.gradient_if_not_causal, causal=True)
    assert stated.verdict == "right"


def test_an_argument_that_is_changed_in_place_is_a_note() -> None:
    examination = user_code.check(VARIANTS.in_place)
    assert examination.verdict == "right"
    assert examination.notes == ("it changes q of its caller in place",)
    assert user_code.check(VARIANTS.weights_in_place).verdict == "right"
