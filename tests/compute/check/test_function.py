"""`mhacli.check` as a function: the same verdict on a name, a class and a module, without changes to the user's objects."""

from pathlib import Path

import pytest
import torch
from torch import nn

import mhacli
from mhacli.errors import UsageError

FILE = Path(__file__).parents[3] / "sample_texts" / "my_attention.py"
SIZES = {"d_model": 64, "n_heads": 8}


def attention_class() -> type[nn.Module]:
    space: dict[str, object] = {"__name__": "written_here"}
    exec(compile(FILE.read_text(), str(FILE), "exec"), space)
    return space["MultiHeadAttention"]  # type: ignore[return-value]


def test_a_name_and_the_class_itself_get_the_same_verdict() -> None:
    named = mhacli.check(f"{FILE}:MultiHeadAttention", arguments=SIZES)
    given = mhacli.check(attention_class(), arguments=SIZES)
    for found in (named, given):
        assert (found.verdict, [one.code for one in found.findings]) == ("wrong", ["merge-without-transpose"])
        assert found.to_dict()["schema"] == "mha.check/1"
    assert named.findings[0].line == 23
    assert given.target == "written_here:MultiHeadAttention"


def test_a_module_in_memory_is_examined_by_a_copy_and_nothing_is_left_behind() -> None:
    torch.manual_seed(3)
    module = attention_class()(**SIZES).train()
    weights = {name: one.clone() for name, one in module.state_dict().items()}
    before = torch.get_rng_state(), torch.get_num_threads()
    found = mhacli.check(module)
    mhacli.check(nn.MultiheadAttention, arguments={"embed_dim": 16, "num_heads": 2})  # which builds one
    assert [one.code for one in found.findings] == ["merge-without-transpose"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    assert module.training
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert all(torch.equal(one, weights[name]) for name, one in module.state_dict().items())


def test_what_is_right_is_called_right_and_compared_with_another_on_demand() -> None:
    right = nn.MultiheadAttention(16, 2, batch_first=True)
    assert mhacli.check(right).verdict == "right"
    against = mhacli.check(
        nn.MultiheadAttention, arguments={"embed_dim": 16, "num_heads": 2}, against=nn.MultiheadAttention
    )
    assert (against.verdict, against.against) == ("right", "torch.nn.modules.activation:MultiheadAttention_")


def test_an_argument_that_has_no_literal_is_refused() -> None:
    with pytest.raises(UsageError, match=r"config=.* is neither a number"):
        mhacli.check(attention_class(), arguments={"config": nn.Identity()})


def test_the_examination_shows_itself() -> None:
    found = mhacli.check(attention_class(), arguments=SIZES)
    assert "\n" not in repr(found)
    html = found._repr_html_()
    assert "merge-without-transpose" in html
    assert len(html) < 200_000
    assert "<script" not in html
