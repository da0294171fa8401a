"""What a refusal of `mha check` tells to type works; and what is read from names without it."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from support import user_code

import mhacli
from mhacli.commands.check.examine import examination_of
from mhacli.commands.check.result import CheckRequest, Examination
from mhacli.errors import in_python
from mhacli.settings import options_of
from mhacli.usercode.process import no_stage

HINTS = Path(__file__).parents[1] / "contract" / "check" / "cases" / "hints.py"


def _typed(name: str, hint: str = "", **more: str) -> Examination:
    """The examination with the options of a hint."""
    words = [word.rstrip(",;") for word in shlex.split(hint)]
    given: dict[str, list[str]] = {}
    for option, value in pairwise(words):
        if option.startswith("--"):
            given.setdefault(option[2:].replace("-", "_"), []).append(value)
    options = {option: tuple(values) for option, values in given.items()}
    if "example" in options:
        options["example"] = options["example"][0]
    target = f"{HINTS}:{name}"
    return examination_of(CheckRequest(target=target, length=8, **{**options, **more}), no_stage)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Heads", "--arg breite=64 --arg koepfe=4"),
        ("Turned", "--arg koepfe=4 --arg breite=64"),
        ("NormMade", "norm_layer=nn.LayerNorm"),
        ("Tabled", "'table=torch.ones(8)'"),
        ("Activated", "act_fn=nn.GELU()"),
        ("Paired", "'zwei=(4, 4)'"),
        ("Configured", "--arg config.glub=64 --arg config.glob_drop=0.1"),
        ("Called", "--call-arg wind=None --call-arg tide=None"),
        ("OfScript", "--arg hidden=64"),
    ],
)
def test_the_hint_of_a_refusal_is_not_refused_when_it_is_typed(name: str, says: str) -> None:
    with pytest.raises(mhacli.MhaError, match="needs a value for") as raised:
        _typed(name)
    assert says in raised.value.typed_hint
    assert _typed(name, raised.value.typed_hint).verdict == "right"


def test_an_option_of_a_layer_becomes_the_field_of_its_config() -> None:
    options = dict(options_of(mhacli.Config))
    assert len(options) > 20
    for field, option in options.items():
        assert in_python(f"try {option.name(field)} 3") == f"try {field}=3"


@pytest.mark.parametrize("name", ["Block", "OwnWords", "Multiples", "Least"])
def test_what_names_and_lengths_tell_needs_no_words(name: str) -> None:
    assert user_code.check(getattr(user_code.load(HINTS), name)).verdict in ("right", "consistent")


def test_words_for_arguments_read_the_names_of_the_file() -> None:
    given = "--arg 'self_attn=Full(False)' --arg 'feed_forward=lambda x: 0 * x' --arg size=24"
    values = {each.name: each.value for each in _typed("Block", given).arguments}
    assert values["self_attn"] == "Full(…)"
