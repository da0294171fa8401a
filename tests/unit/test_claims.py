"""What a config and the words of a name claim: whether a token may see later ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from mhacli.commands.check.behaviour import is_claimed_causal


@pytest.mark.parametrize(
    ("claim", "names"),
    [
        (True, "GPT LlamaModel ALiBiGPT CausalBert CausalEncoder BertGenerationDecoder BioGPT"),
        (False, "NonAutoregressiveTranslator NoncausalGPT UncausalLlama LlamaBiModel BiGPT"),
        (False, "BertModel LlamaEncoder BidirectionalGPT"),
        (None, "Model PrefixGPT NonLinear Bigram"),
    ],
)
def test_words_in_a_name_claim_whether_later_tokens_are_seen(
    claim: bool | None, names: str
) -> None:
    made = {name: type(name, (nn.Module,), {})() for name in names.split()}
    assert {name: is_claimed_causal(model) for name, model in made.items()} == dict.fromkeys(
        made, claim
    )


@pytest.mark.parametrize("is_in_call", [False, True])
def test_a_config_that_says_decoder_wins_over_the_name_unless_each_call_says_it(
    is_in_call: bool,
) -> None:
    class BertEncoder(nn.Module):
        config = SimpleNamespace(is_decoder=True)

        def forward(self, ids: Tensor) -> Tensor:
            return ids

    class CalledEitherWay(BertEncoder):
        def forward(self, ids: Tensor, is_decoder: bool = False) -> Tensor:
            return ids

    model = CalledEitherWay() if is_in_call else BertEncoder()
    assert is_claimed_causal(model) is (not is_in_call)
