"""What `mha` refuses: for each request that cannot be met the exit code, the kind of error and what
the message mentions.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save
from support import checkpoints
from support.mha import NO_TORCH, PLAIN_SHELL, WITHOUT_ROOT_RIGHTS, Ended, run

USAGE = "usage"
CHAT = [{"role": "user", "content": "hi"}]


class Refusal(NamedTuple):
    """The words of a command, its exit code, the `code` of its error (None: any), and the words
    that the message or the hint mentions, between bars.

    In the words of the command `@gpt2` is the folder of a checkpoint.
    """

    words: str
    exit: int
    code: str | None
    mentions: str = ""

    @property
    def needs_checkpoint(self) -> bool:
        return "@" in self.words


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [piece.strip() for piece in text.split(",")]


TEXTS = (
    Refusal("run ''", 2, USAGE),
    Refusal("run --file empty.txt", 1, "no-tokens", "empty.txt"),
    Refusal("run --file blank.txt", 1, "no-tokens"),
    Refusal("vocab --file marks.txt", 1, "no-tokens", "marks.txt|--punctuation"),
    Refusal("run '?! ...'", 1, "no-tokens", "--punctuation"),
    Refusal("run --file latin.txt", 1, "bad-text", "latin.txt|\\xff|7|--encoding|--errors"),
    Refusal("vocab --file far.txt", 1, "bad-text", "far.txt|\\xff|1048581|--encoding|--errors"),
    Refusal("heads --file wide.txt", 1, "bad-text", "wide.txt|UTF-16|--encoding"),
    Refusal("trace --file nul.txt", 1, "bad-text", "nul.txt|NUL"),
    Refusal("run --file word.txt", 1, "too-large", "1000|--max-token-len"),
    Refusal("run --file many.txt --tokenizer char", 1, "too-large", "32768|--max-tokens"),
    Refusal("vocab --file text.txt --max-bytes 8", 1, "too-large", "text.txt|--max-bytes"),
    Refusal("run - -", 2, USAGE, "stdin"),
    Refusal("vocab --file - --file -", 2, USAGE, "stdin"),
    Refusal("run", 2, USAGE, "--file"),
    Refusal("vocab", 2, USAGE, "--file"),
    Refusal("run -5", 2, USAGE, "-5|--"),
    Refusal("vocab --file text.txt --encoding base64", 2, USAGE, "--encoding|base64"),
    Refusal("run text.txt", 2, USAGE, "text.txt|--text"),
    Refusal("heads folder", 2, USAGE, "folder|--text|--model"),
    Refusal("trace cat.safetensors", 2, USAGE, "cat.safetensors"),
    Refusal("run 'the cat' --context folder", 2, USAGE, "folder"),
    Refusal("run 'the cat' --tokenizer words", 2, USAGE, "--tokenizer|words|word|char|byte"),
    Refusal("run 'a cat' --documents ''", 2, USAGE, "--documents"),
)

SIZES = (
    Refusal("run x --d-model 512 --heads 0", 2, USAGE, "--heads|0|1"),
    Refusal("run x --d-model 512 --heads -1", 2, USAGE, "--heads|-1"),
    Refusal("run x --d-model 512 --heads 3", 2, USAGE, "--heads|3|512|4"),
    Refusal("trace x --d-model 512 --heads 100000", 2, USAGE, "--heads|100000|1024"),
    Refusal("run x --heads 1_0", 2, USAGE, "--heads|1_0"),
    Refusal(f"run x --heads {'9' * 5000}", 2, USAGE, "--heads"),
    Refusal("run x --heads", 2, USAGE, "--heads"),
    Refusal("run x --heads 4 --kv-heads 3", 2, USAGE, "--kv-heads|3|4"),
    Refusal("run x --d-model 6 --heads 2 --positions rope", 2, USAGE, "rope|3"),
    Refusal("run x --seed -1", 2, USAGE, "--seed|-1|0"),
    Refusal(f"run x --seed {1 << 64}", 2, USAGE, f"--seed|{1 << 64}|{(1 << 64) - 1}"),
    Refusal("run x --device tpu", 2, USAGE, "--device|tpu|cpu|cuda"),
    Refusal("bench --device cuda:-1", 2, USAGE, "--device|cuda:-1|cpu"),
    Refusal("run x --device cuda:99", 1, None, "--device|cuda:99"),
    Refusal("doctor --device cuda:99", 1, None, "--device|cuda:99"),
    Refusal("run x --dtype int8", 2, USAGE, "--dtype|int8|float32|bfloat16"),
    Refusal("run x --scale nan", 2, USAGE, "--scale|nan"),
    Refusal(
        "run 'a b c d e f g' --positions learned --max-positions 5",
        1,
        "too-large",
        "--max-positions|5|7",
    ),
    Refusal("run x --keep attn", 2, USAGE, "--keep|attn|pattern"),
    Refusal("run x --keep-limit big", 2, USAGE, "--keep-limit|big"),
    Refusal(
        "run --random 1,1024 --heads 9 --d-model 45 --keep qk,pattern --keep-limit 40M",
        1,
        "too-large",
        "--keep|72.0|40.0|--keep-limit",
    ),
    Refusal(
        "run --file long.txt --heads 8 --device cpu", 1, "out-of-memory", "20000|8|--max-tokens"
    ),
)

MASKS = (
    Refusal("run 'a b c' --window -1", 2, USAGE, "--window|-1"),
    Refusal("run 'a b c' --prefix -1", 2, USAGE, "--prefix|-1"),
    Refusal("run 'a b c' --sink-window 1", 2, USAGE, "--sink-window|--window"),
    Refusal("run 'a b' --causal --context 'c d'", 2, USAGE, "--causal|--context"),
    Refusal("run 'a b c' --score-bias absent.safetensors", 1, "unreadable", "absent.safetensors"),
    Refusal("run 'a b c' --score-bias text.txt", 1, "bad-file", "text.txt"),
    Refusal(
        "run 'a b c' --score-bias bias.safetensors:none", 1, "bad-file", "bias.safetensors|none|b"
    ),
    Refusal("run 'a b c' --score-bias bias.safetensors", 1, "bad-file", "bias.safetensors|2|3"),
    Refusal("decode 'a b c' --prompt-len 4", 2, USAGE, "--prompt-len|4|3"),
    Refusal("decode 'a b c' --no-causal", 2, USAGE, "--no-causal"),
    Refusal("decode 'a b c' --context d", 2, USAGE, "--context"),
)

VIEWS = (
    Refusal("run 'a b' --view cubist", 2, USAGE, "--view|cubist|matrix|heatmap"),
    Refusal("run 'a b' --head 4", 2, USAGE, "--head|4"),
    Refusal("run 'a b' --head 0,9", 2, USAGE, "--head|9|3"),
    Refusal("run 'a b' --head 4-2", 2, USAGE, "--head|4-2"),
    Refusal("run 'a b' --sequence 1", 2, USAGE, "--sequence|1"),
    Refusal("show cat.safetensors --layer 0", 2, USAGE, "--layer"),
    Refusal("show cat.safetensors --map 0", 2, USAGE, "--map"),
    Refusal("show heads.safetensors --map 4", 2, USAGE, "4"),
    Refusal("show heads.safetensors --csv --figure head", 2, USAGE, "--figure"),
    Refusal("show lean.safetensors --csv", 1, USAGE, "--csv|pattern"),
    Refusal("show walk.safetensors --csv", 2, USAGE, "--csv"),
    Refusal("show model.safetensors --layer 3", 2, USAGE, "--layer|3"),
    Refusal("show model.safetensors --layer decoder.1", 2, USAGE, "--layer|decoder.1"),
    Refusal("show cat.safetensors --from last", 2, USAGE, "--from"),
    Refusal("run x --model @gpt2 --from 7", 2, USAGE, "--from|7"),
    Refusal("run x --model @gpt2 --from first", 2, USAGE, "--from|first"),
    Refusal("run 'a b' --json --csv", 2, USAGE, "--json|--csv"),
    Refusal("run 'a b' --figure grid", 2, USAGE, "--figure|--svg"),
    Refusal("run 'a b' --svg new.svg --figure effects", 1, None, "effects"),
    Refusal("run 'a b' --html", 2, USAGE, "--html"),
    Refusal("run 'a b' --words", 2, USAGE, "--words|--model"),
    Refusal("run 'a b' --save r --html ./r", 2, USAGE, "--save|--html|r"),
)

HEADS = (
    Refusal("heads 'a b c' --where 'k = q'", 2, USAGE, "--where"),
    Refusal("heads 'a b c' --keep pattern", 2, USAGE, "--keep"),
    Refusal("heads 'a b c' --top 3", 2, USAGE, "--top|--query"),
)

MODELS = (
    Refusal("run x --model @gpt2 --context a", 2, USAGE, "--context"),
    Refusal("effect x --span a=/cat/", 2, USAGE, "--span"),
    Refusal("run --random 1,3 --model @gpt2", 2, USAGE, "--random|--model"),
    Refusal("doctor --revision main", 2, USAGE, "--revision|--model"),
    Refusal("doctor --tokenizer byte", 2, USAGE, "--tokenizer|--model"),
    Refusal("run x --model @gpt2 --revision main", 2, USAGE, "--revision"),
    Refusal("run x --model @gpt2 --layer 3", 2, USAGE, "--layer|3|2"),
    Refusal("heads x --model @gpt2 --layer 0,5", 2, USAGE, "--layer|5"),
    Refusal("trace x --model @gpt2 --layer 0,1", 2, USAGE, "--layer|2"),
    Refusal("decode x --model @gpt2 --layer 0-2", 2, USAGE, "--layer|3"),
    Refusal("run x --model @gpt2 --layer decoder.1", 2, USAGE, "--layer|decoder"),
    Refusal("heads x --model @gpt2 --layer middle.1", 2, USAGE, "--layer|middle.1"),
    Refusal("run x --model @gpt2 --head 0,6", 2, USAGE, "--head|6|5"),
    Refusal("trace x --model @gpt2 --cell 6,0,0", 2, USAGE, "--cell|6"),
    Refusal("decode x --model @gpt2 --prompt-len 99", 2, USAGE, "--prompt-len|99"),
    Refusal("run x --model @gpt2 --keep pattern,out", 2, USAGE, "--keep|out|pattern"),
    Refusal("run x --model @gpt2 --chat chat.json", 2, USAGE, "--chat"),
    Refusal("run --model @gpt2 --chat cut.json", 1, "bad-file", "cut.json"),
    Refusal("run --model @gpt2 --chat role.json", 1, "bad-file", "role.json|$[0].role"),
    Refusal("run ' ' --model @gpt2", 1, "no-tokens", "0"),
    Refusal("run x --model absent/", 1, "unreadable", "absent/"),
    Refusal("run x --model empty", 1, None, "empty|config.json"),
    Refusal("run x --model text.txt", 1, None, "text.txt"),
    Refusal(
        "run x --model @gpt2 --device cpu --device-map auto", 2, USAGE, "--device|--device-map"
    ),
    Refusal("run x --model @gpt2 --device-map here.json", 2, USAGE, "--device-map|here.json|auto"),
    Refusal("run x --model @gpt2 --device-map tp", 2, USAGE, "--device-map tp|auto"),
    Refusal("run x --model @gpt2 --device-map map.json", 1, "bad-file", "map.json|gpu"),
    Refusal("run x --model @t5 --padding left", 2, USAGE, "--padding|left"),
    Refusal("scan text.txt --out o.mha", 2, USAGE, "--model"),
    Refusal("scan text.txt --model @gpt2", 2, USAGE, "--out"),
    Refusal("scan text.txt --model @gpt2 --out o.mha --span s=0:3", 2, USAGE, "--span|s"),
    Refusal("scan text.txt --model @gpt2 --out o.mha --sink-weight 2", 2, USAGE, "--sink-weight|2"),
    Refusal("scan text.txt --model @gpt2 --out o.mha --where 'k =='", 2, USAGE, "--where|k"),
    Refusal(
        "scan text.txt --model @gpt2 --out o.mha --lines --field text", 2, USAGE, "--lines|--field"
    ),
    Refusal("scan text.txt --model @gpt2 --out o.mha --layer 9", 2, USAGE, "--layer|9"),
    Refusal("scan absent.txt --model @gpt2 --out left.mha", 1, "unreadable", "absent.txt"),
    Refusal("scan text.txt --model @gpt2 --out o.mha --pack", 2, USAGE, "--pack"),
    Refusal("scan text.txt --model @gpt2 --out full", 2, USAGE, "full"),
    Refusal("scan text.txt --model @gpt2 --out text.txt/o.mha", 1, None, "text.txt/o.mha"),
    Refusal("doctor --compile", 2, USAGE, "--compile"),
    Refusal("doctor --model empty --compile", 2, USAGE, "--compile"),
    Refusal("doctor 'some text'", 2, USAGE, "some text"),
    Refusal("doctor --device gpu", 2, USAGE, "gpu"),
    Refusal("doctor --dtype int8", 2, USAGE, "int8"),
    Refusal("doctor --model @gpt2 ' '", 1, "no-tokens", "0"),
)

UNREADABLE = """
    run --file absent.x, vocab --file broken, run --file loop, vocab --file fifo,
    run --file text.txt/below.x, run --file folder, run x --weights absent.x,
    trace x --vocab absent.x, vocab x --tokenizer folder/absent.json, show absent.x, show fifo,
    show folder, diff cat.safetensors absent.x, diff cat.safetensors fifo
"""
WRONG_KIND = """
    run x --weights text.txt, run x --vocab text.txt, run x --tokenizer text.txt, show text.txt,
    show chat.json, diff cat.safetensors text.txt, diff cat.safetensors layer.safetensors,
    show layer.safetensors, run x --weights cat.safetensors,
    weights info text.txt
"""
"""Words that end with the name of a file which cannot be read, or is of another kind than the
command reads."""

FILES = (
    *(Refusal(line, 1, "unreadable", line.split()[-1]) for line in listed(UNREADABLE)),
    *(Refusal(line, 1, "bad-file", line.split()[-1]) for line in listed(WRONG_KIND)),
    Refusal(f"run --file {'n' * 300}", 1, "unreadable", "n" * 300),
    Refusal("check absent.py:Attention", 1, "unreadable", "absent.py"),
    Refusal("trace absent.py:Attention", 1, "unreadable", "absent.py"),
    Refusal("run x --save old.txt", 1, "exists", "old.txt|--force"),
    Refusal("show", 2, USAGE),
    Refusal("diff cat.safetensors", 2, USAGE),
    Refusal("show a b", 2, USAGE, "b"),
    Refusal("show cat.safetensors --causal", 2, USAGE, "--causal"),
    Refusal("weights info", 2, USAGE),
    Refusal("weights burn it", 2, USAGE, "burn"),
    Refusal("run 'a b c' --weights layer.safetensors --d-model 12", 2, USAGE, "--d-model|12|8"),
    Refusal("run 'a b zebra' --weights layer.safetensors", 1, "unknown-token", "zebra"),
    Refusal("run x --model @gpt2 --sink-window 1", 2, USAGE, "--sink-window|--model"),
    Refusal("run x --model @gpt2 --no-bias", 2, USAGE, "--no-bias|--model"),
)

OTHERS = (
    Refusal("bench 'the cat'", 2, USAGE),
    Refusal("run x --mask", 2, USAGE, "--mask|mha trace"),
    Refusal("bench --prompt-len 3", 2, USAGE, "--prompt-len|mha decode"),
    Refusal("check", 2, USAGE),
    Refusal("check mine.py", 2, USAGE, "mine.py"),
    Refusal("check mine.py:", 2, USAGE),
    Refusal("check 'mine.py:a b'", 2, USAGE, "a b"),
    Refusal("check folder", 2, USAGE, "folder"),
    Refusal("check text.txt", 2, USAGE, "text.txt"),
    Refusal("check mine.py:Attention --against absent.py:Attention", 1, "unreadable", "absent.py"),
    Refusal("check mine.py:Attention --arg d_model", 2, USAGE, "--arg|d_model"),
    Refusal("check mine.py:Attention --arg a=1 --arg a=2", 2, USAGE, "--arg|a"),
    Refusal("check mine.py:Attention --against-arg a=1", 2, USAGE, "--against-arg|--against"),
    Refusal("check mine.py:Attention --time-limit 0", 2, USAGE, "--time-limit|0"),
    Refusal("trace mine.py:Attention --cell 0,0,0", 2, USAGE, "--cell"),
    Refusal("run x --arg d_model=8", 2, USAGE, "--arg"),
    Refusal("trace 'a b' --arg d_model=8", 2, USAGE, "--arg"),
    Refusal("trace x --model @gpt2 --time-limit 1", 2, USAGE, "--time-limit"),
    Refusal("view cat.safetensors", 1, "no-terminal"),
    Refusal("rum", 2, USAGE, "rum"),
    Refusal("run x --haeds 4", 2, USAGE, "--haeds"),
    Refusal("run x --head-count=4", 2, USAGE, "--head-count"),
    Refusal("cat.safetensors", 2, USAGE, "cat.safetensors"),
)

BROUGHT = {
    "run": """
        --d-model 8, --d-input 8, --dropout 0.1, --train, --weights w, --rope-theta 100,
        --max-positions 64, --window 3, --scale 0.5, --score-bias b, --heads 2,
        --documents ---, --vocab v, --punctuation drop, --save-weights w
    """,
    "heads": "--kv-heads 2, --bias, --positions rope, --causal, --keep-case, --repeat 3",
    "trace": "--d-head 4, --no-out-proj, --init uniform, --prefix 1, --mask",
    "decode": "--d-v 4, --seed 3, --softcap 5, --cache concat",
}
"""Options that build a layer, by command. A checkpoint brings a layer with it."""
NEEDY = {
    "run": "--layer 1, --chat c, --span a=0:1, --generate 3, --revision main, --device-map auto",
    "heads": "--layer 1, --chat c",
    "trace": "--layer 1",
    "decode": "--generate 2",
    "effect": "--target a, --cut a:b, --layer 0",
}
"""Options that only a checkpoint can follow, by command."""
WORDS_OF_BENCH = {
    "--lengths": ["''", "12x", "0", "16..8", "9999999k"],
    "--batch": ["x", "1,2"],
    "--heads": ["0"],
    "--kv-heads": ["two"],
    "--d-head": ["1..0"],
    "--backends": ["sdpa2", "sdpa,"],
    "--direction": ["up"],
    "--dtype": ["float8"],
    "--threads": ["0"],
    "--seed": ["-1"],
    "--repeat": ["0"],
    "--budget": ["0", "86401", "nan"],
    "--call-limit": ["-1"],
}
"""Values that options of `mha bench` cannot have."""

ROWS = [
    pytest.param(
        row,
        id=row.words[:60],
        marks=[pytest.mark.real] if row.needs_checkpoint else [],
    )
    for row in (*TEXTS, *SIZES, *MASKS, *VIEWS, *HEADS, *MODELS, *FILES, *OTHERS)
]
"""Those with a checkpoint are `real`; the rows of BROUGHT are refused with one in every run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of every kind that the rows name."""
    place = tmp_path_factory.mktemp("refusals")
    texts: dict[str, str | bytes] = {
        "text.txt": "the cat sat on the mat",
        "empty.txt": "",
        "blank.txt": " \n\t\r\n",
        "marks.txt": "?!… —\n«»",
        "latin.txt": b"the caf\xff",
        "far.txt": (b"many words " * (1 << 17))[: (1 << 20) + 5] + b"\xff rest",
        "cut.txt": b"caf\xe2\x82",
        "wide.txt": "the cat".encode("utf-16"),
        "nul.txt": b"text\0more",
        "word.txt": "a " + "b" * 1_100_000,
        "many.txt": "a" * 40_000,
        "long.txt": "the cat sat on " * 5_000,
        "old.txt": "kept",
        "chat.json": json.dumps(CHAT),
        "cut.json": '[{"role": "user"',
        "role.json": '[{"role": "user2", "content": "a"}]',
        "map.json": '{"a": "gpu"}',
        "numbers.json": '["a", 3]',
        "mine.py": (Path(__file__).parent / "cases" / "attention.py").read_text(),
        "bias.safetensors": save({"b": np.zeros(2, np.float32)}),
    }
    for name, content in texts.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("folder", "empty", "full"):
        (place / name).mkdir()
    (place / "full" / "thesis.txt").touch()
    (place / "broken").symlink_to("nowhere")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    layer = ["--d-model", "8", "--heads", "4", "--repeat", "1"]
    run(place, "run", "the cat sat", *layer, "--save", "cat.safetensors")
    run(place, "run", "a b c", *layer, "--save-weights", "layer.safetensors")
    run(place, "run", "the cat sat", *layer, "--keep", "z", "--save", "lean.safetensors")
    run(place, "heads", "the cat sat", *layer, "--save", "heads.safetensors")
    run(place, "trace", "mine.py:Attention", "--save", "walk.safetensors")
    gpt2 = str(checkpoints.folder("gpt2"))
    run(place, "run", "the cat", "--model", gpt2, "--save", "model.safetensors")
    return place


def words_of(line: str) -> list[str]:
    """The words of a row. `--json` is added where the command has it, except with `mha show`, whose
    views it would replace.
    """
    for name in re.findall(r"@(\w+)", line):
        line = line.replace(f"@{name}", str(checkpoints.folder(name)))
    words = shlex.split(line)
    if words[0] not in ("show", "view") and not {"--csv", "--json"} & set(words):
        words.insert(2 if words[0] == "weights" else 1, "--json")
    return words


def mentions(ended: Ended, piece: str) -> bool:
    """Whether a message has a piece as a whole word."""
    return bool(re.search(rf"(?<![\w-]){re.escape(piece)}(?!\w)", ended.said))


def require_refusal(folder: Path, row: Refusal) -> None:
    words, before = words_of(row.words), sorted(folder.rglob("*"))
    ended = run(folder, *words, code=row.exit)
    pieces = row.mentions.split("|") if row.mentions else []
    assert [piece for piece in pieces if not mentions(ended, piece)] == [], ended.said
    if row.code is not None:
        assert ended.error.get("code", row.code) == row.code, ended.error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("row", ROWS)
def test_a_request_that_cannot_be_met_is_refused_with_what_is_wrong(
    folder: Path, row: Refusal
) -> None:
    require_refusal(folder, row)


@pytest.mark.parametrize("command", BROUGHT)
def test_what_a_checkpoint_brings_cannot_be_chosen(folder: Path, command: str) -> None:
    for option in listed(BROUGHT[command]):
        words = f"{command} x --model @gpt2 {option}"
        require_refusal(folder, Refusal(words, 2, USAGE, f"{option.split()[0]}|--model"))


@pytest.mark.parametrize("command", NEEDY)
def test_what_only_a_checkpoint_can_follow_needs_one(folder: Path, command: str) -> None:
    for option in listed(NEEDY[command]):
        words = f"{command} x {option}"
        require_refusal(folder, Refusal(words, 2, USAGE, f"{option.split()[0]}|--model"))


@pytest.mark.parametrize("option", WORDS_OF_BENCH)
def test_a_value_that_a_benchmark_cannot_use_is_refused_with_its_option(
    folder: Path, option: str
) -> None:
    for word in WORDS_OF_BENCH[option]:
        row = Refusal(f"bench {option} {word}", 2, USAGE, option.split()[-1])
        require_refusal(folder, row)


@pytest.mark.parametrize(
    "words",
    [["run", "--file", "SECRET"], ["run", "x", "--weights", "SECRET"], ["show", "SECRET"]],
    ids=" ".join,
)
def test_a_file_without_permission_to_read_is_named(
    mha: Callable[..., Ended], tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "secret.x").write_text("a")
    (tmp_path / "secret.x").chmod(0)
    shell = WITHOUT_ROOT_RIGHTS if os.geteuid() == 0 else PLAIN_SHELL
    words = [word.replace("SECRET", "secret.x") for word in words]
    ended = mha(*words, "--json", code=1, shell=shell, modules=NO_TORCH)
    assert (ended.error["code"], ended.error["path"]) == ("unreadable", "secret.x")


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["run", "--file", "absent.x"], "absent.x"),
        (["run", "x", "--vocab", "numbers.json"], "numbers.json"),
        (["show", "text.txt"], "text.txt"),
        (["run", "x", "--save", "old.txt"], "old.txt"),
        (["run", "text.txt"], "text.txt"),
        (["diff", "cat.safetensors", "text.txt"], "text.txt"),
        (["heads", "x", "--context", "folder"], "folder"),
        (["run", "x", "--heads", "5"], None),
    ],
    ids=str,
)
def test_an_error_about_a_file_has_its_path(
    folder: Path, words: list[str], path: str | None
) -> None:
    assert run(folder, *words, "--json", code=(1, 2)).error["path"] == path
