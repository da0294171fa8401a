"""How many small mistakes in the package its tests notice. No test: a set takes an hour or more.

    python tests/kills.py --set first [--tier folders] [--checkout DIR] [--folder DIR]
    python tests/kills.py --set first --seed 43 --mutants 30 [--checkout DIR]
    python tests/kills.py --faults

The mutants are in `mutants.json` beside this file. Each is found by the syntax tree, so that it
survives formatting and moving within its function.

The first line puts each mutant of a set into a copy of the checkout and runs the tests that belong
to its file (`TESTS`) until one fails. If none does, all other tests that `pytest` runs follow.
`results.jsonl` in the folder gets a line as soon as a mutant is judged; a later call goes on from
there. The exit code is 1 if the code that a mutant replaces is gone.

The second line draws mutants of the checkout and adds them to a set, until it has as many of that
seed. A mutant that nobody can notice gets the field `struck` with the reason: it is neither run nor
counted, and the second line draws another.

The third line is the fault test (`support/faults.py`): each function that examines, or runs inside
of a user's call, raises in turn, and no such fault of mha may become a verdict or a missing layer.
It takes hours too; CI tries a sample.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support import faults

DATA = Path(__file__).with_name("mutants.json")
ROOMS = (
    *("attention", "io", "layer", "models", "record", "render", "text", "usercode"),
    *("commands/check", "commands/diff", "commands/effect", "commands/scan", "commands/trace"),
)
"""The folders of `mhacli` of which mutants are drawn, in turn one of each."""
OTHERS = "others"
"""All other files, in a table."""
TESTS = {
    "attention": ("attend", "numbers"),
    "attention/core.py": ("attend", "numbers/test_trace.py"),
    "attention/devices.py": ("commands", "refusals/test_refusals.py"),
    "attention/layer.py": ("attend", "numbers"),
    "attention/masks.py": ("attend", "numbers"),
    "attention/mistakes.py": ("check",),
    "attention/stages.py": ("check",),
    "record/weights_file.py": ("numbers/test_weights.py", "refusals/test_damaged_files.py"),
    "cli": ("commands", "processes"),
    "conditions.py": ("text", "numbers/test_where.py"),
    "commands/check": ("check", "outside/test_check.py"),
    "commands/check/annotations.py": ("check/test_annotations.py", "plugin"),
    "commands/check/checkpoint.py": ("checkpoints/test_doctor.py",),
    "commands/check/in_pytest.py": ("plugin",),
    "commands/diff": ("diff",),
    "commands/effect": ("effects", "outside/inspect/test_effects.py"),
    "commands/scan": ("scan",),
    "commands/trace": ("check/test_own_trace.py", "numbers/test_trace.py"),
    "io": ("processes", "refusals"),
    "io/data.py": ("refusals", "text", "old"),
    "io/safetensors.py": ("numbers/test_weights.py", "refusals", "old"),
    "layer": ("numbers", "refusals/test_refusals.py"),
    "models": ("checkpoints", "outside/inspect"),
    "models/compare.py": ("diff",),
    "models/folder.py": ("checkpoints", "refusals/test_damaged_checkpoints.py", "outside/inspect"),
    "models/load.py": ("checkpoints", "refusals/test_damaged_checkpoints.py", "outside/inspect"),
    "models/places.py": ("diff",),
    "pytest_plugin.py": ("plugin",),
    "record": ("numbers", "views", "old", "commands/test_show.py"),
    "record/checks.py": ("diff/test_diff.py", "numbers", "checkpoints"),
    "record/corpus.py": ("scan",),
    "record/effect.py": ("effects",),
    "record/exports.py": ("views/test_notebook.py",),
    "record/given.py": ("outside/inspect/test_arrays.py", "commands/test_show.py"),
    "record/glossary.py": ("commands/test_explain.py", "views"),
    "record/storage.py": ("old", "refusals/test_damaged_files.py", "processes/test_saving.py"),
    "render": ("views", "commands/test_show.py", "refusals/test_hostile_text.py"),
    "render/checkpoint": ("views", "checkpoints/test_commands.py", "commands/test_show.py"),
    "render/checkpoint/effect.py": ("effects",),
    "text": ("text", "refusals/test_hostile_text.py", "numbers/test_where.py"),
    "text/align.py": ("text", "diff/test_diff.py"),
    "text/reading.py": ("text", "scan/test_corpora.py", "refusals"),
    "usercode": ("check", "outside/test_check.py"),
}
"""A folder or file of `mhacli`, and what tests it in `tests/contract`. The longest path counts."""
PATIENCE = 2
"""Tests that take so many times as long as all take without a mutant hang, and so notice it."""
TIERS = ("folders", "all")
"""The tests that belong to the file of a mutant; all others, for what survives these."""
ALL_TESTS = ("tests/golden", "tests/unit", "tests/contract")
"""First those that see most."""
NO_MUTANT = "no mutant"
FOR_FILES = ("TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY")
"""What names the folder of files that tests leave."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = (*FUNCTIONS, ast.ClassDef)
NO_CODE = ("annotation", "returns", "decorator_list")
"""The fields of a syntax tree in which nothing is drawn."""
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
)
OTHER: dict[type, Any] = {old: new for pair in PAIRS for old, new in (pair, pair[::-1])}
"""The operator that a drawn mutant has in place of another."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: in a function the `nth` expression or statement `old`, counted from 0, is `new`.

    The function `""` is the code outside of functions and classes. `seed` drew the mutant, if any.
    """

    set: str
    file: str
    function: str
    old: str
    new: str
    nth: int = 0
    why: str = ""
    seed: int | None = None
    struck: str | None = None

    @property
    def key(self) -> str:
        place = f"{self.file} {self.function or '-'}#{self.nth}"
        return f"{place}: {self.old} → {self.new}"


# ---------------------------------------------------------------------------- the mutants as data


def stored() -> list[Mutant]:
    """All mutants of `mutants.json`."""
    return [Mutant(**entry) for entry in json.loads(DATA.read_text())]


def store(mutants: list[Mutant]) -> None:
    """Writes `mutants.json`, without the fields that are as usual."""
    usual = {"nth": 0, "why": "", "seed": None, "struck": None}
    entries = [
        {name: value for name, value in asdict(mutant).items() if usual.get(name, ...) != value}
        for mutant in mutants
    ]
    DATA.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Place:
    """A node of a syntax tree, the function around it, and the field of its parent that has it."""

    function: str
    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None

    def put(self, nodes: Sequence[ast.AST]) -> None:
        """Puts other nodes there."""
        if self.index is None:
            setattr(self.parent, self.field, nodes[0])
        else:
            getattr(self.parent, self.field)[self.index : self.index + 1] = nodes


def places(tree: ast.AST, function: str = "") -> Iterator[Place]:
    """Every node below a node, in the order of the source."""
    for field, value in ast.iter_fields(tree):
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, ast.AST):
                yield Place(function, node, tree, field, index if isinstance(value, list) else None)
                name = node.name if isinstance(node, NAMED) else ""
                yield from places(node, ".".join(filter(None, [function, name])))


def equal_places(tree: ast.Module, function: str, wanted: ast.AST) -> list[Place]:
    """Where a function has an expression or a statement."""
    text = ast.unparse(wanted)
    return [
        place
        for place in places(tree)
        if type(place.node) is type(wanted)
        and (place.function == function or (function and place.function.startswith(f"{function}.")))
        and not isinstance(getattr(place.node, "ctx", None), (ast.Store, ast.Del))
        and ast.unparse(place.node) == text
    ]


def mutated(source: str, mutant: Mutant) -> str | None:
    """The source with the mistake; None where what the mistake replaces is gone."""
    tree = ast.parse(source)
    wanted, nodes = _parsed(mutant.old, mutant.new)
    found = equal_places(tree, mutant.function, wanted)
    if mutant.nth >= len(found):
        return None
    found[mutant.nth].put(nodes)
    return ast.unparse(tree)


def _parsed(old: str, new: str) -> tuple[ast.AST, Sequence[ast.AST]]:
    """What is replaced, and by what: expressions if both are, otherwise statements."""
    (wanted,), nodes = ast.parse(old).body, ast.parse(new).body
    values = [node.value for node in nodes if isinstance(node, ast.Expr)]
    if isinstance(wanted, ast.Expr) and len(values) == len(nodes):
        return wanted.value, values
    return wanted, nodes


# --------------------------------------------------------------------------- the mutants by chance


def drawn(checkout: Path, seed: int) -> Iterator[Mutant]:
    """Mutants without end, in turn one of each room."""
    dice = random.Random(seed)
    files = [sorted((checkout / "mhacli" / room).rglob("*.py")) for room in ROOMS]
    for paths in itertools.cycle(files):
        path = dice.choice(paths)
        tree = ast.parse(path.read_text())
        changes = [(place, new) for place in _code(tree) for new in _changes(place.node)]
        if changes:
            place, new = dice.choice(changes)
            equal = equal_places(tree, place.function, place.node)
            nth = next(n for n, other in enumerate(equal) if other.node is place.node)
            file, old = path.relative_to(checkout).as_posix(), ast.unparse(place.node)
            yield Mutant("", file, place.function, old, ast.unparse(new), nth, seed=seed)


def _code(tree: ast.Module) -> Iterator[Place]:
    """What functions do: all nodes in them but their arguments, annotations and f-strings."""
    closed = {
        id(node)
        for place in places(tree)
        if isinstance(place.node, (ast.arguments, ast.JoinedStr)) or place.field in NO_CODE
        for node in ast.walk(place.node)
    }
    functions = {id(p.node) for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for p in places(f)}
    return (place for place in places(tree) if id(place.node) in functions - closed)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may be in place of a node."""
    match node:
        case ast.Compare(left, [operator], others):
            yield ast.Compare(left, [OTHER[type(operator)]()], others)
        case ast.BinOp(left, operator, right) if type(operator) in OTHER and not _has_text(node):
            yield ast.BinOp(left, OTHER[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(OTHER[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Call(function, [first, second, *others], keywords) if not any(
            isinstance(argument, ast.Starred) for argument in node.args
        ):
            yield ast.Call(function, [second, first, *others], keywords)
        case ast.AugAssign() | ast.Raise() | ast.Expr(ast.Call()):
            yield ast.Pass()


def _has_text(node: ast.BinOp) -> bool:
    """Whether it joins text, which has no other operator."""
    return any(isinstance(part, ast.JoinedStr) or _is_text(part) for part in ast.walk(node))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def draw(name: str, seed: int, n: int, checkout: Path) -> None:
    """Adds mutants of a seed to a set, until it has n that are not struck, and stores them."""
    mutants = stored()
    known = {mutant.key for mutant in mutants}
    n -= sum(m.set == name and m.seed == seed and m.struck is None for m in mutants)
    for mutant in drawn(checkout, seed):
        if n <= 0:
            break
        if mutant.key not in known:
            print(mutant.key)
            known.add(mutant.key)
            mutants.append(replace(mutant, set=name))
            n -= 1
    store(mutants)


# ---------------------------------------------------------------------------------------- the runs


def made_copy(checkout: Path, copy: Path) -> None:
    """A copy of the checkout, with a Python that takes only the package from there."""
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(checkout, copy, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    (packages,) = (copy / ".venv").glob("lib/*/site-packages")
    others = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    (packages / "copy.pth").write_text("\n".join([str(copy), *others]) + "\n")
    mha = copy / ".venv" / "bin" / "mha"
    mha.write_text(f"#!{copy}/.venv/bin/python\nfrom mhacli.__main__ import main\n\nmain()\n")
    mha.chmod(0o755)


def write(path: Path, source: str) -> None:
    """Writes a source file, and removes its compiled form."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def tests_of(file: str) -> list[str]:
    """The folders and files of tests that belong to a file of the package."""
    path = file.removeprefix("mhacli/")
    fitting = (place for place in TESTS if path == place or path.startswith(f"{place}/"))
    return [f"tests/contract/{tests}" for tests in TESTS[max(fitting, key=len)]]


def words_of(tier: str, file: str) -> list[str]:
    """What pytest runs: the tests that belong to a file, or all others."""
    tests = tests_of(file)
    if tier == "all":
        return ["-n", "2", *ALL_TESTS, *(f"--ignore={path}" for path in tests)]
    is_small = len(tests) <= 2 and all(path.endswith(".py") for path in tests)
    return ["-n", "0" if is_small else "2", *tests]


def first_failure(copy: Path, words: list[str], limit_s: float | None = None) -> str | None:
    """The test that fails first in a copy; None if none does. At the limit what runs is ended."""
    temporary = copy.with_name("tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = [f"{copy}/.venv/bin/python", "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, "--tb=no", "-rfE", *words],
        cwd=copy,
        env={**os.environ, **dict.fromkeys(FOR_FILES, str(temporary))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "the time limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code = process.returncode
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(output)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        return failed[0].split(" ", 1)[1].split(" - ")[0]
    return f"pytest, which ends with {code}" if code else None


class Judge:
    """Puts mutants into a copy of a checkout, runs its tests, and keeps the results in a file."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout, self.copy, self.file = checkout, folder / "copy", folder / "results.jsonl"
        self.results: dict[tuple[str, str], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not self.copy.exists():
            made_copy(checkout, self.copy)
        for path in checkout.glob("mhacli/**/*.py"):  # a call that was killed may leave a mutant
            copied, source = self.copy / path.relative_to(checkout), path.read_text()
            if copied.read_text() != source:
                write(copied, source)
        if self.file.exists():
            for entry in map(json.loads, self.file.read_text().splitlines()):
                self.results[entry["tier"], entry["mutant"]] = entry

    def limit_s(self) -> float:
        """How long the tests of a mutant may take. Without a mutant all must pass."""
        known = self.results.get(("all", NO_MUTANT))
        if known is None or known["by"] is not None:
            known = self._note("all", NO_MUTANT, ["-n", "2", *ALL_TESTS], None)
        if known["by"] is not None:
            raise SystemExit(f"without a mutant fails {known['by']}")
        return PATIENCE * float(known["seconds"])

    def killer(self, tier: str, mutant: Mutant) -> str | None:
        """The test that notices a mutant; None if none does."""
        known = self.results.get((tier, mutant.key))
        if known is None:
            limit_s = self.limit_s()
            source = (self.checkout / mutant.file).read_text()
            mistaken = mutated(source, mutant)
            assert mistaken is not None
            write(self.copy / mutant.file, mistaken)
            try:
                known = self._note(tier, mutant.key, words_of(tier, mutant.file), limit_s)
            finally:
                write(self.copy / mutant.file, source)
            print(f"{mutant.key}\n    {tier}: {known['by'] or 'survived'}", flush=True)
        by: str | None = known["by"]
        return by

    def _note(self, tier: str, key: str, words: list[str], limit_s: float | None) -> dict[str, Any]:
        began = time.monotonic()
        by = first_failure(self.copy, words, limit_s)
        entry = {"tier": tier, "mutant": key, "by": by, "seconds": round(time.monotonic() - began)}
        with self.file.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.results[tier, key] = entry
        return entry


def judge(mutants: list[Mutant], tiers: tuple[str, ...], checkout: Path, folder: Path) -> int:
    """Judges mutants in one tier after the other. The exit code is 1 if the code of one is gone."""
    sources = {path: (checkout / path).read_text() for path in {mutant.file for mutant in mutants}}
    gone = [mutant for mutant in mutants if mutated(sources[mutant.file], mutant) is None]
    survivors = [mutant for mutant in mutants if mutant not in gone]
    caught: dict[str, list[Mutant]] = {}
    judge = Judge(checkout, folder)
    for tier in tiers:
        caught[tier] = [mutant for mutant in survivors if judge.killer(tier, mutant) is not None]
        survivors = [mutant for mutant in survivors if mutant not in caught[tier]]
    print_table({**caught, "survived": survivors})
    for title, those in (("survived", survivors), ("GONE from the code", gone)):
        for mutant in those:
            print(f"\n{title}: {mutant.key}\n    {mutant.why}")
    return 1 if gone else 0


def print_table(ends: dict[str, list[Mutant]]) -> None:
    """How many mutants of each room, and of all, ended in which way."""
    rooms = {end: [_room(mutant) for mutant in mutants] for end, mutants in ends.items()}
    print(f"\n{'':18}{'mutants':>10}" + "".join(f"{end:>10}" for end in ends))
    for room in (*ROOMS, OTHERS, "all"):
        counts = [len(those) if room == "all" else those.count(room) for those in rooms.values()]
        print(f"{room:18}{sum(counts):10}" + "".join(f"{count:10}" for count in counts))


def _room(mutant: Mutant) -> str:
    rooms = (room for room in ROOMS if mutant.file.startswith(f"mhacli/{room}/"))
    return next(rooms, OTHERS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--set", help="the mutants that are run, or added to")
    what.add_argument("--faults", action="store_true", help="run the fault test")
    parser.add_argument("--tier", choices=TIERS, default="all", help="the last tests that run")
    parser.add_argument("--seed", type=int, help="draw mutants, and run nothing")
    parser.add_argument("--mutants", type=int, default=30, help="how many of that seed")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("kills"),
        help="of the copy, the results and the log of faults",
    )
    options = parser.parse_args()
    if options.faults:
        options.folder.mkdir(exist_ok=True)
        return faults.main(["--log", f"{options.folder}/faults.jsonl"])
    if options.seed is not None:
        draw(options.set, options.seed, options.mutants, options.checkout)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is begun is undone
    mutants = [m for m in stored() if m.set == options.set and m.struck is None]
    tiers = TIERS[: TIERS.index(options.tier) + 1]
    return judge(mutants, tiers, options.checkout.resolve(), options.folder.resolve())


if __name__ == "__main__":
    sys.exit(main())
