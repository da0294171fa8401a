"""The numbers of the layers of every family of checkpoints."""

from __future__ import annotations

import re

import pytest
from support import checkpoints

from mhacli.models.layer_names import LayerNumbers, is_attention

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_the_number_of_a_layer_of_a_checkpoint_stands_first_in_its_name(name: str) -> None:
    model = checkpoints.model(name)
    numbers = LayerNumbers(model)
    attentions = [
        each
        for each, module in model.named_modules()
        if is_attention(each, module) and re.search(r"\d", each)
    ]
    assert attentions
    for each in attentions:
        numbers.begin_pass()
        assert numbers.next(each, each, each, 0)[1] == int(re.findall(r"\d+", each)[0])
