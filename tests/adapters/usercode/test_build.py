"""Building a target from given arguments, constructor defaults, and consistent guesses, each of which is reported."""

import copy
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mhacli.adapters.usercode.arguments import SPELLINGS, GuessContext, Role, guess_values, parse_value, role_of, stated
from mhacli.adapters.usercode.build import GuessedConfig, build
from mhacli.adapters.usercode.target import Target
from mhacli.adapters.usercode.types import Built
from mhacli.errors import MhaError, UsageError
from mhacli.requests.user_code import TargetRequest

HERE = GuessContext(causal=False, device="cpu")


def built(thing: Any, *words: str, causal: bool = False, seed: int = 0) -> Built:
    """The target built from `NAME=VALUE` words."""
    pairs = tuple((name, value) for name, _, value in (word.partition("=") for word in words))
    target = Target("mine.py:Attention", thing, __file__, "what it says")
    return build(target, TargetRequest("mine.py:Attention", pairs, causal=causal, seed=seed))


def guesses(of: Built) -> dict[str, object]:
    return {guess.name: guess.value for guess in of.guesses}


def told(thing: Any, *words: str) -> tuple[str, str | None]:
    with pytest.raises(MhaError) as caught:
        built(thing, *words)
    assert caught.value.exit_code == 1
    return caught.value.message, caught.value.hint


class Plain(nn.Module):
    """In the usual words."""

    def __init__(self, d_model, n_heads, dropout=0.1):
        super().__init__()
        assert d_model % n_heads == 0, "heads must divide"
        self.w_q = nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.w_q(x))


class Kept(nn.Module):
    """Keeps what it got."""

    def forward(self, x):
        return x


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("64", 64), ("-3", -3), ("1e-5", 1e-5), (" 0.25 ", 0.25), ("true", True), ("False", False), ("None", None),
        ("null", None), ("inf", math.inf), ("(2, 3)", (2, 3)), ("[1, 2]", [1, 2]), ("{'a': 1}", {"a": 1}),
        ("'8'", "8"), ('"half"', "half"), ("relu", "relu"), ("cuda:0", "cuda:0"), ("", ""), ("08", "08"),
        ("torch.float16", torch.float16), ("torch.no_such", "torch.no_such"), ("nn.ReLU", nn.ReLU),
        ("torch.nn.LayerNorm", nn.LayerNorm), ("__import__('os')", "__import__('os')"), ("[" * 5000, "[" * 5000),
    ],
)  # fmt: skip
def test_a_word_means_a_value(word: str, value: object) -> None:
    found = parse_value(word)
    assert found == value
    assert type(found) is type(value)


def test_a_dtype_may_be_named_without_torch() -> None:
    class Typed(Kept):
        def __init__(self, d_model, dtype=None):
            super().__init__()
            self.dtype = dtype

    assert built(Typed, "dtype=bfloat16").module.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("d_model", "d_model"), ("embed_dim", "d_model"), ("n_embd", "d_model"), ("hiddenSize", "d_model"),
        ("nhead", "n_heads"), ("h", "n_heads"), ("numHeads", "n_heads"), ("num_key_value_heads", "n_kv_heads"),
        ("dim_head", "d_head"), ("kdim", "d_model"), ("k_dim", "d_head"), ("key_dim", "d_head"),
        ("value_dim", "d_v"), ("p", "dropout"),
        ("attn_pdrop", "dropout"), ("block_size", "context_length"), ("qkv_bias", "bias"), ("is_causal", "causal"),
        ("layer_idx", "layer"), ("cfg", "config"), ("wobble", None), ("norm_layer", None),
    ],
)  # fmt: skip
def test_a_name_stands_for_something(name: str, role: str | None) -> None:
    assert role_of(name) == role


def test_no_spelling_stands_for_two_things() -> None:
    spellings = [name for names in SPELLINGS.values() for name in set(names.split())]
    assert sorted(spellings) == sorted(set(spellings))


# --------------------------------------------------------------------------------------------------------------- sizes


@given(
    st.sets(st.sampled_from(["d_model", "d_out", "n_heads", "n_kv_heads", "d_head", "d_v", "context_length"])),
    st.dictionaries(st.sampled_from(["d_model", "n_heads", "n_kv_heads", "d_head"]), st.integers(1, 2048), max_size=1),
)
def test_guesses_are_consistent_with_each_other_and_with_one_size_that_was_given(
    roles: Set[Role], known: Mapping[Role, int]
) -> None:
    found = {**guess_values(roles - known.keys(), known, HERE), **known}
    assert found.keys() >= roles
    assert all(isinstance(size, int) and size > 0 for size in found.values())
    if {"d_model", "n_heads"} <= found.keys():
        assert found["d_model"] % found["n_heads"] == 0
    if {"d_model", "n_heads", "d_head"} <= found.keys():
        assert found["d_model"] == found["n_heads"] * found["d_head"]
    if {"n_heads", "n_kv_heads"} <= found.keys():
        assert found["n_heads"] % found["n_kv_heads"] == 0
    if {"d_out", "n_heads"} <= found.keys():
        assert found["d_out"] % found["n_heads"] == 0
    assert found.get("context_length", 32) >= 32


def test_guessed_sizes_distinguish_axes() -> None:
    every: set[Role] = {"d_model", "n_heads", "d_head", "context_length"}
    free = guess_values(every, {}, HERE)
    assert len(set(free.values())) == len(free)
    assert free["n_heads"] >= 3
    assert free["n_heads"] % 2 == 1
    assert free["d_head"] % 2 == 0
    grouped = guess_values({*every, "n_kv_heads"}, {}, HERE)
    group = grouped["n_heads"] // grouped["n_kv_heads"]
    assert len({*grouped.values(), group}) == len(grouped) + 1
    assert 1 < grouped["n_kv_heads"] < grouped["n_heads"]
    assert grouped["n_heads"] % 2 == 1


@pytest.mark.parametrize(
    ("known", "asked", "value"),
    [
        ({"d_model": 64}, "n_heads", 4),  # 2 is too few, 8 heads of 8 look alike
        ({"d_model": 60}, "n_heads", 5),
        ({"d_model": 768}, "n_heads", 3),
        ({"d_model": 2}, "n_heads", 1),  # two heads would be one wide
        ({"d_model": 40, "d_head": 10}, "n_heads", 4),
        ({"n_heads": 8}, "d_model", 96),  # 12 each
        ({"n_heads": 8, "d_head": 64}, "d_model", 512),
        ({"n_heads": 8}, "n_kv_heads", 2),
        ({"n_heads": 4}, "n_kv_heads", 2),
        ({"n_heads": 7}, "n_kv_heads", 1),
        ({"n_kv_heads": 2}, "n_heads", 6),
        ({"n_kv_heads": 3}, "n_heads", 15),
        ({"d_model": 64, "n_heads": 8}, "d_head", 8),
        ({"d_head": 6}, "d_v", 6),
        ({"d_model": 64}, "context_length", 48),
    ],
)
def test_a_guess_fits_what_was_given(known: Mapping[Role, int], asked: Role, value: int) -> None:
    assert guess_values({asked}, known, HERE)[asked] == value


# --------------------------------------------------------------------------------------------------- what is guessed


def test_defaults_are_kept_and_missing_values_are_guessed_and_reported() -> None:
    found = built(Plain, "n_heads=3")
    assert dict(found.arguments) == {"d_model": 24, "n_heads": 3, "dropout": 0.1}
    assert [tuple(guess) for guess in found.guesses] == [("d_model", 24, "the width of a token")]
    assert found.given == {"n_heads"}
    assert (found.name, found.thing, found.documentation) == ("mine.py:Attention", Plain, "what it says")
    assert found.call is found.module
    assert found.file == __file__


def test_names_of_every_ecosystem_are_guessed_alike() -> None:
    class OfABook(Kept):
        def __init__(self, d_in, d_out, context_length, dropout, num_heads, num_kv_groups, qkv_bias, dtype, layer_idx):
            super().__init__()
            assert d_out % num_heads == 0
            assert num_heads % num_kv_groups == 0

    found = guesses(built(OfABook))
    assert found["d_in"] == found["d_out"] == 120
    assert (found["num_heads"], found["num_kv_groups"], found["context_length"]) == (15, 5, 64)
    assert (found["qkv_bias"], found["dtype"], found["layer_idx"], found["dropout"]) == (True, torch.float32, 0, 0.1)

    class OfAnother(Kept):
        def __init__(self, key_size, query_size, value_size, num_hiddens, num_heads, /, *, p):
            super().__init__()
            self.sizes = key_size, query_size, value_size, num_hiddens, num_heads

    assert built(OfAnother).module.sizes == (40, 40, 40, 40, 5)

    class WithKeysOfAHead(Kept):
        def __init__(self, num_heads, key_size):
            super().__init__()

    assert guesses(built(WithKeysOfAHead)) == {"num_heads": 5, "key_size": 8}


def test_a_default_settles_what_a_guess_must_fit() -> None:
    class OfALibrary(Kept):
        def __init__(self, dim, heads=8, dim_head=64):
            super().__init__()

    assert guesses(built(OfALibrary)) == {"dim": 512}


def test_a_constructor_that_forwards_everything_has_the_parameters_of_its_base() -> None:
    class Handing(Plain):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    assert guesses(built(Handing, "dropout=0")) == {"d_model": 40, "n_heads": 5}


def test_a_parameter_for_anything_takes_unknown_names() -> None:
    class Open(Kept):
        def __init__(self, d_model, **others):
            super().__init__()
            self.others = others

    found = built(Open, "wobble=3")
    assert found.module.others == {"wobble": 3}
    assert dict(found.arguments) == {"d_model": 40, "wobble": 3}


def test_causal_follows_the_option_and_is_reported() -> None:
    class Needs(Kept):
        def __init__(self, d_model, causal):
            super().__init__()

    class Offers(Kept):
        def __init__(self, d_model=8, is_causal=False):
            super().__init__()

    assert guesses(built(Needs))["causal"] is False
    assert ("causal", True, "--causal") in [tuple(guess) for guess in built(Needs, causal=True).guesses]
    assert built(Offers).arguments["is_causal"] is False
    assert [tuple(guess) for guess in built(Offers, causal=True).guesses] == [("is_causal", True, "--causal")]
    assert built(Offers, causal=True).arguments["is_causal"] is True
    assert guesses(built(Offers, "is_causal=false", causal=True)) == {}


def test_a_flag_is_not_taken_for_a_number_of_its_name() -> None:
    class Flagged(Kept):
        def __init__(self, d_model: int, scale: bool):
            super().__init__()

    assert told(Flagged)[1] == "for example --arg scale=1"


def test_an_argument_of_unknown_role_must_be_given() -> None:
    class Strange(Kept):
        def __init__(self, d_model, wobble, tilt):
            super().__init__()

    assert told(Strange) == (
        "mine.py:Attention needs a value for wobble and tilt, which mha cannot guess from the name",
        "for example --arg wobble=1 --arg tilt=1",
    )


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    assert told(Plain, "d_modle=64") == (
        "--arg d_modle: there is no such argument, only d_model, n_heads, dropout=0.1",
        "did you mean --arg d_model?",
    )
    assert told(Kept, "wobble=64") == (
        "--arg wobble: the constructor takes no arguments",
        None,
    )
    with pytest.raises(UsageError, match="--arg d_model is given twice"):
        built(Plain, "d_model=64", "d_model=32")


# ------------------------------------------------------------------------------------------------------------- configs


class OfConfig(nn.Module):
    """As in a well-known small repository."""

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x):
        return self.c_attn(x)


def test_a_config_is_guessed_as_it_is_read_and_every_guess_is_reported() -> None:
    found = built(OfConfig, "config.bias=false")
    assert guesses(found) == {"config.n_embd": 120, "config.n_head": 15}
    assert found.module.c_attn.bias is None
    assert stated(found.arguments, "n_heads") == 15
    assert stated(found.arguments, "bias") is False
    assert stated(found.arguments, "d_v") is None
    assert found.given == {"config.bias"}


def test_what_is_given_for_a_config_settles_the_rest() -> None:
    assert guesses(built(OfConfig, "config.n_embd=64")) == {"config.n_head": 4, "config.bias": True}
    assert guesses(built(OfConfig, "config={'n_embd': 60}")) == {"config.n_head": 15, "config.bias": True}


def test_a_config_is_read_by_attribute_and_by_item_and_lacks_what_is_unusual() -> None:
    class Reading(Kept):
        def __init__(self, cfg):
            super().__init__()
            assert cfg["emb_dim"] == cfg.emb_dim == cfg.get("emb_dim") == getattr(cfg, "emb_dim", 7)
            assert cfg.deep.wobble == 3
            assert cfg["deep"]["emb_dim"] == cfg.emb_dim
            assert cfg.get("drop_rate", 0.5) == 0.5
            assert cfg.get("tilt") is None
            assert cfg.get("tilt", 4) == 4
            assert getattr(cfg, "flash", "none") == "none"
            assert (hasattr(cfg, "flash"), hasattr(cfg, "n_heads"), "flash" in cfg) == (False, True, False)
            cfg.head_dim = cfg.emb_dim // cfg["n_heads"]
            assert cfg["head_dim"] == 8
            self.cfg = cfg

    found = built(Reading, "cfg.deep.wobble=3")
    assert guesses(found) == {"cfg.emb_dim": 120, "cfg.n_heads": 15, "cfg.deep.emb_dim": 120}
    again = copy.deepcopy(found.module).cfg
    assert isinstance(again, GuessedConfig)
    assert (again.emb_dim, again["num_kv_groups"]) == (120, 5)


@pytest.mark.parametrize("read", [lambda config: config.wobble, lambda config: config["wobble"]])
def test_a_config_field_of_unknown_role_must_be_given(read: Any) -> None:
    class Strange(Kept):
        def __init__(self, config):
            super().__init__()
            self.value = read(config)

    assert told(Strange) == (
        "mine.py:Attention needs a value for config.wobble, which mha cannot guess from the name",
        "for example --arg config.wobble=1",
    )
    assert built(Strange, "config.wobble=7").module.value == 7


def test_heads_beside_a_config_leave_room_for_kv_heads_in_it() -> None:
    class Beside(Kept):
        def __init__(self, config, n_heads):
            super().__init__()
            assert n_heads % config.n_kv_heads == 0
            assert 1 < config.n_kv_heads < n_heads

    assert guesses(built(Beside)) == {"n_heads": 15, "config.n_kv_heads": 5}


def test_a_config_field_given_without_its_prefix_gets_a_hint() -> None:
    assert told(OfConfig, "n_embd=64")[1] == "--arg config.n_embd=VALUE sets it in the config"
    assert told(OfConfig, "cfg.n_embd=64")[1] == "--arg config.n_embd=VALUE sets it in the config"


@dataclass
class Sizes:
    """A config as people write it."""

    n_embd: int
    n_head: int = 6
    causal: bool = False
    d_head: int = 0

    def __post_init__(self) -> None:
        self.d_head = self.n_embd // self.n_head


class OfSizes(Kept):
    """Names its config's class, by a string as with postponed annotations."""

    def __init__(self, args: "Sizes | None"):
        super().__init__()
        self.args = args


def test_the_class_that_an_annotation_names_is_the_config() -> None:
    found = built(OfSizes)
    assert found.module.args == Sizes(48)
    assert guesses(found) == {"args.n_embd": 48}
    assert found.arguments["args.n_head"] == 6
    assert built(OfSizes, "args.n_embd=60", "args.n_head=5").module.args == Sizes(60, 5, d_head=12)
    assert built(OfSizes, "args.n_embd=60", "args.d_head=7").module.args.d_head == 7
    assert guesses(built(OfSizes, "args.n_embd=60", causal=True)) == {"args.causal": True}
    message, _ = told(OfSizes, "args.n_embd=60", "args.wobble=3")
    assert message == (
        "--arg args.wobble: there is no such argument, only args.n_embd=60, args.n_head=6, args.causal=False, args.d_head=10"
    )


def test_a_plain_class_and_a_default_are_configs_too() -> None:
    class Settings:
        n_embd = 32
        n_head = 4

    class Of(Kept):
        def __init__(self, config: Settings):
            super().__init__()
            self.config = config

    Of.__init__.__annotations__["config"] = Settings
    found = built(Of, "config.n_head=2")
    assert (type(found.module.config), found.module.config.n_head, found.module.config.n_embd) == (Settings, 2, 32)
    assert found.arguments["config.n_embd"] == 32

    default = Sizes(24, 3)

    class Defaulting(Kept):
        def __init__(self, config=default):
            super().__init__()
            self.config = config

    changed = built(Defaulting, "config.n_head=2").module.config
    assert (changed.n_embd, changed.n_head) == (24, 2)
    assert default.n_head == 3


def test_a_mapping_annotation_is_no_class_to_call() -> None:
    class Of(Kept):
        def __init__(self, config: dict[str, Any], cfg: Mapping):
            super().__init__()
            self.width = config["d_model"], cfg["d_model"]

    assert built(Of).module.width == (120, 120)


# ------------------------------------------------------------------------------------------------------------ building


def test_the_seed_makes_the_weights_and_nothing_else_draws_from_it() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = built(Plain), built(Plain), built(Plain, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.module.w_q.weight, same.module.w_q.weight)
    assert not torch.equal(first.module.w_q.weight, other.module.w_q.weight)
    assert not first.module.training
    assert not first.module.drop.training


def test_it_can_be_built_anew_with_other_arguments_and_the_same_numbers() -> None:
    first = built(Plain, "dropout=0.5")
    same, other = first.rebuild({}), first.rebuild({"n_heads": 8})
    assert torch.equal(first.module.w_q.weight, same.module.w_q.weight)
    assert same.module is not first.module
    assert dict(other.arguments) == {"d_model": 40, "n_heads": 8, "dropout": 0.5}
    assert guesses(same) == guesses(first)
    assert guesses(other) == {"d_model": 40}
    assert other.given == {"dropout"}
    assert torch.equal(other.rebuild({}).module.w_q.weight, first.module.w_q.weight)
    with pytest.raises(AssertionError, match="heads must divide"):
        first.rebuild({"n_heads": 7})


def test_a_config_can_be_changed_and_built_anew() -> None:
    first = built(OfConfig)
    other = first.rebuild({"config.bias": False})
    assert other.module.c_attn.bias is None
    assert other.arguments["config.n_embd"] == 120
    assert guesses(other) == {"config.n_embd": 120, "config.n_head": 15}
    assert built(OfSizes).rebuild({"args.n_head": 4}).module.args.n_head == 4


def test_classes_that_are_no_modules_are_called_by_call_or_forward() -> None:
    class Called:
        def __init__(self, n_heads):
            self.n_heads = n_heads

        def __call__(self, x):
            return x * self.n_heads

    class Forward:
        def forward(self, x):
            return x + 1

    assert built(Called, "n_heads=3").call(2) == 6
    assert built(Forward).call(2) == 3
    assert built(Forward).module is None


def test_functions_are_taken_as_they_are() -> None:
    def attend(q, by=2):
        return q * by

    for function in (attend, partial(attend, by=3), torch.softmax, lambda q: q):
        found = built(function)
        assert found.call is function
        assert (found.module, dict(found.arguments), found.guesses, found.rebuild({})) == (None, {}, (), found)
    assert told(attend, "by=3") == (
        "--arg by: mine.py:Attention is a function, not a class",
        "--call-arg NAME=VALUE is passed to each call",
    )


def built_by_hand(d_model: int, n_heads: int = 2) -> Any:
    return Plain(d_model, n_heads)


def with_strange_names(breadth: Any, count: Any) -> Any:
    return Plain(breadth, count)


def annotated(breadth: Any = 6) -> nn.Module:
    return Plain(breadth, 2)


def without_arguments() -> Any:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return q

    return attend


@pytest.mark.parametrize(
    ("factory", "words", "arguments", "width"),
    [
        (built_by_hand, ["d_model=6"], {"d_model": 6, "n_heads": 2}, 6),
        (with_strange_names, ["breadth=8", "count=4"], {"breadth": 8, "count": 4}, 8),
        (annotated, [], {"breadth": 6}, 6),
        (partial(Plain, 10, 2), [], {"dropout": 0.1}, 10),
    ],
)
def test_what_a_function_that_builds_returns_is_examined(
    factory: Any, words: list[str], arguments: dict[str, object], width: int
) -> None:
    found = built(factory, *words)
    assert found.thing is Plain
    assert isinstance(found.module, Plain)
    assert not found.module.training
    assert found.module.w_q.weight.shape == (width, width)
    assert dict(found.arguments) == arguments
    assert torch.equal(found.rebuild({}).module.w_q.weight, found.module.w_q.weight)


def test_a_function_that_builds_is_guessed_for_and_called_anew_with_other_arguments() -> None:
    found = built(built_by_hand)
    assert set(guesses(found)) == {"d_model"}
    again = found.rebuild({"d_model": 12, "n_heads": 3}).module
    assert again is not None
    assert again.w_q.weight.shape == (12, 12)


def test_a_function_may_come_back_too() -> None:
    found = built(without_arguments)
    assert found.module is None
    assert found.call.__name__ == "attend"


@pytest.mark.parametrize(("result", "got"), [(3, "a value of type int"), (Plain, "the class Plain")])
def test_what_takes_no_rows_and_returns_no_module_is_refused(result: Any, got: str) -> None:
    message, hint = told(lambda: result)
    assert message == f"mine.py:Attention takes no token vectors and returns {got}, not a module"
    assert hint is not None


def test_an_instance_is_put_in_eval_and_built_anew_as_a_copy() -> None:
    ready = Plain(6, 2)
    found = built(ready)
    assert found.call is found.module is ready
    assert not ready.training
    again = found.rebuild({}).module
    assert again is not ready
    assert torch.equal(again.w_q.weight, ready.w_q.weight)
    with pytest.raises(MhaError, match=r"^mine\.py:Attention is not a class and cannot be built with n_heads$"):
        found.rebuild({"n_heads": 3})
    assert told(ready, "n_heads=3")[0] == (
        "--arg n_heads: mine.py:Attention is a module that is built already, not a class"
    )


def test_what_cannot_be_called_is_not_built() -> None:
    from abc import ABC, abstractmethod

    class Abstract(nn.Module, ABC):
        @abstractmethod
        def scores(self): ...

        def forward(self, x):
            return x

    class Silent(nn.Module):
        pass

    class Nothing:
        pass

    assert told(Abstract)[0] == "mine.py:Attention is an abstract class: it does not define scores"
    for kind in (Silent, Nothing):
        assert told(kind)[0] == "mine.py:Attention has neither forward nor __call__"


def test_an_exception_in_a_constructor_is_reported_with_its_line() -> None:
    message, hint = told(Plain, "d_model=63", "n_heads=4")
    assert message.startswith("Attention(d_model=63, n_heads=4) of ")
    assert message.endswith("test_build.py could not be built: AssertionError: heads must divide")
    assert hint is not None
    assert hint.endswith('says: assert d_model % n_heads == 0, "heads must divide"')

    class Exits(Kept):
        def __init__(self):
            raise SystemExit(4)

    assert told(Exits)[0].endswith(": SystemExit: 4")

    class Alone(Kept):
        def __init__(self):
            raise ValueError("no")

    hint = told(Alone)[1]
    assert hint is not None
    assert hint.endswith('says: raise ValueError("no")')

    class Interrupted(Kept):
        def __init__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built(Interrupted)


@pytest.mark.parametrize(
    "said",
    ["Torch not compiled with CUDA enabled", "Found no NVIDIA driver on your system.", "No CUDA GPUs are available"],
)
def test_a_constructor_that_needs_cuda_is_reported(said: str) -> None:
    class Puts(Kept):
        def __init__(self):
            raise AssertionError(said)

    message, hint = told(Puts)
    assert message.startswith("Attention() of ")
    assert message.endswith(f" needs a CUDA device, which this machine does not have: AssertionError: {said}")
    assert hint is not None
    assert hint.endswith("says: raise AssertionError(said)")


@pytest.mark.parametrize("thing", [Plain, Kept(), lambda x: x])
def test_a_missing_device_is_reported_before_anything_is_built(thing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*size, device):
        assert device == "cuda:9"
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MhaError) as caught:
        build(Target("a.py:A", thing, __file__, ""), TargetRequest("a.py:A", device="cuda:9"))
    said = "--device cuda:9: there is no such device here: AssertionError: Torch not compiled with CUDA enabled"
    assert (caught.value.message, caught.value.code) == (said, "no-device")
