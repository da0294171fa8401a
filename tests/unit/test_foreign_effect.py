"""What a study of effects takes from the inside of torch and transformers. A failure names the
version that changed it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mhacli.commands.effect import foreign
from mhacli.models.foreign import replaced
from mhacli.usercode.door import UserRaised

transformers = pytest.importorskip("transformers")
TRANSFORMERS = f"transformers {transformers.__version__}"


def _cache(n_tokens: int) -> transformers.DynamicCache:
    cache = transformers.DynamicCache()
    cache.update(torch.randn(1, 2, n_tokens, 3), torch.randn(1, 2, n_tokens, 3), 0)
    return cache


def test_a_cache_is_cut_at_its_end() -> None:
    cache = _cache(7)
    foreign.crop(cache, 2)
    assert cache.get_seq_length() == 5, TRANSFORMERS


def test_a_copy_of_a_cache_grows_alone() -> None:
    cache = _cache(5)
    foreign.copied(cache).update(torch.randn(1, 2, 1, 3), torch.randn(1, 2, 1, 3), 0)
    assert cache.get_seq_length() == 5, TRANSFORMERS


@pytest.mark.parametrize("cache", [None, ((torch.zeros(1), torch.zeros(1)),)])
def test_another_kind_of_cache_is_not_continued(cache: object) -> None:
    with pytest.raises(UserRaised):
        foreign.crop(cache, 1)
    with pytest.raises(UserRaised):
        foreign.copied(cache)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_implementation_of_attention_is_known(kernel: str) -> None:
    config = transformers.GPT2Config(
        n_layer=1, n_head=1, n_embd=2, vocab_size=3, attn_implementation=kernel
    )
    assert foreign.is_eager(transformers.GPT2Model(config)) == (kernel == "eager"), TRANSFORMERS
    assert not foreign.is_eager(nn.Linear(1, 1))


def test_a_classifier_needs_an_id_for_padding() -> None:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 2, "vocab_size": 3}
    for pad_token_id in (None, 2):
        config = transformers.GPT2Config(**sizes, pad_token_id=pad_token_id)
        model = transformers.GPT2ForSequenceClassification(config)
        assert foreign.has_padding(model) == (pad_token_id is not None), TRANSFORMERS
    assert foreign.has_padding(nn.Linear(1, 1))


def test_a_module_runs_another_function_and_its_own_again() -> None:
    module = nn.Linear(1, 1)
    x = torch.ones(1)
    before = module(x)
    with replaced(module, forward=lambda x: -x):
        assert module(x) == -1, f"torch {torch.__version__}"
        with replaced(module, forward=lambda x: x - 5):
            assert module(x) == -4
        assert module(x) == -1
    assert torch.equal(module(x), before)
    assert "forward" not in vars(module)
