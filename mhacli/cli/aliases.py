"""Other names of options and commands that people type: taken silently where they have one meaning, else answered by a hint."""

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
"""What stands for what, in every command that has the option on the right and none of the name on the left."""

COMMAND_ALIASES: Mapping[str, Mapping[str, str]] = {
    "bench": {"--seq-len": "--lengths", "--batch-size": "--batch", "--quick": "--budget 0.5"},
}
"""The same in a single command, where another one would mean something else by it."""

HINTS: Mapping[str, Mapping[str, str]] = {
    "--width": {
        "--color": "COLUMNS=120 before the command sets the width of its output",
        "--d-model": "--d-model is the width of the model",
    },
    "--seq-len": {
        "--max-tokens": "--max-tokens N takes the first N tokens of a text",
        "--random": "--random BATCH,LENGTH takes random numbers instead of a text",
    },
    "--batch-size": {
        "--random": "every TEXT is a sequence, and several make a batch; --random BATCH,LENGTH takes random numbers instead"
    },
    "--output": {"--save": "--save FILE writes the record", "--html": "--html, --svg and --png FILE draw it"},
}
"""What to type in place of a name that has several meanings, each with the option that a command must have for it."""


def expanded(words: Sequence[str], takes_value: Mapping[str, bool], command: str) -> Iterator[str]:
    """The words of a command line with our names in place of others. What `takes_value` holds for an option is whether the next
    word is its value; values, and all words behind `--`, stay as they are.

    >>> list(expanded(["--n-heads", "4", "--no-color"], {"--heads": True, "--color": True}, "run"))
    ['--heads', '4', '--color', 'never']
    """
    known = {**ALIASES, **COMMAND_ALIASES.get(command, {})}
    rest = iter(words)
    for word in rest:
        if word == "--":
            yield word
            yield from rest
            return
        name, equals, value = word.partition("=")
        option, *values = known.get(name, name).split(" ") if name not in takes_value else [name]
        if option not in takes_value or (values and equals):
            option, values = name, []
        yield option + equals + value
        yield from values
        if takes_value.get(option) and not values and not equals:
            yield from islice(rest, 1)


def suggestion(word: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant, None where none resembles the word.

    >>> suggestion("rum", ["run", "show"]), suggestion("--html-file", ["--html", "--top"]), suggestion("--quiet", ["--view"])
    ('run', '--html', None)
    """
    bare = {name.lstrip("-"): name for name in names}
    close = [bare[near] for near in get_close_matches(word.lstrip("-"), bare, 1)]
    begun = [name for name in names if len(name) > 4 and (word.startswith(name) or name.startswith(word))]
    return next(iter(close or begun), None)


def meant_option(word: str, names: Sequence[str]) -> str | None:
    """The hint for an option that is none of the `names` of a command; None where nothing resembles it.

    >>> meant_option("--haeds", ["--head", "--heads"]), meant_option("--width", ["--color", "--json"])
    ('did you mean --heads?', 'COLUMNS=120 before the command sets the width of its output')
    """
    hints = [hint for option, hint in HINTS.get(word, {}).items() if option in names]
    near = suggestion(word, [name for name in names if name.startswith("--")])
    return "; ".join(hints) or (near and f"did you mean {near}?")
