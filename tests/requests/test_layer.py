"""The requests for runs and for decoding."""

from __future__ import annotations

import pytest

from mhacli.errors import UsageError
from mhacli.requests.layer import decodable, layer_request
from mhacli.requests.user_code import TargetRequest
from mhacli.spec.config import Config
from mhacli.text.encode import encode

SMALL = Config(d_model=8, n_heads=2)


def request_of(text, config=SMALL):
    return layer_request(encode([text], config), config)


def test_without_a_seed_it_is_the_same_for_text_and_for_user_code():
    assert TargetRequest("a.py:A").seed == Config().seed == 0


def test_without_a_config_it_is_the_default_one_with_all_its_sizes():
    encoded = encode(["the cat sat"], SMALL)
    assert layer_request(encoded).config == Config().resolved()
    assert layer_request(encoded, SMALL).config == SMALL.resolved()


@pytest.mark.parametrize("prompt_len", [0, 3])
def test_decoding_is_causal_from_the_first_token_on(prompt_len):
    request = decodable(request_of("the cat sat"), prompt_len)
    assert (request.config.causal, request.facts.config.causal) == (True, True)


def test_a_prefix_whose_tokens_see_each_other_is_part_of_the_prompt():
    request = request_of("the cat sat", Config(d_model=8, n_heads=2, prefix=2))
    with pytest.raises(UsageError):
        decodable(request, 1)
    assert decodable(request, 2) is request
