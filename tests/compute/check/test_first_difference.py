"""The first difference between two attentions with the same weights: the first site, and the line in each."""

from __future__ import annotations

import textwrap

import pytest
import torch

from mhacli.compute.check.against import compare, factor_of, first_apart
from mhacli.errors import MhaError
from mhacli.requests.user_code import CheckRequest, TargetRequest

SOURCE = '''
import math

import torch
import torch.nn.functional as F
from torch import nn


class Right(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def cut(self, rows):
        return rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def queries(self, x):
        return self.cut(self.wq(x))

    def keys(self, x):
        return self.cut(self.wk(x))

    def values(self, x):
        return self.cut(self.wv(x))

    def scored(self, q, k):
        return q @ k.mT

    def scaled(self, qk, d_head):
        return qk / math.sqrt(d_head)

    def shared(self, scores):
        return scores.softmax(-1)

    def read(self, pattern, v):
        return pattern @ v

    def joined(self, z):
        return z.transpose(1, 2).flatten(2)

    def left(self, concat):
        return self.wo(concat)

    def forward(self, x):
        q, k, v = self.queries(x), self.keys(x), self.values(x)
        pattern = self.shared(self.scaled(self.scored(q, k), q.shape[-1]))
        return self.left(self.joined(self.read(pattern, v)))


class Uncut(Right):
    def queries(self, x):
        return self.wq(x).view(x.shape[0], self.n_heads, x.shape[1], -1)  # q


class KeysTwice(Right):
    def keys(self, x):
        return 2 * self.cut(self.wk(x))  # k


class KeysExchanged(Right):
    """Transposed at a line of its own."""

    def keys(self, x):
        return self.cut(self.wk(x)).flip(1)  # k

    def scored(self, q, k):
        return q @ k.transpose(-1, -2)


class KeysAsValues(Right):
    def values(self, x):
        return self.cut(self.wk(x))  # v


class Negative(Right):
    def scored(self, q, k):
        return -(q @ k.mT)  # scores


class ByWidth(Right):
    def scaled(self, qk, d_head):
        return qk / math.sqrt(d_head * self.n_heads)  # scores


class Hidden(Right):
    def scaled(self, qk, d_head):
        return (qk / math.sqrt(d_head)).masked_fill(torch.ones(qk.shape[-2:]).triu(1).bool(), -1e9)  # scores


class OverQueries(Right):
    def shared(self, scores):
        return scores.softmax(-2)  # pattern


class Doubled(Right):
    def read(self, pattern, v):
        return (pattern + pattern.mT) @ v  # pattern


class Unjoined(Right):
    def joined(self, z):
        return z.reshape(z.shape[0], z.shape[2], -1)  # concat


class Residual(Right):
    def left(self, concat):
        return self.wo(concat) + concat  # out


class Before(Right):
    """Queries are scaled in place of scores: the same attention."""

    def queries(self, x):
        return self.cut(self.wq(x)) * (x.shape[-1] // self.n_heads) ** -0.5

    def scaled(self, qk, d_head):
        return qk


class BeforeOverQueries(Before):
    def shared(self, scores):
        return scores.softmax(-2)  # pattern


class Looped(Right):
    """Head after head."""

    def forward(self, x):
        parts = zip(*(w(x).chunk(self.n_heads, -1) for w in (self.wq, self.wk, self.wv)))
        return self.wo(torch.cat([self.shared(self.scaled(q @ k.mT, q.shape[-1])) @ v for q, k, v in parts], -1))


class LoopedOverQueries(Looped):
    def shared(self, scores):
        return scores.softmax(-2)  # pattern


class Kernel(Right):
    """By torch's own kernel, which shows no scores."""

    scale = None

    def forward(self, x):
        q, k, v = self.queries(x), self.keys(x), self.values(x)
        return self.left(self.joined(F.scaled_dot_product_attention(q, k, v, scale=self.scale)))  # z


class KernelUnscaled(Kernel):
    scale = 1.0


class KernelOfKeys(Kernel):
    def values(self, x):
        return self.cut(self.wk(x))  # v


class Given(nn.Module):
    """A config in place of arguments, and no defaults."""

    def __init__(self, width, heads, factor):
        super().__init__()
        self.inner, self.factor = Right(width, heads), factor

    def forward(self, x):
        return self.inner(x) * self.factor


def made(embed_dim, num_heads):
    """A function that builds."""
    return OverQueries(embed_dim, num_heads)
'''
ARGUMENTS = (("d_model", "12"), ("n_heads", "3"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


@pytest.fixture(scope="module")
def compared(file):
    def made(one, other, own=()):
        target = other if ":" in other else f"{file}:{other}"
        request = CheckRequest(TargetRequest(f"{file}:{one}", ARGUMENTS), TargetRequest(target, tuple(own)))
        return compare(request, lambda *stage, **how: None)

    return made


WRONG = {
    "Uncut": "q", "KeysTwice": "k", "KeysExchanged": "k", "KeysAsValues": "v", "Negative": "scores", "ByWidth": "scores",
    "Hidden": "scores", "OverQueries": "pattern", "Doubled": "pattern", "Unjoined": "concat", "Residual": "out",
    "BeforeOverQueries": "pattern", "LoopedOverQueries": "pattern", "KernelUnscaled": "z", "KernelOfKeys": "v",
}  # fmt: skip


@pytest.mark.parametrize(("name", "site"), WRONG.items())
def test_the_first_site_that_differs_is_named_with_the_line_that_makes_it(name, site, compared, file):
    gone = compared(name, "Right").departure
    assert gone.site == site
    assert gone.file == gone.other_file == str(file)
    body = file.read_text().split(f"class {name}(")[1].split("\nclass ")[0]
    if f"# {site}" in body:
        assert gone.source.endswith(f"# {site}")
        assert gone.source in body
    assert file.read_text().splitlines()[gone.line - 1].strip() == gone.source
    assert file.read_text().splitlines()[gone.other_line - 1].strip() == gone.other_source
    assert gone.source != gone.other_source


@pytest.mark.parametrize("name", ["OverQueries", "KeysAsValues", "Unjoined"])
def test_asked_the_other_way_round_the_two_lines_change_places(name, compared):
    one, other = compared(name, "Right").departure, compared("Right", name).departure
    assert (one.site, one.line, one.other_line) == (other.site, other.other_line, other.line)


@pytest.mark.parametrize("name", ["Before", "Looped", "Kernel"])
def test_what_comes_out_the_same_does_not_part(name, compared):
    found = compared(name, "Right")
    assert (found.verdict, found.departure) == ("right", None)


def test_of_torchs_own_module_there_is_no_line(compared, file):
    gone = compared("OverQueries", "torch.nn:MultiheadAttention", own=[("batch_first", "true")]).departure
    assert (gone.site, gone.last_shared) == ("pattern", "scores")
    assert gone.source == "return scores.softmax(-2)  # pattern"
    assert (gone.other_file, gone.other_source) == (None, "")


def test_the_other_has_arguments_of_its_own(compared):
    own = [("width", "12"), ("heads", "3")]
    assert compared("Right", "Given", own=[*own, ("factor", "1.0")]).verdict == "right"
    found = compared("Right", "Given", own=[*own, ("factor", "3.0")])
    assert (found.verdict, found.departure.site) == ("wrong", "out")


def test_a_function_that_builds_has_the_sizes_of_the_first_by_its_own_names(compared):
    assert compared("OverQueries", "made").verdict == "right"
    assert compared("Right", "made").departure.site == "pattern"


def test_its_own_arguments_come_before_those_of_the_first(compared):
    with pytest.raises(MhaError) as raised:
        compared("Right", "Uncut", own=[("d_model", "24")])
    assert raised.value.code == "cannot-compare"


def test_a_hint_about_the_other_speaks_of_its_own_options(compared):
    with pytest.raises(MhaError) as raised:
        compared("Right", "Uncut", own=[("d_modle", "24")])
    assert "--against-arg d_model?" in raised.value.hint


@pytest.mark.parametrize(
    ("factors", "site"),
    [
        ({"q": 1.0, "k": 1.0, "v": None, "qk": None, "scores": None, "pattern": None, "z": None, "out": None}, "v"),
        ({"q": 2.0, "qk": 2.0, "scores": 2.0, "pattern": None, "z": None, "out": None}, "q"),
        ({"q": 0.5, "qk": 0.5, "scores": 2.0, "pattern": None, "z": None, "out": None}, "scores"),
        ({"q": None, "qk": None, "scores": 1.0, "pattern": 1.0, "z": 1.0, "concat": None, "out": None}, "concat"),
        ({"v": 2.0, "pattern": 1.0, "z": 1.0, "out": None}, "out"),
        ({"out": 1.0}, None),
    ],
)
def test_a_difference_that_is_taken_back_later_is_none(factors, site):
    assert first_apart(factors) == site


def test_numbers_are_compared_in_any_order_of_axes():
    generator = torch.Generator().manual_seed(4)
    heads = torch.randn(2, 3, 5, 7, generator=generator)
    assert factor_of((heads,), (heads.transpose(1, 2),)) == 1.0
    assert factor_of((heads,), (0.25 * heads.flatten(0, 1),)) == pytest.approx(4.0)
    assert factor_of((heads,), tuple(heads.unbind(1))) == 1.0
    assert factor_of((heads.repeat_interleave(2, 1),), (heads,)) == 1.0
    assert factor_of((heads,), (heads.flip(1),)) is None
    assert factor_of((heads,), (heads.masked_fill(heads > 1, -1e9),)) is None
