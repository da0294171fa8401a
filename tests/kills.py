"""How many small mistakes in the package its tests notice. No test: it takes hours.

    python tests/kills.py [--mutants 60] [--seed 1] [--checkout DIR] [--folder DIR] [--limit 600] [-- WORDS OF PYTEST]

A seeded sample of mutants is taken from the checkout, in turn one of each package below `mhacli`: an operator, a constant, two
arguments, a `not` or a statement is another or gone. The tests run once in a copy in which each of these places reports which
test reaches it. Then each mutant is put into the copy, and the tests that reach it run until one fails, the most specific first.
`results.jsonl` in the folder gets a line as soon as a mutant is judged; a later call goes on from there.
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
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


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


# ------------------------------------------------------------------------------------------------------------ the mutants


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """All that can be made of a file."""
    text = path.read_bytes()
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    made = []
    for node, after in _changes(ast.parse(text)):
        start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        before = text[start:end].decode()
        if before != after:
            made.append(Mutant(str(path.relative_to(root)), node.lineno, start, end, before, after))
    return made


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes in functions that can be replaced, each with its replacement."""
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
    """Every node of a function but annotations and f-strings. Only there can a place report who reaches it."""
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
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", 0), str) for part in ast.walk(node))


def sample(root: Path, n: int, seed: int, left_out: list[str]) -> list[Mutant]:
    """n mutants, in turn one of each package below `mhacli`. Files whose path contains one of `left_out` give none."""
    dice = random.Random(seed)
    packages: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(root.glob("mhacli/*/**/*.py")):
        relative = str(path.relative_to(root))
        if not any(part in relative for part in left_out):
            packages[relative.split("/")[1]].append(path)
    taken: list[Mutant] = []
    while len(taken) < n:
        for package in sorted(packages):
            made = mutants_of(dice.choice(packages[package]), root)
            taken += [dice.choice(made)] if made else []
    return taken[:n]


# -------------------------------------------------------------------------------------------------- who reaches each place

PROBE = '''
import os

FOLDER = {folder!r}
current, seen = "", set()


def reached(mutant):
    """Writes down once that the current test reaches a place."""
    test = current or _test_of_ancestor()
    if (test, mutant) not in seen:
        seen.add((test, mutant))
        with open(os.path.join(FOLDER, "reached.txt"), "a") as file:
            file.write(f"{{mutant}}\\t{{test}}\\n")


def _test_of_ancestor():
    """The test that a process up the line of parents runs. A process that a test started has imported this module anew."""
    pid = os.getpid()
    while pid > 1:
        try:
            with open(os.path.join(FOLDER, f"test.{{pid}}")) as file:
                return file.read()
        except FileNotFoundError:
            with open(f"/proc/{{pid}}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
    return ""


def pytest_runtest_logstart(nodeid):
    global current
    current = nodeid
    with open(os.path.join(FOLDER, f"test.{{os.getpid()}}"), "w") as file:
        file.write(nodeid)


def pytest_runtest_protocol(item):
    pytest_runtest_logstart(item.nodeid)


def pytest_runtest_logreport(report):
    with open(os.path.join(FOLDER, "seconds.txt"), "a") as file:
        file.write(f"{{report.when}}\\t{{report.duration}}\\t{{report.nodeid}}\\n")
    if report.failed:
        with open(os.path.join(FOLDER, "failed.txt"), "a") as file:
            file.write(f"{{report.nodeid}}\\n")
'''


def instrumented(source: str, mutants: dict[int, Mutant]) -> str:
    """The source with a report before the statement that contains each mutant."""
    lines = source.encode().splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    reports: dict[int, list[str]] = defaultdict(list)
    for number, mutant in mutants.items():
        statement = min(
            (
                node
                for node in _bodies(ast.parse(source))
                if _span(node, begins)[0] <= mutant.start < _span(node, begins)[1]
            ),
            key=lambda node: _span(node, begins)[1] - _span(node, begins)[0],
        )
        indent = " " * statement.col_offset
        reports[statement.lineno - 1].append(f"{indent}__import__('mha_probe').reached({number})\n")
    out = []
    for place, line in enumerate(lines):
        out += reports[place] + [line.decode()]
    return "".join(out)


def _bodies(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements before which a line can be put."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, [])
            is_elif = (
                field == "orelse" and isinstance(node, ast.If) and len(block) == 1 and isinstance(block[0], ast.If)
            )
            if isinstance(block, list) and not is_elif and not isinstance(node, (ast.ClassDef, ast.Module)):
                yield from (part for part in block if isinstance(part, ast.stmt))


def _span(node: ast.stmt, begins: list[int]) -> tuple[int, int]:
    return begins[node.lineno - 1] + node.col_offset, begins[(node.end_lineno or node.lineno) - 1] + (
        node.end_col_offset or 0
    )


def reach(copy: Path, folder: Path, mutants: list[Mutant], words: list[str]) -> None:
    """Runs the tests once in the copy, with a report at each place, and restores it."""
    (copy / "mha_probe.py").write_text(PROBE.format(folder=str(folder)))
    by_file: dict[str, dict[int, Mutant]] = defaultdict(dict)
    for number, mutant in enumerate(mutants):
        by_file[mutant.path][number] = mutant
    originals = {path: (copy / path).read_text() for path in by_file}
    for path, of_file in by_file.items():
        (copy / path).write_text(instrumented(originals[path], of_file))
    done = pytest(copy, ["-p", "mha_probe", "-n", "2", *words], limit_s=4 * 3600)
    for path, text in originals.items():
        replace(copy / path, text.encode())
    print(done.stdout[-2000:], flush=True)
    (folder / "reach.done").write_text(done.stdout)


# ---------------------------------------------------------------------------------------------------------------- the runs


def made_copy(checkout: Path, copy: Path) -> None:
    """A copy of the checkout with a Python that takes the package from there and everything else from here."""
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(checkout, copy, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    (packages,) = (copy / ".venv").glob("lib/*/site-packages")
    lines = [str(copy), *(f"import site; site.addsitedir({place!r})" for place in site.getsitepackages())]
    (packages / "copy.pth").write_text("\n".join(lines) + "\n")
    mha = copy / ".venv" / "bin" / "mha"
    mha.write_text(f"#!{copy}/.venv/bin/python\nfrom mhacli.__main__ import main\n\nmain()\n")
    mha.chmod(0o755)


def pytest(copy: Path, words: list[str], *, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a copy."""
    command = [f"{copy}/.venv/bin/python", "-m", "pytest", "-qq", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis")}
    return subprocess.run(
        command,
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )


def replace(path: Path, content: bytes) -> None:
    """Writes a source file, whose compiled form is not used again."""
    path.write_bytes(content)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def judged(checkout: Path, folder: Path, mutant: Mutant, tests: list[str], words: list[str]) -> str:
    """`killed` if a test fails or does not end, `survived`, or `not reached`."""
    if not tests:
        return "not reached"
    copy, listed = folder / "copy", folder / "tests.txt"
    path, original = copy / mutant.path, (checkout / mutant.path).read_bytes()
    listed.write_text("\n".join(tests) + "\n")
    replace(path, original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    try:
        done = pytest(copy, ["-x", "-n", "0", *words, f"@{listed}"], limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        replace(path, original)
    if done.returncode not in (0, 1, 2, 4):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if done.returncode == 4 and "mhacli" not in done.stdout + done.stderr:
        raise SystemExit(f"no such tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "survived" if done.returncode == 0 else f"killed by {failed[0][:160] if failed else 'the import'}"


def tests_by_mutant(folder: Path, limit_s: float) -> dict[int, list[str]]:
    """The tests that reach each mutant and pass without it, quick ones first, as many as took `limit_s` in the run before."""
    failed = set((folder / "failed.txt").read_text().splitlines()) if (folder / "failed.txt").exists() else set()
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for line in (folder / "seconds.txt").read_text().splitlines():
        phase, duration, test = line.split("\t", 2)
        seconds[test][phase] = float(duration)
    reached: dict[int, set[str]] = defaultdict(set)
    for line in (folder / "reached.txt").read_text().splitlines():
        number, _, test = line.partition("\t")
        if test and test not in failed:
            reached[int(number)].add(test)
    chosen: dict[int, list[str]] = {}
    for number, tests in reached.items():
        spent, chosen[number] = 0.0, []
        for test in sorted(tests, key=lambda test: sum(seconds[test].values())):
            spent += sum(seconds[test].values())
            chosen[number] += [test] if spent <= limit_s else []
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--folder", type=Path, default=Path("kills"), help="for the copy and the results")
    parser.add_argument("--limit", type=float, default=600, help="seconds of tests for each mutant")
    parser.add_argument("--leave-out", action="append", default=[], help="a part of a path that gives no mutants")
    parser.add_argument("words", nargs="*", help="for pytest")
    options = parser.parse_args()
    folder = options.folder.resolve()
    copy, results = folder / "copy", folder / "results.jsonl"
    folder.mkdir(exist_ok=True)
    if not copy.exists():
        made_copy(options.checkout, copy)
    mutants = sample(options.checkout, options.mutants, options.seed, options.leave_out)
    if not (folder / "reach.done").exists():
        reach(copy, folder, mutants, options.words)
    known = {entry["mutant"]: entry["result"] for entry in map(json.loads, results.open())} if results.exists() else {}
    by_mutant = tests_by_mutant(folder, options.limit)
    for number in sorted(range(len(mutants)), key=lambda number: len(by_mutant.get(number, []))):
        mutant = mutants[number]
        if mutant.key not in known:
            known[mutant.key] = judged(options.checkout, folder, mutant, by_mutant.get(number, []), options.words)
            with results.open("a") as file:
                file.write(json.dumps({"mutant": mutant.key, "result": known[mutant.key]}) + "\n")
        print(f"{known[mutant.key]:14} {len(by_mutant.get(number, [])):5} tests  {mutant.key}", flush=True)
    n_killed = sum(known[mutant.key].startswith("killed") for mutant in mutants)
    print(f"{len(mutants)} mutants: {n_killed} killed")


if __name__ == "__main__":
    main()
