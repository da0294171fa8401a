"""Examining attention with a cache: right code passes, and each cache mistake is named. The oracle calls each style by hand, in
steps and with the whole text at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import attention_zoo as zoo
from support.attention_zoo import Case
from support.examined import examined, written

PATH = zoo.FOLDER / "cached.py"
SOURCE = PATH.read_text(encoding="utf-8")
LENGTH, SPLITS = 6, ((1, 2, 3, 4, 5, 6), (4, 5, 6), (2, 4, 6))


def freqs(start: int, end: int, width: int = 8) -> torch.Tensor:
    angle = torch.outer(torch.arange(start, end).double(), 10000.0 ** (-torch.arange(0, width, 2).double() / width))
    return torch.polar(torch.ones_like(angle), angle)


def hidden(t: int, start: int, room: int = 0) -> torch.Tensor:
    n_keys = room or start + t
    return torch.zeros(t, n_keys, dtype=torch.float64).masked_fill(
        torch.arange(n_keys) > torch.arange(start, start + t)[:, None], -torch.inf
    )


def llama(it, rows, start, kept):
    return it(rows, start, freqs(start, start + rows.shape[1]), hidden(rows.shape[1], start)), None


def own_rotations(it, rows, start, kept):
    return it(rows, start_pos=start), None


def past(it, rows, start, kept):
    return it(rows, past_kv=kept, use_cache=True)


def layer_past(it, rows, start, kept):
    return it(rows, layer_past=kept)


def kv_cache(it, rows, start, kept):
    return it(rows, kv_cache=kept)


class Dynamic:
    def update(self, key, value, layer, more):
        if hasattr(self, "key"):
            key, value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        self.key, self.value = key, value
        return key, value


def hub(it, rows, start, kept):
    kept = kept or Dynamic()
    angle = freqs(start, start + rows.shape[1], 4).angle()
    both = torch.cat([angle, angle], -1)[None]
    mask = hidden(rows.shape[1], start)[None, None]
    return it(rows, (both.cos(), both.sin()), mask, kept, torch.arange(start, start + rows.shape[1]))[0], kept


def a_dict(it, rows, start, kept):
    kept = {} if kept is None else kept
    return it(rows, kv_cache=kept), kept


def fast(it, rows, start, kept):
    if not start:
        it.setup_cache(rows.shape[0], 11, rows.dtype)
    places = torch.arange(start, start + rows.shape[1])
    return it(rows, freqs(start, start + rows.shape[1]), hidden(rows.shape[1], start, 11), places), None


def growing(it, rows, start, kept):
    kept = kept or it.forward.__globals__["GrowingKeys"]()
    return it(rows, cache=kept), kept


def buffers(it, rows, start, kept):
    kept = kept or tuple(torch.zeros(rows.shape[0], LENGTH, 3, 8, dtype=rows.dtype) for _ in "kv")
    return it(rows, start_pos=start, kv_cache=kept), kept


def separate(it, rows, start, kept):
    out, k, v = it(rows, *(kept or ()))
    return out, (k, v)


def position_ids(it, rows, start, kept):
    out, _, kept = it(rows, torch.arange(start, start + rows.shape[1])[None], kept, use_cache=True)
    return out, kept


def own_growing(it, rows, start, kept):
    if not start:
        it.reset_cache()
    return it(rows, use_cache=True), None


STYLES: dict[str, Callable[..., Any]] = {
    "LlamaAttention": llama, "OwnRotations": own_rotations, "PastAttention": past, "RotaryPast": layer_past,
    "OneTokenAtATime": kv_cache, "HubAttention": hub, "DictCache": a_dict, "FastAttention": fast,
    "GrowingCacheAttention": growing, "GivenBuffers": buffers, "SeparateCaches": separate, "PositionIds": position_ids,
    "OwnGrowingCache": own_growing,
}  # fmt: skip


class Mutant(NamedTuple):
    """A right layer with some words of its source replaced, and the code of the resulting mistake."""

    name: str
    code: str
    pairs: tuple[tuple[str, str], ...]
    proven: bool = True


def mutant(name: str, code: str, *words: str, proven: bool = True) -> Mutant:
    return Mutant(name, code, tuple(zip(words[::2], words[1::2], strict=True)), proven)


P, O, M = "cache-position", "cache-order", "cache-mask"  # noqa: E741
MUTANTS = (
    mutant("LlamaAttention", O, "cache_k[:bsz, start_pos : start_pos + seqlen] =", "cache_k[:bsz, :seqlen] =",
           "cache_v[:bsz, start_pos : start_pos + seqlen] =", "cache_v[:bsz, :seqlen] ="),
    mutant("LlamaAttention", O, "cache_v[:bsz, start_pos : start_pos + seqlen] =", "cache_v[:bsz, :seqlen] ="),
    mutant("LlamaAttention", O, "self.cache_k[:bsz, : start_pos + seqlen]", "self.cache_k[:bsz, start_pos : start_pos + seqlen]",
           "self.cache_v[:bsz, : start_pos + seqlen]", "self.cache_v[:bsz, start_pos : start_pos + seqlen]",
           "scores + mask", "scores + mask[..., -keys.size(2) :]"),
    mutant("OwnRotations", P, "self.cos[start_pos : start_pos + t], self.sin[start_pos : start_pos + t]",
           "self.cos[:t], self.sin[:t]"),
    mutant("OwnRotations", P, "self.rotate(q, cos, sin)", "self.rotate(q, self.cos[:t], self.sin[:t])"),
    mutant("OwnRotations", P, "self.rotate(k, cos, sin)", "self.rotate(k, self.cos[:t], self.sin[:t])"),
    mutant("OwnRotations", P, "cos, sin = self.cos[start_pos : start_pos + t], self.sin[start_pos : start_pos + t]",
           "first = max(0, start_pos - 1)\n        cos, sin = self.cos[first : first + t], self.sin[first : first + t]"),
    mutant("OwnRotations", M, ".triu(start_pos + 1)", ".triu(1)"),
    mutant("OwnRotations", M, ".triu(start_pos + 1)", ".triu(start_pos + (2 if start_pos else 1))"),
    mutant("OwnRotations", M, ".triu(start_pos + 1)", ".triu(start_pos + (0 if start_pos else 1))"),
    mutant("OwnRotations", O, "cache_k[:b, start_pos : start_pos + t] =", "cache_k[:b, max(0, start_pos - 1) :][:, :t] ="),
    mutant("PastAttention", O, "torch.cat([past_k, k], dim=2)", "torch.cat([k, past_k], dim=2)",
           "torch.cat([past_v, v], dim=2)", "torch.cat([v, past_v], dim=2)"),
    mutant("PastAttention", O, "torch.cat([past_k, k], dim=2)", "torch.cat([k, past_k], dim=2)"),
    mutant("PastAttention", O, "return y, (k, v)", "return y, (k[:, :, -T:], v[:, :, -T:])"),
    mutant("PastAttention", O, "past_k, past_v = past_kv", "past_v, past_k = past_kv"),
    mutant("PastAttention", O, "past_k, past_v = past_kv", "past_k, past_v = (p[:1].expand_as(p) for p in past_kv)"),
    mutant("PastAttention", M, "self.bias[:, :, S - T : S, :S]", "self.bias[:, :, :T, :S]"),
    mutant("RotaryPast", P, "self.rope(q, start), self.rope(k, start)", "self.rope(q, 0), self.rope(k, 0)"),
    mutant("RotaryPast", P, "self.rope(q, start), self.rope(k, start)", "self.rope(q, 0), self.rope(k, start)"),
    mutant("RotaryPast", P, "layer_past[0].size(-2)\n        q, k = self.rope(q, start), self.rope(k, start)",
           "layer_past[0].size(-2)\n        at = start and self.n_heads\n        q, k = self.rope(q, at), self.rope(k, at)"),
    mutant("RotaryPast", M, ".tril(diagonal=start)", ".tril()"),
    mutant("RotaryPast", M, "attn_mask=allowed", "is_causal=True"),
    mutant("OneTokenAtATime", M, "is_causal=kv_cache is None", "is_causal=True"),
    mutant("OneTokenAtATime", O, "torch.cat([kv_cache[1], v], dim=2)", "torch.cat([v, kv_cache[1]], dim=2)"),
    mutant("HubAttention", O, "past_key_value.update(k, v,", "past_key_value.update(v, k,"),
    mutant("DictCache", O, '= k, v\n        seen', '= k[:, :, -n:], v[:, :, -n:]\n        seen'),
    mutant("DictCache", O, 'torch.cat([kv_cache["v"], v]', 'torch.cat([kv_cache["k"], v]'),
    mutant("DictCache", M, "diagonal=seen - n + 1", "diagonal=1"),
    mutant("FastAttention", O, "self.k_cache[:, :, input_pos] = k_val", "self.k_cache[:, :, : k_val.size(2)] = k_val",
           "self.v_cache[:, :, input_pos] = v_val", "self.v_cache[:, :, : v_val.size(2)] = v_val"),
    mutant("FastAttention", M, "attn_mask=mask", "attn_mask=None if seqlen == 1 else mask"),
    mutant("GrowingCacheAttention", O, "torch.cat([self.keys, keys], dim=1)", "torch.cat([keys, self.keys], dim=1)"),
    mutant("GrowingCacheAttention", M, "rows = torch.arange(start, start + x.size(1)", "rows = torch.arange(0, x.size(1)"),
    mutant("GivenBuffers", O, "k_cache[:b, start_pos : start_pos + t] = k", "k_cache[:b, :t] = k"),
    mutant("GivenBuffers", O, "k_cache[:b, : start_pos + t], v_cache[:b, : start_pos + t]", "k_cache[:b, :t], v_cache[:b, :t]"),
    mutant("SeparateCaches", O, "torch.cat([past_v, v], dim=2)", "torch.cat([v, past_v], dim=2)"),
    mutant("SeparateCaches", O, "return self.out_proj(out), k, v", "return self.out_proj(out), v, k"),
    mutant("SeparateCaches", M, "future.triu(k.size(2) - t + 1)", "future.triu(1)"),
    mutant("PositionIds", P, "self.rotary(q, position_ids)", "self.rotary(q, torch.arange(t, device=q.device)[None])"),
    mutant("PositionIds", P, "        bias = torch.zeros(t, total",
           "        kept = (k, v) if use_cache else None\n        bias = torch.zeros(t, total"),
    mutant("PositionIds", M, "> position_ids[0][:, None]", "> torch.arange(t, device=q.device)[:, None]"),
    mutant("OwnGrowingCache", M, "triu(start + 1)", "triu(1)"),
    mutant("OwnGrowingCache", O, "torch.cat([self.v_cache, v], dim=2)", "torch.cat([v, self.v_cache], dim=2)"),
)  # fmt: skip


def text_of(case: Mutant) -> str:
    """The source of the mutated layer and its helper classes."""
    text = SOURCE
    for old, new in case.pairs:
        first = text.index(f"class {case.name}")
        at = text.find(old, first)
        at = at if at >= 0 else text.index(old)
        text = text[:at] + new + text[at + len(old) :]
    return text


def built(text: str, name: str, folder: Path) -> torch.nn.Module:
    path = folder / f"{name}_{abs(hash(text))}_built.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    __import__("sys").modules[path.stem] = module
    spec.loader.exec_module(module)
    it = getattr(module, name)
    torch.manual_seed(0)
    it = it(module.ModelArgs()) if name == "LlamaAttention" else it()
    for parameter in it.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    return it.double().eval()


def gap(it: torch.nn.Module, name: str, ends: tuple[int, ...]) -> float:
    """The difference between the outputs of steps and of single calls."""
    rows, start, kept, largest = (
        torch.randn(2, LENGTH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        0,
        None,
        0.0,
    )
    with torch.no_grad():
        for end in ends:
            out, kept = STYLES[name](it, rows[:, start:end], start, kept)
            start = end
            largest = max(largest, float((out - whole(name, rows[:, :end])[:, end - out.shape[1] :]).abs().max()))
    return largest


WHOLE: dict[tuple[str, int], torch.Tensor] = {}


def whole(name: str, rows: torch.Tensor) -> torch.Tensor:
    """The output of the right layer for the whole text, from a fresh copy."""
    key = (name, rows.shape[1])
    if key not in WHOLE:
        WHOLE[key] = STYLES[name](RIGHT[name](), rows, 0, None)[0]
    return WHOLE[key]


@pytest.fixture(autouse=True, scope="module")
def right_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")
    RIGHT.update({name: lambda name=name: built(SOURCE, name, folder) for name in STYLES})


RIGHT: dict[str, Callable[[], torch.nn.Module]] = {}


@pytest.mark.parametrize("name", STYLES)
def test_the_layers_decode_as_one_call_does(name, tmp_path):
    splits = SPLITS[:2] if name == "OneTokenAtATime" else SPLITS
    assert max(gap(built(SOURCE, name, tmp_path), name, ends) for ends in splits) < 1e-6


def ids(cases):
    return [f"{case.name}-{case.code}-{n}" for n, case in enumerate(cases)]


@pytest.mark.parametrize("case", MUTANTS, ids=ids(MUTANTS))
def test_the_mistakes_show_when_a_text_is_given_in_parts(case, tmp_path):
    it = built(text_of(case), case.name, tmp_path)
    assert max(gap(it, case.name, ends) for ends in SPLITS) > 1e-3


@pytest.mark.parametrize("name", STYLES)
def test_a_right_cache_is_called_right_and_counts_as_examined(name):
    found = examined(Case("cached", name, ""))
    assert (found.verdict, found.findings, found.not_examined) == ("right", (), ())
    (probe,) = [probe for probe in found.probes if probe.name == "cache"]
    assert probe.ok is (None if name == "OneTokenAtATime" else True)
    assert len(found.notes) == (name == "OneTokenAtATime")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("z = F.scaled_dot_product_attention(q, k, v, is_causal=kv_cache is None)", "is not causal"),
        ("z = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)", "is masked as if it came first"),
        (
            "if kv_cache is not None and x.shape[1] > 1:\n            raise ValueError\n"
            "        z = F.scaled_dot_product_attention(q, k, v, is_causal=kv_cache is None)",
            "raises an error",
        ),
    ],
)
def test_what_a_later_step_of_several_tokens_gives_is_in_the_last_line(tmp_path, line, said):
    begin = SOURCE.index("z = ", SOURCE.index("class OneTokenAtATime"))
    text = SOURCE[:begin] + line + SOURCE[SOURCE.index("\n", begin) :]
    case = Case("", "OneTokenAtATime", "")
    found = examined(case, written(tmp_path, case, text))
    (note,) = found.notes
    assert said in note
    assert (found.verdict, found.summary.endswith(note)) == ("right", True)


def test_a_position_without_a_cache_is_named_as_not_examined():
    found = examined(Case("cached", "OffsetAlone", ""))
    assert (found.verdict, found.not_examined) == ("right", ("start_pos",))


@pytest.mark.parametrize("case", MUTANTS, ids=ids(MUTANTS))
def test_a_mistake_of_a_cache_is_named_with_its_proof_and_a_line_of_the_file(case, tmp_path):
    text = text_of(case)
    found = examined(Case("", case.name, ""), written(tmp_path, Case("", case.name, ""), text))
    assert (found.verdict, [finding.code for finding in found.findings]) == ("wrong", [case.code])
    (finding,) = found.findings
    assert finding.proven
    assert finding.error <= finding.tolerance
    assert finding.source in text.splitlines()[finding.line - 1]
