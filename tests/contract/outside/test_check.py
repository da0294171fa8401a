"""`mha check` on small reproductions of attention code about which people reported in public; each
file says what it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from support import user_code

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

FOLDER = Path(__file__).parent / "check"


class Case(NamedTuple):
    """A target of a file, and what is right: `VERDICT`, `VERDICT:CODE|CODE` or `VERDICT:any`, and
    words of the mistake's line. With `is_built` it is an instance, fresh from its constructor.
    `part` is that of a model that must be named.
    """

    file: str
    layer: str
    expected: str = "right"
    line: str = ""
    arguments: dict[str, int] | None = None
    is_built: bool = False
    example: str | None = None
    causal: bool | None = None
    part: str = ""


PAIRS = {"dim": 64, "n_heads": 4}
ROWS, ROWS_LAST = "torch.randn(2, T, 64)", "torch.randn(2, 64, T)"
CASES = (
    Case("causal_unless_masked", "CausalSelfAttention"),
    Case("causal_flag_missing", "CausalSelfAttention", "wrong:causal-missing"),
    Case("mask_of_added_keys", "AddedKeysAttention"),
    Case("two_paths_added_mask", "TwoPaths"),
    Case("mask_minus_ten_thousand", "MaskedHeads"),
    Case("torch_layer_batch_second", "BatchBlock", "wrong:batch-leak", "nn.MultiheadAttention("),
    Case("scale_after_softmax", "LateScale", "wrong:scale-after-softmax", "/ self.d_model**0.5"),
    Case("batch_leak", "Folded", "wrong:merge-batch-moved|batch-leak"),
    Case("unused_projections", "SlicedHeads", "wrong:unused-parameters|one-projection"),
    Case("feature_map", "PixelAttention"),
    Case("feature_map_softmax", "PixelAttention", "wrong:softmax-axis", "softmax"),
    Case("rope_pairs_table", "RotaryAttention", arguments=PAIRS),
    Case("rope_pairs_values", "RotaryAttentionV", "wrong:rope-of-values", arguments=PAIRS),
    Case("separate_biases_right", "TwoBiases"),
    Case("relu_after", "Interacting"),
    Case("set_block_scale", "SetBlockScale", "wrong:scale-d-model", "q.shape[-1] ** 0.5"),
    Case("windows_only", "Windowed", arguments={"window_size": 4}),
    Case("empty_default_mask", "ExportableAttention"),
    Case("qkv_innermost", "Alternating"),
    Case("eval_dropout_two_layers", "NoisyKernel", "wrong:dropout-in-eval", "dropout_p=self.rate"),
    Case("names_reused", "Reusing", "wrong:values-from-keys", "value = self.k_proj(value)"),
    Case("pad_rows", "SourceEncoder", "wrong:padding-leak"),
    Case("pad_rows_fixed", "SourceEncoder"),
    Case("pad_never", "Encoder", "wrong:padding-leak"),
    Case("padded_model", "SentenceEncoder", "wrong:padding-leak"),
    Case("padded_model_fixed", "SentenceEncoder", "right|consistent"),
    Case("memory_as_queries", "DecoderLayer", "wrong:memory-misread"),
    Case("memory_as_queries_fixed", "DecoderLayer"),
    Case("key_padding_unturned", "wrong", "wrong:padding-leak"),
    Case("key_padding_unturned", "mended"),
    Case("unset_weights", "Unset"),
    Case("unset_weights", "Unset", "wrong:scale-d-model", arguments={"by_width": True}),
    Case("pooled_probe", "AttentionPool"),
    Case("pooled_probe_scale", "AttentionPool", "wrong:scale-d-model", "scale=c**-0.5"),
    Case("label_attention", "LabelQueries"),
    Case(
        "label_attention",
        "LabelQueries",
        "wrong:scale-d-model",
        "if self.by_width",
        arguments={"by_width": True},
    ),
    Case("label_attention", "Classifier"),
    Case("label_attention", "Classifier", "wrong:padding-leak", arguments={"turned": True}),
    Case("inline_block", "Block"),
    Case("inline_gpt", "SmallGPT"),
    Case("inline_gpt", "SmallGPT", "wrong:scale-d-model", arguments={"by_width": True}),
    Case("lambda_feed_forward", "SmallGPT", "right|consistent", is_built=True),
    Case("closure_begins_at_zero", "FreshGPT", "wrong:sees-the-future"),
    Case("closure_begins_at_zero", "FreshGPT", "right|consistent", arguments={"ahead": 0}),
    Case("uncopyable_part", "RotaryGPT"),
    Case("plain_names", "MultiHead"),
    Case("sizes_in_main", "MultiHead"),
    Case("inner_module", "Projected"),
    Case("heads_given_causal", "SeriesCore"),
    Case("own_embedding", "build"),
    Case("least_length", "build", "wrong:padding-leak"),
    Case("gqa_tiled_tokens_first", "Grouped", "wrong:gqa-tiled", ".expand(b, s, n"),
    Case("late_layer", "FreshOutput", "wrong:not-repeatable", "out = nn.Linear("),
    Case("mask_of_other_text", "HeadsOutside", "wrong:mask-head-order", "masked_fill"),
    Case("mask_of_other_text_fixed", "HeadsOutside"),
    Case("mask_negative_product", "NodeHead", "wrong:mask-multiplied", "score = score * mask"),
    Case("decoder_by_config", "build", "wrong:sees-the-future"),
    Case("not_autoregressive", "NonAutoregressiveTranslator"),
    Case("qkv_list", "ListHeads"),
    Case("kqv_list", "KeysFirst"),
    Case("kqv_list", "KeysFirst", "wrong:qkv-order", arguments={"queries_first": True}),
    Case("channels_first", "ConvHeads"),
    Case("channels_first", "ConvHeads", example=f"lambda m, T: m({ROWS_LAST}, {ROWS_LAST})"),
    Case("cross_named_c", "ConditionHeads"),
    Case("cross_named_c", "ConditionHeads", example=f"lambda m, T: m({ROWS}, {ROWS})"),
    Case("unknown_second", "Gated", "unknown", example=f"lambda m, T: m({ROWS}, {ROWS})"),
    Case("unknown_second", "Ignored", "unknown|right"),
    Case(
        "unknown_second",
        "Conditioned",
        "unknown",
        example=f"lambda m, T: m({ROWS}, {ROWS}, {ROWS})",
    ),
    Case("rope_half_still", "StillHalf"),
    Case("tables_two_axes", "PairHeads"),
    Case("tables_of_calls", "Complex"),
    Case("tables_of_calls", "Turned"),
    Case("tables_of_calls", "Turned", "wrong:rope-axis", arguments={"by_head": True}),
    Case("flat_scaled_logits", "FlatTranslator"),
    Case(
        "flat_scaled_logits",
        "FlatTranslator",
        "wrong:sees-the-future",
        arguments={"leaky": True},
    ),
    Case(
        "series_convolutions",
        "wrong",
        "wrong:sees-the-future",
        "y = self.norm(y.mT)",
        causal=True,
        part="layers.0.norm (GroupNorm)",
    ),
    Case("series_convolutions", "mended", "consistent", causal=True),
    Case("heads_given", "SeriesCore", arguments={"masked": False}),
    Case("mask_query_key_batch", "TimeFirst"),
    Case("memory_mask_inside", "WrapperDecoder"),
    Case(
        "mask_switch_decoder",
        "SpeechTextDecoder",
        example="lambda m, T: m(torch.randint(80, (2, T)), torch.randn(2, 9, 48))",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.file}:{case.layer}")
def test_code_that_people_reported_gets_the_right_answer(case: Case) -> None:
    path = FOLDER / f"{case.file}.py"
    layer = getattr(user_code.load(path), case.layer)
    arguments = case.arguments or {}
    target, given = (layer(**arguments), {}) if case.is_built else (layer, arguments)
    examination = user_code.check(target, arguments=given, example=case.example, causal=case.causal)
    codes = {finding.code for finding in examination.findings}
    verdict, _, expected = case.expected.partition(":")
    assert examination.verdict in verdict.split("|")
    assert expected == "any" or codes <= set(expected.split("|"))
    assert bool(codes) == bool(expected)
    if case.part:
        assert examination.findings[0].message.endswith(f"first in {case.part}")
    if case.line:
        assert case.line in path.read_text().splitlines()[examination.findings[0].line - 1]


def test_weights_that_a_constructor_leaves_unset_are_named_and_drawn_alike_each_time() -> None:
    layer = user_code.load(FOLDER / "unset_weights.py").Unset
    first, second = (user_code.check(layer) for _ in range(2))
    (note,) = [note for note in first.notes if "sets no numbers" in note]
    assert "q_proj.weight" in note
    assert "v_proj" not in note
    assert first.comparison == second.comparison


def test_the_fix_uses_the_name_that_the_line_assigns() -> None:
    (finding,) = user_code.check(user_code.load(FOLDER / "names_reused.py").Reusing).findings
    assert "self.v_proj(value)" in finding.fix
    assert not finding.fix.startswith("key")


def test_every_file_is_examined() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {case.file for case in CASES}
