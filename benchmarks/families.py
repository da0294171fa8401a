"""The verdict of `mha check` on a small random model of each family of transformers that can be
built so, and what isolates packed documents in it.

    python benchmarks/families.py [--before FILE] > verdicts.jsonl

With the output of an earlier version, only the families whose verdict changed are printed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

import mhacli

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION")
MOST_PARAMETERS = 3_000_000
LONGEST_S = 60
SMALL: dict[str, float] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"], 32),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"], 2
    ),
    **dict.fromkeys(["decoder_layers", "num_decoder_layers", "num_key_value_heads"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "num_experts"], 4),
    **dict.fromkeys(["num_local_experts", "n_routed_experts", "num_experts_per_tok"], 4),
    **dict.fromkeys(["head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"], 64
    ),
    **dict.fromkeys(["n_inner", "hidden_dim"], 64),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 300),
    "moe_intermediate_size": 32,
    "word_embed_proj_dim": 32,
    "v_head_dim": 8,
    "vocab_size": 120,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}


def small_model(task: str, family: str) -> Any:
    """A small random model. Raises whatever its config or its code raises."""
    config_class: Any = transformers.CONFIG_MAPPING[family]
    usual = config_class()
    known = {
        name: value
        for name, value in SMALL.items()
        if isinstance(getattr(usual, name, ""), int | float | None)
    }
    config = config_class(**known)
    cls = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")[type(config)]
    with torch.device("meta"):
        if sum(each.numel() for each in cls(config).parameters()) > MOST_PARAMETERS:
            raise ValueError("it is large")
    torch.manual_seed(0)
    return cls(config).eval()


def verdicts() -> Iterator[list[Any]]:
    """The name of a model, its verdict and codes, and what `packing` says; or why there is none."""
    for task in TASKS:
        for family in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES"):
            row: list[Any] = [f"{task}:{family}"]
            signal.alarm(LONGEST_S)
            try:
                model = small_model(task, family)
                report = mhacli.check(model, length=64)
                packing = next(each.reason for each in report.behaviour if each.name == "packing")
                codes = sorted({finding.code for finding in report.findings})
                yield [*row, report.verdict, codes, packing]
            except (Exception, SystemExit) as fault:  # whatever a family raises
                yield [*row, "none", [], f"{type(fault).__name__}: {fault}"[:100]]
            finally:
                signal.alarm(0)


def _is_late(*_: object) -> None:
    raise TimeoutError("it takes too long")


def main() -> None:
    """Prints a line for each family, or for those that changed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path)
    before = parser.parse_args().before
    rows = [] if before is None else map(json.loads, before.read_text().splitlines())
    earlier = {name: [verdict, codes] for name, verdict, codes, _ in rows}
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _is_late)
    for row in verdicts():
        if earlier.get(row[0]) != row[1:3]:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
