"""Aliases of options and commands: accepted silently if they have one meaning, otherwise answered with a hint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice

ALIASES: Mapping[str, str] = {
    "--n-heads": "--heads",
    "--num-heads": "--heads",
    "--num-attention-heads": "--heads",
    "--n-kv-heads": "--kv-heads",
    "--num-kv-heads": "--kv-heads",
    "--num-key-value-heads": "--kv-heads",
    "--head-dim": "--d-head",
    "--d-k": "--d-head",
    "--hidden-size": "--d-model",
    "--embed-dim": "--d-model",
    "--n-embd": "--d-model",
    "--layers": "--layer",
    "--checkpoint": "--model",
    "--max-new-tokens": "--generate",
    "--max-length": "--max-tokens",
    "--sliding-window": "--window",
    "--sink": "--sink-window",
    "--sink-tokens": "--first-tokens",
    "--sink-share": "--sink-weight",
    "--pattern": "--where",
    "--is-causal": "--causal",
    "--bidirectional": "--no-causal",
    "--top-k": "--top",
    "--decimals": "--precision",
    "--atol": "--tolerance",
    "--rope": "--positions rope",
    "--alibi": "--positions alibi",
    "--cpu": "--device cpu",
    "--cuda": "--device cuda",
    "--gpu": "--device cuda",
    "--fp16": "--dtype float16",
    "--bf16": "--dtype bfloat16",
    "--colour": "--color",
    "--no-color": "--color never",
    "--no-colour": "--color never",
}
"""Aliases and the options that they stand for, in every command that has this option and none named like the alias."""

COMMAND_ALIASES: Mapping[str, Mapping[str, str]] = {
    "bench": {"--seq-len": "--lengths", "--batch-size": "--batch", "--quick": "--budget 0.5"},
}
"""Aliases that hold for one command only, because they would mean something else in others."""

HINTS: Mapping[str, Mapping[str, str]] = {
    "--seq-len": {
        "--max-tokens": "--max-tokens N takes the first N tokens of a text",
        "--random": "--random BATCH,LENGTH takes random numbers instead of a text",
    },
    "--batch-size": {
        "--random": "every TEXT is a sequence, and several make a batch; --random BATCH,LENGTH takes random numbers instead"
    },
    "--output": {"--save": "--save FILE writes the record", "--html": "--html, --svg and --png FILE draw it"},
}
"""Hints for names with several meanings, by the option that a command must have for the hint to apply."""


def expanded(words: Sequence[str], takes_value: Mapping[str, bool], command: str) -> Iterator[str]:
    """The words of a command line with aliases replaced. `takes_value` says for each option whether the next word is its value;
    values and all words after `--` stay as they are.

    >>> list(expanded(["--n-heads", "4", "--no-color"], {"--heads": True, "--color": True}, "run"))
    ['--heads', '4', '--color', 'never']
    """
    aliases = {**ALIASES, **COMMAND_ALIASES.get(command, {})}
    remaining = iter(words)
    for word in remaining:
        if word == "--":
            yield word
            yield from remaining
            return
        name, equals, value = word.partition("=")
        option, *values = aliases.get(name, name).split(" ") if name not in takes_value else [name]
        if option not in takes_value or (values and equals):
            option, values = name, []
        yield option + equals + value
        yield from values
        if takes_value.get(option) and not values and not equals:
            yield from islice(remaining, 1)


def suggestion(word: str, names: Sequence[str]) -> str | None:
    """The name that the user probably meant, None if none resembles the word.

    >>> suggestion("rum", ["run", "show"]), suggestion("--html-file", ["--html", "--top"]), suggestion("--quiet", ["--view"])
    ('run', '--html', None)
    """
    by_bare_name = {name.lstrip("-"): name for name in names}
    close = [by_bare_name[match] for match in get_close_matches(word.lstrip("-"), by_bare_name, 1)]
    sharing_prefix = [name for name in names if len(name) > 4 and (word.startswith(name) or name.startswith(word))]
    return next(iter(close or sharing_prefix), None)


def meant_option(word: str, names: Sequence[str]) -> str | None:
    """The hint for an unknown option of a command with the options `names`; None if none resembles it.

    >>> meant_option("--haeds", ["--head", "--heads"]), meant_option("--output", ["--save", "--json"])
    ('did you mean --heads?', '--save FILE writes the record')
    """
    hints = [hint for option, hint in HINTS.get(word, {}).items() if option in names]
    closest = suggestion(word, [name for name in names if name.startswith("--")])
    return "; ".join(hints) or (closest and f"did you mean {closest}?")
