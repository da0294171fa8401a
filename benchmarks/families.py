"""The verdict of `mha check` on a small random model of each family of transformers that can be
built so, and what isolates packed documents in it.

    python benchmarks/families.py [--before FILE] > verdicts.jsonl
    python benchmarks/families.py --tiny > tiny.jsonl

With the output of an earlier version, only the families whose verdict changed are printed. `--tiny`
checks each of `CONFIGS` as `mha check --model DIR --tiny` does, with the config that transformers
gives a family by default and without weights, beside plain passes of the same model.
"""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

import mhacli
from mhacli.commands.check.checkpoint import admitted
from mhacli.commands.check.examine import examination_of
from mhacli.commands.check.result import CheckRequest
from mhacli.usercode.process import no_stage

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


# --------------------------------------------------------------------------- a config alone, shrunk


CONFIGS = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "opt", "bloom", "mpt"),
    *("falcon", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma"),
    *("gemma2", "gemma3_text", "phi", "phi3", "stablelm", "starcoder2", "olmo2", "cohere"),
    *("granite", "deepseek_v3", "gpt_oss", "glm4", "smollm3", "bert", "roberta", "distilbert"),
    *("electra", "albert", "deberta-v2", "modernbert", "t5", "bart"),
)
"""40 families of text, chosen before any was tried."""
SAME = 1e-4
"""The largest difference, relative to the largest output, that counts as none."""
N_TOKENS, N_PADDING = 24, 5


def of_config_alone() -> Iterator[list[Any]]:
    """A family, the verdict and codes, the behaviours on which plain passes decide otherwise, and
    the seconds of processor time of the examination beyond importing and building.
    """
    for family in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            save_config(family, folder)
            request = CheckRequest(model=folder, tiny=True)
            admitted(request.model_settings)  # imports what the family needs
            began = process_time()
            model = admitted(request.model_settings).model
            building = process_time() - began
            began = process_time()
            report = examination_of(request, no_stage)
            seconds = process_time() - began - building
        plain = by_plain_passes(model.float())
        measured = {each.name: each.ok for each in report.behaviour if each.ok is not None}
        other = [name for name, ok in plain.items() if measured.get(name, ok) != ok]
        both = sorted(measured.keys() & plain.keys())
        codes = [finding.code for finding in report.findings]
        yield [family, report.verdict, codes, other, both, round(seconds, 2)]


def save_config(family: str, folder: str) -> None:
    """Writes the config of a family, with the name of its usual model: of an encoder, that of a
    masked language model.
    """
    config = transformers.CONFIG_MAPPING[family]()
    for task in ("MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        if family in names:
            config.architectures = [names[family]]
            break
    config.save_pretrained(folder)


@torch.no_grad()
def by_plain_passes(model: Any) -> Mapping[str, bool]:
    """The behaviours of a model by its own passes; of a decoder with an encoder only a few."""
    is_pair = model.config.is_encoder_decoder
    generator = torch.Generator().manual_seed(0)
    n_words = min(250, model.config.get_text_config(decoder=True).vocab_size - 4)
    ids = torch.randint(4, n_words, (3, N_TOKENS), generator=generator)

    def outputs(ids: torch.Tensor, **more: Any) -> torch.Tensor:
        if is_pair:
            more["decoder_input_ids"] = ids[:1].new_full((len(ids), 3), 5)
        out = model(input_ids=ids, use_cache=False, **more)
        tensor: torch.Tensor = out["logits"] if "logits" in out else out["last_hidden_state"]
        return tensor

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool((a - b).abs().max() <= SAME * a.abs().max())

    first, half = outputs(ids[:1]), N_TOKENS // 2
    found = {"repeat": same(first, outputs(ids[:1])), "batch": same(first, outputs(ids)[:1])}
    if not is_pair:
        changed = ids[:1].clone()
        changed[:, half:] = ids[1:2, half:]
        found["causality"] = same(first[:, :half], outputs(changed)[:, :half])
        found["prefix"] = same(first[:, :half], outputs(ids[:1, :half]))
        found |= _padded(outputs, same, ids, first, model)
    name = model.config._attn_implementation
    with suppress(ValueError):
        model.set_attn_implementation("eager")
        if name != "eager":
            found["eager"] = same(first, outputs(ids[:1]))
        model.set_attn_implementation(name)
    return found


def _padded(
    outputs: Callable[..., torch.Tensor],
    same: Callable[[torch.Tensor, torch.Tensor], bool],
    ids: torch.Tensor,
    first: torch.Tensor,
    model: Any,
) -> Iterator[tuple[str, bool]]:
    """What padding on each side does to a text."""
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    padding = ids.new_full((1, N_PADDING), pad)
    mask = torch.ones(1, N_TOKENS + N_PADDING, dtype=torch.long)
    mask[:, N_TOKENS:] = 0
    right = outputs(torch.cat([ids[:1], padding], 1), attention_mask=mask)
    yield "right-padding", same(first, right[:, :N_TOKENS])
    mask = mask.flip(1)
    more = dict[str, Any]()
    reads_padding = any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
    if "position_ids" in inspect.signature(model.forward).parameters and not reads_padding:
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if more or reads_padding or not hasattr(model.config, "type_vocab_size"):
        left = outputs(torch.cat([padding, ids[:1]], 1), attention_mask=mask, **more)
        yield "left-padding", same(first, left[:, N_PADDING:])


def _is_late(*_: object) -> None:
    raise TimeoutError("it takes too long")


def main() -> None:
    """Prints a line for each family, or for those that changed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    before = arguments.before
    rows = [] if before is None else map(json.loads, before.read_text().splitlines())
    earlier = {name: [verdict, codes] for name, verdict, codes, _ in rows}
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _is_late)
    for row in of_config_alone() if arguments.tiny else verdicts():
        if earlier.get(row[0]) != row[1:3]:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
