"""Right layers of the zoo are right, wrong ones wrong by their one mistake: by a formula in plain loops, in float64.

Nothing here comes from mhacli.
"""

import ast
import dataclasses
import functools
import importlib
import math
import warnings
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import attention_zoo as zoo
from support.attention_zoo import RIGHT, TROUBLES, UNUSUAL, WRONG, Case, Right, Unusual, Wrong

BATCH, Q_LEN, K_LEN, D_HEAD, D_V = 3, 5, 7, 8, 6
MARGIN = 0.5
LARGE = 300.0
DRAWS = 5_000


def ids(cases):
    return [f"{getattr(case, 'code', '')}-{case.name}-{i}" for i, case in enumerate(cases)]


# The formula


class Projections(NamedTuple):
    """Weights `[head, width, d_in]` and biases `[head, width]` of q, k and v; those of the output, as nn.Linear has them."""

    q: tuple[np.ndarray, np.ndarray]
    k: tuple[np.ndarray, np.ndarray]
    v: tuple[np.ndarray, np.ndarray]
    out: tuple[np.ndarray, np.ndarray] | None


def formula(case: Case, projections: Projections | None, queries, keys, values, allowed):
    """Multi-head attention: one query of one head of one sequence after another."""
    n_batch, n_queries = allowed.shape[:2]
    heads = [
        cut(rows, pair) for rows, pair in zip((queries, keys, values), (projections or [None] * 3)[:3], strict=True)
    ]
    n_kv_heads = heads[1].shape[1]
    group = heads[0].shape[1] // n_kv_heads
    contexts = np.zeros((n_batch, n_queries, heads[0].shape[1], heads[2].shape[3]))
    for b, i, h in np.ndindex(contexts.shape[:3]):
        visible = [j for j in range(allowed.shape[2]) if allowed[b, i, j]]
        if not visible:
            continue
        q = turned(heads[0][b, h, i], i + allowed.shape[2] - n_queries, case.rope)
        scores = np.array([q @ turned(heads[1][b, h // group, j], j, case.rope) for j in visible])
        scores = scores * (case.scale or 1 / math.sqrt(len(q)))
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        shares = np.exp(scores - scores.max())
        for share, j in zip(shares / shares.sum(), visible, strict=True):
            contexts[b, i, h] += share * heads[2][b, h // group, j]
    if projections is None:
        return contexts.transpose(0, 2, 1, 3)
    rows = contexts.reshape(n_batch, n_queries, -1)
    return rows if projections.out is None else rows @ projections.out[0].T + projections.out[1]


def cut(rows, pair):
    """`[batch, head, length, width]`: what each head makes of rows, or the rows if they are cut already."""
    if pair is None:
        return rows
    weight, bias = pair
    return np.stack([rows @ weight[h].T + bias[h] for h in range(len(weight))], axis=1)


def turned(vector, place, pairing):
    if not pairing:
        return vector
    half, out = len(vector) // 2, vector.copy()
    for n in range(half):
        a, b = (n, n + half) if pairing == "half" else (2 * n, 2 * n + 1)
        angle = place * 10000.0 ** (-2 * n / len(vector))
        out[a] = vector[a] * math.cos(angle) - vector[b] * math.sin(angle)
        out[b] = vector[a] * math.sin(angle) + vector[b] * math.cos(angle)
    return out


def sight(case: Case, keep, real, n_queries, n_keys):
    """`[batch, query, key]`, True where the right answer looks."""
    words = case.sees.split()
    allowed = np.ones((BATCH, n_queries, n_keys), dtype=bool)
    for i in range(n_queries):
        if "causal" in words:
            allowed[:, i, i + n_keys - n_queries + 1 :] = False
    if "mask" in words:
        allowed &= keep[:, 0].numpy()
    if {"padding", "left-padding"} & set(words):
        allowed &= real[:, None, :].numpy()
    return allowed


# Weights, wherever a layer keeps them


def numbers(t):
    return t.detach().double().numpy()


def layer(it, name):
    """Weight and bias of a linear layer, by its name; None if there is none."""
    if name == "-":
        return None
    found = it.get_submodule(name)
    weight = numbers(found.weight)
    return weight, np.zeros(len(weight)) if found.bias is None else numbers(found.bias)


def by_head(pair, n_heads):
    weight, bias = pair
    return weight.reshape(n_heads, -1, weight.shape[1]), bias.reshape(n_heads, -1)


def parted(pair, sizes):
    ends = np.cumsum(sizes)[:-1]
    return list(zip(np.split(pair[0], ends), np.split(pair[1], ends), strict=True))


def weights_of(case: Case, it) -> Projections | None:
    if case.is_function:
        return None
    kind, _, words = case.weights.rpartition(":")
    heads, kv_heads = case.heads, case.kv_heads or case.heads
    q, k, v, out = READERS[kind](it, words.split(), heads, kv_heads)
    return Projections(by_head(q, heads), by_head(k, kv_heads), by_head(v, kv_heads), out)


def separate(it, names, heads, kv_heads):
    return [layer(it, name) for name in names]


def fused(it, names, heads, kv_heads):
    return (*thirds(layer(it, names[0]), heads, kv_heads), layer(it, names[1]))


def thirds(pair, heads, kv_heads):
    width = len(pair[1]) // (heads + 2 * kv_heads)
    return parted(pair, [heads * width, kv_heads * width, kv_heads * width])


def fused_per_head(it, names, heads, kv_heads):
    weight, bias = layer(it, names[0])
    weight, bias = weight.reshape(heads, 3, -1, weight.shape[1]), bias.reshape(heads, 3, -1)
    parts = [(weight[:, i].reshape(-1, weight.shape[3]), bias[:, i].reshape(-1)) for i in range(3)]
    return (*parts, layer(it, names[1]))


def strided(it, names, heads, kv_heads):
    def ordered(pair):
        order = np.arange(len(pair[1])).reshape(-1, heads).T.reshape(-1)
        return pair[0][order], pair[1][order]

    q, k, v, (weight, bias) = fused(it, names, heads, kv_heads)
    columns = np.arange(weight.shape[1]).reshape(-1, heads).T.reshape(-1)
    return ordered(q), ordered(k), ordered(v), (weight[:, columns], bias)


def keys_with_values(it, names, heads, kv_heads):
    pair = layer(it, names[1])
    return layer(it, names[0]), *parted(pair, [len(pair[1]) // 2] * 2), layer(it, names[2])


def loop(it, names, heads, kv_heads):
    parts = [[layer(it, name.format(i=i)) for i in range(heads)] for name in names[:3]]
    return (*(tuple(map(np.concatenate, zip(*part, strict=True))) for part in parts), layer(it, names[3]))


def torchs_own(it, names, heads, kv_heads):
    found = it.get_submodule(names[0]) if names else it
    fused_pair = numbers(found.in_proj_weight), numbers(found.in_proj_bias)
    return (*thirds(fused_pair, heads, kv_heads), layer(found, "out_proj"))


def matrices(it, names, heads, kv_heads):
    weights = [numbers(getattr(it, name)).T for name in names]
    return [(weight, np.zeros(len(weight))) for weight in weights]


def conv1d(it, names, heads, kv_heads):
    pairs = [(numbers(it.get_submodule(n).weight).T, numbers(it.get_submodule(n).bias)) for n in names]
    return (*thirds(pairs[0], heads, kv_heads), pairs[1])


def kernels(it, names, heads, kv_heads):
    def rows(letter):
        weight = numbers(getattr(it, f"W_{letter}"))
        return weight.transpose(0, 2, 1).reshape(-1, weight.shape[1]), numbers(getattr(it, f"b_{letter}")).reshape(-1)

    out = numbers(it.W_O)
    return rows("Q"), rows("K"), rows("V"), (out.reshape(-1, out.shape[2]).T, numbers(it.b_O))


def dictionary(it, names, heads, kv_heads):
    return [(numbers(it.weights[f"{n}_weight"]), numbers(it.weights[f"{n}_bias"])) for n in names]


READERS = {
    "": separate,
    "fused": fused,
    "per-head": fused_per_head,
    "strided": strided,
    "kv": keys_with_values,
    "loop": loop,
    "torch": torchs_own,
    "matrices": matrices,
    "conv1d": conv1d,
    "kernels": kernels,
    "dictionary": dictionary,
}


# Layers, built and asked


@functools.cache
def names_in(path) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": path.stem}
    exec(compile(zoo.text_of(path), path, "exec"), scope)
    return scope


def thing_of(case: Case):
    if not case.file:
        module, name = case.name.split(":")
        return getattr(importlib.import_module(module), name)
    return names_in(case.path)[case.name]


@functools.cache
def mended_thing(case: Wrong):
    """The same class, or function, with the few words of its source exchanged that are the mistake."""
    scope = dict(names_in(case.path))
    exec(case.mended_source, scope)
    if case.elsewhere:
        exec(case.source, scope)
    return scope[case.name]


def built(case: Case, thing):
    """In eval, in float64, with weights and biases that are all random and none zero."""
    torch.manual_seed(1)
    if case.is_function:
        return thing
    it = thing(**{name: value_of(value) for name, _, value in (pair.partition("=") for pair in case.arguments.split())})
    if not isinstance(it, torch.nn.Module):
        return it
    for parameter in it.parameters():
        spread = 1.4 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.7
        torch.nn.init.normal_(parameter, 0.0, spread)
    return it.double().eval()


def value_of(text):
    return {"true": True, "false": False}[text] if text in ("true", "false") else ast.literal_eval(text)


def inputs_for(case: Case, projections: Projections | None, seed=2, factor=1.0):
    """What the case's call speaks of, by name."""
    made = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64) * factor

    of_itself = "x" in {node.id for node in ast.walk(ast.parse(case.call)) if isinstance(node, ast.Name)}
    n_keys = Q_LEN if of_itself else K_LEN
    if projections is None:
        lead = (BATCH, case.heads)
        given = {"q": random(*lead, Q_LEN, D_HEAD), "k": random(*lead, K_LEN, D_HEAD), "v": random(*lead, K_LEN, D_V)}
    elif of_itself:
        given = {"x": random(BATCH, Q_LEN, projections.q[0].shape[2])}
    else:
        lengths = {"q": Q_LEN, "k": K_LEN, "v": K_LEN}
        given = {n: random(BATCH, lengths[n], getattr(projections, n)[0].shape[2]) for n in "qkv"}
    keep = torch.rand(BATCH, 1, Q_LEN, n_keys, generator=made) < 0.5
    for i in range(Q_LEN):
        keep[..., i, i], keep[..., i, (i + 1) % n_keys] = True, False
    order = torch.randperm(BATCH, generator=made)
    lengths = torch.tensor([n_keys - 2, n_keys, 1])[order]
    real = torch.arange(n_keys) < lengths[:, None]
    real = real.flip(1) if "left-padding" in case.sees else real
    return given | {"keep": keep, "real": real, "lengths": lengths}


def asked(case: Case, it, given):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Implicit dimension choice for softmax")
        out = eval(case.call, {"it": it, "torch": torch, "math": math} | given)
    assert isinstance(out, torch.Tensor)
    return numbers(out)


def wanted(case: Case, projections, given):
    queries, keys, values = (numbers(given.get("x", given.get(name))) for name in "qkv")
    if "same-rows" in case.sees:
        values = keys
    if "last-two" in case.sees:
        queries = queries[:, -2:]
    allowed = sight(case, given["keep"], given["real"], queries.shape[-2], keys.shape[-2])
    return formula(case, projections, queries, keys, values, allowed)


def pair_of_answers(case: Case, thing, when="eval"):
    """What it says, and what the formula says."""
    it = built(case, thing)
    projections = weights_of(case, it)
    given = inputs_for(case, projections, factor=LARGE if when == "large" else 1.0)
    if when == "second":
        asked(case, it, inputs_for(case, projections, seed=3))
    if when == "training":
        return mean_in_training(it, given["x"]), wanted(case, projections, given)
    return asked(case, it, given), wanted(case, projections, given)


def mean_in_training(it, x):
    it.train()
    with torch.no_grad():
        return np.stack([numbers(it(row.expand(DRAWS, -1, -1)).mean(dim=0)) for row in x])


def difference(answers):
    ours, right = answers
    assert ours.shape == right.shape
    return np.abs(ours - right).max() if np.isfinite(ours).all() else math.inf


def close_enough(case: Case, when):
    return {"training": 0.2, "large": 1e-6}.get(when, getattr(case, "atol", 1e-11))


# What holds of the zoo


@pytest.mark.sampled(34)
@pytest.mark.parametrize("case", RIGHT, ids=ids(RIGHT))
def test_a_right_layer_equals_the_formula(case: Right):
    assert difference(pair_of_answers(case, thing_of(case))) < close_enough(case, "eval")


@pytest.mark.sampled(34)
@pytest.mark.parametrize("case", RIGHT, ids=ids(RIGHT))
def test_a_right_layer_forgets_what_it_was_asked_before(case: Right):
    assert difference(pair_of_answers(case, thing_of(case), "second")) < close_enough(case, "second")


@pytest.mark.sampled(34)
@pytest.mark.parametrize("case", WRONG, ids=ids(WRONG))
def test_a_wrong_layer_differs_from_the_formula_where_its_mistake_shows(case: Wrong):
    shapes, right_shapes = shapes_of(case, thing_of(case)), shapes_of(case, mended_thing(case))
    if shapes == right_shapes:
        assert difference(pair_of_answers(case, thing_of(case), case.when)) > MARGIN
    else:  # its weights are none that the formula could take, and yet it answers
        assert sum(map(math.prod, shapes)) != sum(map(math.prod, right_shapes))
        rows = inputs_for(case, weights_of(case, built(case, mended_thing(case))))
        assert asked(case, built(case, thing_of(case)), rows).shape == rows["x"].shape


@pytest.mark.sampled(34)
@pytest.mark.parametrize("case", WRONG, ids=ids(WRONG))
def test_a_wrong_layer_is_right_once_its_one_mistake_is_mended(case: Wrong):
    thing = mended_thing(case)
    for when in {"eval", case.when}:
        assert difference(pair_of_answers(case, thing, when)) < close_enough(case, when)


def shapes_of(case, thing):
    return [] if case.is_function else [tuple(parameter.shape) for parameter in built(case, thing).parameters()]


@pytest.mark.sampled(34)
@pytest.mark.parametrize("case", WRONG, ids=ids(WRONG))
def test_the_line_of_a_mistake_is_the_one_to_be_mended(case: Wrong):
    first, last = case.culprit.lines
    assert case.mended[0][0].strip().splitlines()[0] in zoo.text_of(case.path).splitlines()[case.line - 1]
    assert first < case.line <= last


BY_NAME = {case.name: case for case in UNUSUAL}


ALONE = [case for case in UNUSUAL if case.call.startswith("it(x") and case.arguments]


@pytest.mark.parametrize("case", ALONE, ids=ids(ALONE))
def test_an_unusual_layer_answers_with_finite_numbers(case: Unusual):
    it = built(case, thing_of(case))
    given = inputs_for(case, Projections(*[(np.zeros((1, 1, 24)),) * 2] * 3, None))
    assert np.isfinite(asked(case, it, given)).all()


def test_a_bias_of_the_keys_is_seen_in_no_output():
    case = BY_NAME["UnseenKeyBias"]
    assert difference(pair_of_answers(case, thing_of(case))) < 1e-11


def test_every_code_has_a_layer_of_separate_projections_and_a_fused_one():
    styles = {(case.code, case.file) for case in WRONG}
    lacking = [
        (code, file) for code in zoo.CODES for file in ("wrong_separate", "wrong_fused") if (code, file) not in styles
    ]
    assert lacking == []
    assert {case.code for case in WRONG if case.extra}.isdisjoint(zoo.CODES)
    assert {case.code for case in WRONG if not case.extra} == set(zoo.CODES)


def test_every_layer_of_the_files_is_in_a_table():
    parts = {"Head", "SingleHead", "OneHead", "Conv1D", "GPTConfig", "Plain"}
    for file in {case.file for case in zoo.ALL if case.path.exists()}:
        tree = ast.parse(zoo.text_of(zoo.FOLDER / f"{file}.py"))
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert classes - {case.name for case in zoo.ALL if case.file == file} <= parts


def test_no_two_cases_ask_the_same():
    commands = Counter(" ".join(case.command) for case in zoo.ALL)
    assert [command for command, n in commands.items() if n > 1] == []


def test_the_choices_of_right_layers_have_a_meaning():
    assert {choice for case in RIGHT for choice in case.choices} <= set(zoo.CHOICES)


# Layers that make trouble do the trouble that they are there for


def trouble(name, **changes):
    case = next(
        case for case in TROUBLES if case.name == name and (not changes or case.arguments == changes["arguments"])
    )
    return dataclasses.replace(case, weights="fused:qkv out", options="")


@pytest.mark.parametrize("name", ["Shouts", "Counts", "FloatOnly", "WantsArgument", "WantsKeyword"])
def test_a_layer_that_is_right_in_spite_of_its_trouble_equals_the_formula(name):
    case = trouble(name, **({"arguments": "d_model=24 n_heads=3 flux_capacity=2"} if name == "WantsArgument" else {}))
    case = dataclasses.replace(case, call="it(x, temperature_schedule=1.0)") if name == "WantsKeyword" else case
    assert difference(pair_of_answers(case, thing_of(case))) < 1e-5


def test_a_layer_that_drifts_answers_otherwise_in_a_second_call():
    case = trouble("Drifts")
    assert difference(pair_of_answers(case, thing_of(case))) < 1e-11
    assert difference(pair_of_answers(case, thing_of(case), "second")) > 1e-3


def test_a_layer_that_is_random_never_equals_the_formula():
    assert difference(pair_of_answers(trouble("Random"), thing_of(trouble("Random")))) > 1e-3


def test_a_layer_that_changes_its_input_leaves_other_rows_behind():
    case = trouble("ChangesItsInput")
    it = built(case, thing_of(case))
    given = inputs_for(case, weights_of(case, it))
    before = given["x"].clone()
    asked(case, it, given)
    assert not torch.equal(before, given["x"])


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("RaisesInForward", ValueError, "tide table"),
        ("RaisesInConstructor", RuntimeError, "licence"),
        ("RaisesForOddLengths", ValueError, "must be even, got 5"),
        ("WantsLengthSixteen", AssertionError, "expected 16 tokens"),
        ("WantsKeyword", TypeError, "temperature_schedule"),
        ("WantsArgument", TypeError, "flux_capacity"),
        ("HugeMemory", RuntimeError, "memory"),
        ("NoForward", NotImplementedError, "forward"),
        ("Exits", SystemExit, "0"),
    ],
)
def test_a_layer_that_raises_raises_what_it_should(name, fault, says):
    case = trouble(name)
    with pytest.raises(fault, match=says):
        asked(case, built(case, thing_of(case)), {"x": torch.ones(BATCH, Q_LEN, 24, dtype=torch.float64)})


def test_a_file_that_cannot_be_imported_raises_at_the_line_that_is_told():
    case = next(case for case in TROUBLES if case.file == "raises_on_import")
    with pytest.raises(RuntimeError, match="the table holds infinities") as caught:
        names_in(case.path)
    assert str(caught.traceback[-1].lineno + 1) in case.says
    text = (zoo.FOLDER / "syntax_error.py.txt").read_text(encoding="utf-8")
    with pytest.raises(SyntaxError) as fault:
        ast.parse(text)
    assert fault.value.lineno == 8
