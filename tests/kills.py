"""How many small mistakes in the package its tests notice, plainly and with `--full`. No test: it takes hours.

    python tests/kills.py [--mutants 60] [--seed 1] [--results FILE] [--mirror] [--workers 2]

A seeded sample of mutants, the same share of each room, is made in a copy: an operator, a constant, two arguments, a `not` or a
statement is another or gone. The tests of the folder that mirrors the mutated file are run first, then all, plain ones before
those of `--full`; `--mirror` leaves it at the folder. A later call goes on from the file of results.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import site
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3600
OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


class Mutant(NamedTuple):
    """A file with one part of its bytes replaced."""

    path: str
    line: int
    start: int
    end: int
    was: str
    now: str

    @property
    def room(self) -> str:
        return Path(self.path).parts[1]

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line}: {self.was} -> {self.now}"

    @property
    def mirror(self) -> str:
        """The folder of tests for it, the nearest that exists."""
        folder = Path("tests", *Path(self.path).parts[1:-1])
        while not (ROOT / folder).is_dir():
            folder = folder.parent
        return str(folder)


# ------------------------------------------------------------------------------------------------------------ the mutants


def mutants_of(path: Path) -> list[Mutant]:
    """All that can be made of a file."""
    text = path.read_bytes()
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    made = []
    for node, now in _changes(ast.parse(text)):
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        was = text[start:end].decode()
        if was != now:
            made.append(Mutant(str(path.relative_to(ROOT)), node.lineno, start, end, was, now))
    return made


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes that can be replaced, each with its replacement."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield node, f"{_in_brackets(node.left)} {OTHER[type(node.ops[0])]} {_in_brackets(node.comparators[0])}"
        elif isinstance(node, ast.BinOp) and type(node.op) in OTHER and not _has_text(node):
            yield node, f"({_in_brackets(node.left)} {OTHER[type(node.op)]} {_in_brackets(node.right)})"
        elif isinstance(node, ast.BoolOp):
            yield node, "(" + f" {OTHER[type(node.op)]} ".join(map(_in_brackets, node.values)) + ")"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, _in_brackets(node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, str(node.value + 1)
        elif isinstance(node, ast.Call) and len(node.args) >= 2 and not _has_star(node):
            first, second, *others = node.args
            yield node, ast.unparse(ast.Call(node.func, [second, first, *others], node.keywords))
        elif isinstance(node, (ast.AugAssign, ast.Raise)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield node, "pass"


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below but annotations, f-strings and what only a type checker reads."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr) and not is_typing:
                yield node
                yield from _code(node)


def _in_brackets(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _has_text(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", 0), str) for part in ast.walk(node))


def _has_star(node: ast.Call) -> bool:
    return any(isinstance(argument, ast.Starred) for argument in node.args)


def sample(n: int, seed: int) -> list[Mutant]:
    """n mutants, in turn one of each room."""
    dice = random.Random(seed)
    rooms: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(ROOT.glob("mhacli/*/**/*.py")):
        rooms[path.relative_to(ROOT).parts[1]].append(path)
    taken: list[Mutant] = []
    while len(taken) < n:
        for room in sorted(rooms):
            made = mutants_of(dice.choice(rooms[room]))
            taken += [dice.choice(made)] if made else []
    return taken[:n]


# ---------------------------------------------------------------------------------------------------------------- the runs


def made_copy(folder: Path) -> Path:
    """A copy of the repository with a Python that takes the package from there and everything else from here."""
    copy = folder / "copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    (packages,) = (copy / ".venv").glob("lib/*/site-packages")
    lines = [str(copy), *(f"import site; site.addsitedir({place!r})" for place in site.getsitepackages())]
    (packages / "copy.pth").write_text("\n".join(lines) + "\n")
    mha = copy / ".venv" / "bin" / "mha"
    mha.write_text(f"#!{copy}/.venv/bin/python\nfrom mhacli.__main__ import main\n\nmain()\n")
    mha.chmod(0o755)
    return copy


def dies(copy: Path, words: list[str], workers: int) -> bool:
    """Whether a test fails, or none ends in time."""
    command = [
        f"{copy}/.venv/bin/python",
        "-m",
        "pytest",
        "-x",
        "-qq",
        "-p",
        "no:cacheprovider",
        "-n",
        str(workers),
        *words,
    ]
    environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis")}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1, 2, 5):
        raise SystemExit(
            f"pytest ended with {done.returncode}:\n{done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}"
        )
    return done.returncode in (1, 2)


def killer(copy: Path, mutant: Mutant, *, mirror_alone: bool, workers: int) -> str:
    """What notices the mutant first: a tier with the extent of its tests, or nothing."""
    path = copy / mutant.path
    original = path.read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.now.encode() + original[mutant.end :])
    extents = {"mirror": [mutant.mirror]} | ({} if mirror_alone else {"all": ["tests"]})
    try:
        for tier, words in (("default", []), ("full", ["--full"])):
            for extent, folders in extents.items():
                if dies(copy, [*words, *folders], workers):
                    return f"{tier}, {extent}"
        return "nothing"
    finally:
        path.write_bytes(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("kills.jsonl"))
    parser.add_argument("--mirror", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    lines = asked.results.read_text().splitlines() if asked.results.exists() else []
    known = {entry["mutant"]: entry["killer"] for entry in map(json.loads, lines)}
    mutants = sample(asked.mutants, asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = made_copy(Path(folder))
        for mutant in mutants:
            if mutant.key not in known:
                known[mutant.key] = killer(copy, mutant, mirror_alone=asked.mirror, workers=asked.workers)
                with asked.results.open("a") as file:
                    file.write(json.dumps({"mutant": mutant.key, "killer": known[mutant.key]}) + "\n")
            print(f"{known[mutant.key]:16} {mutant.key}", flush=True)
    counts = Counter(known[mutant.key] for mutant in mutants)
    in_default = sum(n for what, n in counts.items() if what.startswith("default"))
    print(
        f"{len(mutants)} mutants: {in_default} die in default, {len(mutants) - counts['nothing']} in full; {dict(counts)}"
    )


if __name__ == "__main__":
    main()
