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
    """

    file: str
    layer: str
    expected: str = "right"
    line: str = ""
    arguments: dict[str, int] | None = None
    is_built: bool = False
    example: str | None = None


PAIRS = {"dim": 64, "n_heads": 4}
CASES = (
    Case("causal_unless_masked", "CausalSelfAttention"),
    Case("causal_flag_missing", "CausalSelfAttention", "wrong:causal-missing"),
    Case("mask_of_added_keys", "AddedKeysAttention"),
    Case("two_paths_added_mask", "TwoPaths"),
    Case("mask_minus_ten_thousand", "MaskedHeads"),
    Case("torch_layer_batch_second", "BatchBlock", "wrong:batch-leak"),
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
    Case("lambda_feed_forward", "SmallGPT", "right|consistent", is_built=True),
    Case("closure_begins_at_zero", "FreshGPT", "wrong:sees-the-future"),
    Case("closure_begins_at_zero", "FreshGPT", "consistent", arguments={"ahead": 0}),
    Case("uncopyable_part", "RotaryGPT"),
    Case("decoder_by_config", "build", "wrong:sees-the-future"),
    Case("not_autoregressive", "NonAutoregressiveTranslator"),
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
    examination = user_code.check(target, arguments=given, example=case.example)
    codes = {finding.code for finding in examination.findings}
    verdict, _, expected = case.expected.partition(":")
    assert examination.verdict in verdict.split("|")
    assert expected == "any" or codes <= set(expected.split("|"))
    assert bool(codes) == bool(expected)
    if case.line:
        assert case.line in path.read_text().splitlines()[examination.findings[0].line - 1]


def test_the_fix_uses_the_name_that_the_line_assigns() -> None:
    (finding,) = user_code.check(user_code.load(FOLDER / "names_reused.py").Reusing).findings
    assert "self.v_proj(value)" in finding.fix
    assert not finding.fix.startswith("key")


def test_every_file_is_examined() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {case.file for case in CASES}
