"""The private names of other libraries that `mhacli.models.foreign` reads are there, and do what it
expects.

Tried with torch 2.13.0, transformers 5.23.0, accelerate 1.15.0 and huggingface_hub 2.4.0. Where a
newer release fails here, `mhacli/models/foreign.py` is the one file to change.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

from mhacli.models import foreign

TRIED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "huggingface_hub": "2.4.0",
}
NAMES = {
    "torch": (
        "torch._fused_sdp_choice",
        "torch._C._current_graph_task_id",
        "torch.Tensor._version",
        "torch.nn.Module._compiled_call_impl",
    ),
    "transformers": (
        "transformers.modeling_utils.AttentionInterface.__getitem__",
        "transformers.modeling_utils.AttentionInterface.get_interface",
        "transformers.modeling_utils.PreTrainedModel._keys_to_ignore_on_load_missing",
        "transformers.configuration_utils.PretrainedConfig._attn_implementation",
        "transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS",
    ),
    "accelerate": (
        "accelerate.hooks.AlignDevicesHook",
        "accelerate.hooks.SequentialHook",
    ),
    "huggingface_hub": ("huggingface_hub.constants.HF_HUB_OFFLINE",),
}


def missing(library: str, name: str) -> str:
    """The message for a name that a library lacks."""
    return (
        f"{library} {version(library)} has no {name}, which {library} {TRIED[library]} had:"
        " see mhacli/models/foreign.py"
    )


def found(name: str) -> bool:
    """Whether a dotted name leads to something: modules first, then attributes."""
    parts = name.split(".")
    value: Any = None
    for n in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library, names in NAMES.items() for name in names]
)
def test_the_library_still_has_the_name(library: str, name: str) -> None:
    pytest.importorskip(library)
    assert found(name), missing(library, name)


def test_values_of_an_attribute_are_put_back_also_where_they_are_inherited() -> None:
    class Base:
        size = 1

    class Inner(Base):
        pass

    with foreign.replaced(Inner, size=2):
        assert Inner.size == 2
    assert Inner.size == 1
    assert "size" not in vars(Inner)


def test_torch_names_the_kernel_of_a_call() -> None:
    q = torch.randn(1, 2, 3, 4)
    assert foreign.sdpa_kernel(q, q, q) in ("flash", "math", "efficient")
    assert foreign.sdpa_kernel(q.to("meta"), q, q) == "sdpa"


def test_a_backward_pass_is_noticed() -> None:
    noticed = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: noticed.append(foreign.is_in_backward()))
    (x * 2).sum().backward()
    assert noticed == [True]
    assert not foreign.is_in_backward()


def test_a_compiled_module_is_noticed() -> None:
    module = nn.Linear(2, 2)
    assert not foreign.is_compiled(module)
    module.compile(backend="eager")
    assert foreign.is_compiled(module)


def test_a_write_changes_the_version_and_inference_mode_has_none() -> None:
    tensor = torch.zeros(2)
    before = foreign.version_of(tensor)
    assert foreign.version_of(tensor) == before
    tensor.add_(1)
    assert foreign.version_of(tensor) != before
    with torch.inference_mode():
        made = torch.zeros(2)
    assert foreign.version_of(made) != foreign.version_of(made)


def test_what_transformers_hands_out_is_wrapped_and_put_back() -> None:
    models = pytest.importorskip("transformers.modeling_utils")
    table = models.AttentionInterface()
    usual = table["sdpa"]
    origins = []

    def wrap(origin: foreign.Origin, function: Any) -> Any:
        origins.append(origin)
        return function

    with foreign.attention_functions(wrap):
        assert table["sdpa"] is usual
        table.get_interface("eager", usual)
    assert origins[0] == "registry"
    assert "module" in origins
    assert table["sdpa"] is usual
    assert len(origins) == 2


def test_a_model_says_which_weights_it_ties_and_which_implementation_it_uses() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 5}
    config = transformers.LlamaConfig(
        num_attention_heads=2, tie_word_embeddings=True, attn_implementation="eager", **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    assert dict(foreign.tied_weights(model)) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert foreign.attn_implementation(model.config) == "eager"
    assert foreign.first_layer_idx(model) == 0
    assert foreign.uses_attention_functions(type(model).__module__)
    assert foreign.computed_weights(model) == ()


def test_weights_that_accelerate_keeps_on_the_cpu_are_read_there() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = nn.Sequential(nn.Linear(2, 3))
    weight = module[0].weight.detach().clone()
    assert foreign.execution_device(module) is None
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert module[0].weight.is_meta
    assert torch.equal(foreign.stored_parameter(module[0], "weight"), weight)
    assert foreign.execution_device(module) == torch.device("cpu")


def test_no_hub_is_contacted_within_the_context() -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    with foreign.offline():
        assert constants.HF_HUB_OFFLINE is True
    assert before == constants.HF_HUB_OFFLINE
