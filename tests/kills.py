"""How many small mistakes in the package its tests notice. No test: it takes hours.

    python tests/kills.py [--mutants 60] [--seed 1] [--checkout DIR] [--folder DIR] [-- WORDS OF
    PYTEST]

A seeded sample of mutants is taken from the checkout, in turn one of each package below `mhacli`:
an operator, a constant, two arguments, a `not` or a statement is another or gone. Each is put into
a copy, and the tests run there until one fails. `results.jsonl` in the folder gets a line as soon
as a mutant is judged; a later call goes on from there.
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
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 1800
"""Seconds after which a mutant counts as noticed, since it hangs."""
OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.And: "or",
    ast.Or: "and",
}


class Mutant(NamedTuple):
    """A file with one part of its bytes replaced."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


# -------------------------------------------------------------------------------------- the mutants


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """All that can be made of a file."""
    text = path.read_bytes()
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    made = []
    for node, after in _changes(ast.parse(text)):
        start, end = (
            begins[node.lineno - 1] + node.col_offset,
            begins[node.end_lineno - 1] + node.end_col_offset,
        )
        before = text[start:end].decode()
        if before != after:
            made.append(Mutant(str(path.relative_to(root)), node.lineno, start, end, before, after))
    return made


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes in functions that can be replaced, each with its replacement."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield (
                node,
                (
                    f"{_in_brackets(node.left)} {OTHER[type(node.ops[0])]}"
                    f" {_in_brackets(node.comparators[0])}"
                ),
            )
        elif isinstance(node, ast.BinOp) and type(node.op) in OTHER and not _has_text(node):
            yield (
                node,
                f"({_in_brackets(node.left)} {OTHER[type(node.op)]} {_in_brackets(node.right)})",
            )
        elif isinstance(node, ast.BoolOp):
            yield node, "(" + f" {OTHER[type(node.op)]} ".join(map(_in_brackets, node.values)) + ")"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, _in_brackets(node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, str(node.value + 1)
        elif (
            isinstance(node, ast.Call)
            and len(node.args) >= 2
            and not any(isinstance(a, ast.Starred) for a in node.args)
        ):
            first, second, *others = node.args
            yield node, ast.unparse(ast.Call(node.func, [second, first, *others], node.keywords))
        elif isinstance(node, (ast.AugAssign, ast.Raise)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield node, "pass"


def _code(tree: ast.AST, *, in_function: bool = False) -> Iterator[ast.AST]:
    """Every node of a function but annotations and f-strings."""
    inside = in_function or isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef))
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params", "decorator_list", "args"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
                if inside:
                    yield node
                yield from _code(node, in_function=inside)


def _in_brackets(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _has_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", 0), str)
        for part in ast.walk(node)
    )


def sample(root: Path, n: int, seed: int) -> list[Mutant]:
    """n mutants, in turn one of each package below `mhacli`."""
    dice = random.Random(seed)
    packages: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(root.glob("mhacli/*/**/*.py")):
        packages[path.relative_to(root).parts[1]].append(path)
    taken: list[Mutant] = []
    while len(taken) < n:
        for package in sorted(packages):
            made = mutants_of(dice.choice(packages[package]), root)
            taken += [dice.choice(made)] if made else []
    return taken[:n]


# ----------------------------------------------------------------------------------------- the runs


def made_copy(checkout: Path, copy: Path) -> None:
    """A copy of the checkout with a Python that takes the package from there and everything else
    from here.
    """
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(checkout, copy, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    (packages,) = (copy / ".venv").glob("lib/*/site-packages")
    lines = [
        str(copy),
        *(f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()),
    ]
    (packages / "copy.pth").write_text("\n".join(lines) + "\n")
    mha = copy / ".venv" / "bin" / "mha"
    mha.write_text(f"#!{copy}/.venv/bin/python\nfrom mhacli.__main__ import main\n\nmain()\n")
    mha.chmod(0o755)


def pytest(copy: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a copy until one fails."""
    command = [
        f"{copy}/.venv/bin/python",
        "-m",
        "pytest",
        "-qq",
        "-x",
        "-p",
        "no:cacheprovider",
        *words,
    ]
    environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis")}
    return subprocess.run(
        command,
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )


def replace(path: Path, content: bytes) -> None:
    """Writes a source file, whose compiled form is not used again."""
    path.write_bytes(content)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def judged(checkout: Path, copy: Path, mutant: Mutant, words: list[str]) -> str:
    """`killed` if a test fails or does not end, or `survived`."""
    path, original = copy / mutant.path, (checkout / mutant.path).read_bytes()
    replace(path, original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    try:
        done = pytest(copy, words)
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        replace(path, original)
    if done.returncode not in (0, 1, 2, 4):
        raise SystemExit(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        "survived"
        if done.returncode == 0
        else f"killed by {failed[0][:160] if failed else 'the import'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument(
        "--folder", type=Path, default=Path("kills"), help="for the copy and the results"
    )
    parser.add_argument("words", nargs="*", help="for pytest")
    options = parser.parse_args()
    folder = options.folder.resolve()
    copy, results = folder / "copy", folder / "results.jsonl"
    folder.mkdir(exist_ok=True)
    if not copy.exists():
        made_copy(options.checkout, copy)
    if pytest(copy, options.words).returncode:
        raise SystemExit("the tests fail without a mutant")
    known = (
        {entry["mutant"]: entry["result"] for entry in map(json.loads, results.open())}
        if results.exists()
        else {}
    )
    mutants = sample(options.checkout, options.mutants, options.seed)
    for mutant in mutants:
        if mutant.key not in known:
            known[mutant.key] = judged(options.checkout, copy, mutant, options.words)
            with results.open("a") as file:
                file.write(json.dumps({"mutant": mutant.key, "result": known[mutant.key]}) + "\n")
        print(f"{known[mutant.key]:14}  {mutant.key}", flush=True)
    n_killed = sum(known[mutant.key].startswith("killed") for mutant in mutants)
    print(f"{len(mutants)} mutants: {n_killed} killed")


if __name__ == "__main__":
    main()
