"""Faults put into mha's own code: none may become a verdict of `mha check` about the user's code,
nor a pass or a layer that is missing in the results of `inspecting`, `removed` and `effects`.

Each function of some packages can raise when it is entered. The functions are
changed as syntax trees when they are imported, so that generators, properties and what torch calls
count too. An examination runs in a fork of this process, which has imported everything already.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import random
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "mhacli.commands.check",
    "mhacli.commands.effect",
    "mhacli.models",
    "mhacli.usercode",
)
EXCEPTIONS: Mapping[str, type[Exception]] = {"TypeError": TypeError, "KeyError": KeyError}
GUARDS = (
    "usercode.door.ours.wrapped.guarded",
    "models.capture.Watch.__torch_function__",
    "models.passes._Passes.leave",
    "models.passes._function",
    "models.inspecting._numbers",
)
"""Functions that are left out: what keeps a fault of mha inside of a call cannot keep its own, and
what reads an argument refuses it by raising."""
PATIENCE_S = 300
"""Seconds after which an examination counts as hanging."""
_HOOK = "mha_fault_enters"
"""The name under which the changed functions find the function that raises."""
_ZOO = "tests/contract/check/zoo"
_WIDTHS = ("--arg", "d_model=24", "--arg", "n_heads=3")
TARGETS: Mapping[str, tuple[str, ...]] = {
    "right": (f"{_ZOO}/known.py:MultiHeadedAttention", "--arg", "h=3", "--arg", "d_model=24"),
    "wrong": ("sample_texts/my_attention.py:MultiHeadAttention", *_WIDTHS),
    "model": (f"{_ZOO}/models.py:GPT",),
    "leaking model": ("sample_texts/my_gpt.py:GPT",),
    "cached": (f"{_ZOO}/cached.py:HubAttention",),
    "refused": (f"{_ZOO}/odd.py:NoAttention",),
    "swallowing": ("tests/contract/check/cases/faults/swallowing.py:Swallowing",),
    "example": (
        "sample_texts/my_gpt.py:GPT",
        "--example",
        "lambda m, T: m(torch.randint(65, (2, T)))",
    ),
    "against": (
        "sample_texts/my_attention.py:MultiHeadAttention",
        *_WIDTHS,
        "--against",
        "torch.nn:MultiheadAttention",
    ),
    "translation": (f"{_ZOO}/models.py:Translation",),
    "not callable": ("tests/contract/check/cases/faults/demanding.py:Demanding",),
    "checkpoint": ("tests/contract/check/cases/faults/checkpoint.py:tiny_gpt2",),
    "padded": (f"{_ZOO}/models.py:Padded",),
}
"""Targets and options of `mha check`. `swallowing` has `except Exception: pass` around its call of
torch."""
IN_MEMORY = ("inspecting", "removed", "effects")
"""What users call with a model of theirs, which here goes on whatever its attention raises."""


class Fault(NamedTuple):
    """An exception that a function raises while a target is examined."""

    function: str
    exception: str
    target: str


class Outcome(NamedTuple):
    """What an examination gave: `internal` for an internal error, else all that is a verdict."""

    exit_code: int
    words: str


INTERNAL = Outcome(1, "internal error")


# ------------------------------------------------------------------------- functions that can raise


_FUNCTIONS: list[str] = []
"""All functions that can raise."""
_REACHED: set[str] = set()
"""Those that were entered."""
_RAISING: dict[str, type[Exception]] = {}
"""The function that raises when it is entered, and what; nothing without a fault."""


def _enters(function: str) -> type[Exception] | None:
    """What a function that is entered must raise."""
    _REACHED.add(function)
    return _RAISING.get(function)


class _Entering(ast.NodeTransformer):
    """Puts a call of the hook before the first statement of each function."""

    def __init__(self, module: str) -> None:
        self.names = [module.removeprefix("mhacli.")]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self._inside(node)
        function = ".".join([*self.names, node.name])
        _FUNCTIONS.append(function)
        # the function itself raises: a line of the tests would look like one of the user's
        code = f"if mha_fault := {_HOOK}({function!r}): raise mha_fault('injected')"
        call = ast.parse(code).body
        has_words = ast.get_docstring(node, clean=False) is not None
        first = node.body[0]
        for part in ast.walk(call[0]):
            ast.copy_location(part, first)
        node.body[int(has_words) : int(has_words)] = call
        return node

    def _inside(self, node: Any) -> Any:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Imports a module whose functions call the hook."""

    def get_code(self, fullname: str) -> Any:
        tree = ast.parse(self.get_data(self.path), self.path)
        _Entering(fullname).visit(tree)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the packages whose functions can raise."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        loader = _Loader(fullname, spec.origin)
        return importlib.util.spec_from_file_location(
            fullname,
            spec.origin,
            loader=loader,
            submodule_search_locations=spec.submodule_search_locations,
        )


def load() -> list[str]:
    """Imports mha with functions that can raise, and all that an examination imports; the names of
    the functions. Call it once, before anything of mha is imported.
    """
    setattr(builtins, _HOOK, _enters)
    sys.meta_path.insert(0, _Finder())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("torch", "mhacli.cli.app", *PACKAGES):
        importlib.import_module(name)
    for name in PACKAGES:
        for module in pkgutil.walk_packages(sys.modules[name].__path__, f"{name}."):
            importlib.import_module(module.name)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    sys.modules["mhacli.usercode.process"].run_in_child = _run_here
    return sorted(_FUNCTIONS)


def _run_here(job: str, request: Mapping[str, Any], **_: Any) -> tuple[Any, str]:
    """The job of a child process in this one: its document as JSON gives it, or its error."""
    process = sys.modules["mhacli.usercode.process"]
    module, _, name = job.partition(":")
    try:
        run = getattr(importlib.import_module(module), name)
        document = run(json.loads(json.dumps(request)), process.no_stage)
    except BaseException as fault:
        raise process._as_error(fault, "examining") from fault
    return json.loads(json.dumps(document)), ""


# ------------------------------------------------------------------------------------- examinations


def _in_memory(name: str) -> Outcome:
    """The outcome of a function of Python over a model that swallows exceptions."""
    import torch
    from torch import nn

    import mhacli

    torch.manual_seed(1)
    of_file: dict[str, Any] = {}
    exec((ROOT / TARGETS["swallowing"][0].partition(":")[0]).read_text(), of_file)
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(20, 24))
    model.add_module("attention", of_file["Swallowing"]())
    model.eval()
    ids = torch.arange(5)[None]
    try:
        if name == "inspecting":
            with mhacli.inspecting(model) as seen:
                model(ids)
            results: Any = [(layer.name, layer.verified) for layer in seen.record.layers]
        elif name == "removed":
            with mhacli.removed(model, heads=[(0, 1)], edges=[(0, 0, 3, 1)]):
                results = model(ids).tolist()
        else:
            record = mhacli.effects(model, ids, edges=True, metric=lambda out: out[0, -1].sum())
            results = [len(record.effects), record.self_check.ok]
    except mhacli.MhaError as fault:
        return Outcome(1, str(fault))
    except Exception as fault:
        return INTERNAL if "injected" in str(fault) else Outcome(1, repr(fault))
    return Outcome(0, json.dumps(results))


def _outcome(target: str) -> Outcome:
    """The outcome of `mha check TARGET --json` in this process, which ends soon."""
    if target in IN_MEMORY:
        return _in_memory(target)
    with (
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryDirectory() as folder,
    ):
        page = f"{folder}/report.html"  # which draws the view
        sys.argv[:] = ["mha", "check", *TARGETS[target], "--json", "--html", page]
        os.dup2(printed.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        code = sys.modules["mhacli.cli.app"].main()
        sys.stdout.flush()
        sys.stderr.flush()
        printed.seek(0)
        errors.seek(0)
        text, messages = printed.read(), errors.read().splitlines()
    errors_said = [json.loads(line)["error"] for line in messages if line.startswith(b'{"error"')]
    if code == 1 and any("this is a bug of mha" in (error["hint"] or "") for error in errors_said):
        return INTERNAL
    if not text:
        return Outcome(code, errors_said[-1]["code"])
    document = json.loads(text)
    words = {
        "verdict": document["verdict"],
        "findings": sorted(finding["code"] for finding in document["findings"]),
        "behaviour": {answer["name"]: answer["ok"] for answer in document["behaviour"]},
        "inside": [part["verdict"] for part in document["inside"]],
    }
    return Outcome(code, json.dumps(words))


def _in_fork(job: Callable[[], object]) -> tuple[int, int]:
    """A fork that writes what a job gives as JSON: its process and the end to read from."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return process, read
    errors = os.dup(2)
    try:
        os.close(read)
        signal.alarm(PATIENCE_S)
        answer = json.dumps(job()).encode()
        with open(write, "wb") as file:
            file.write(answer)
    except BaseException:
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(0)


def outcomes(jobs: Sequence[Callable[[], object]], *, n_workers: int) -> Iterator[tuple[int, Any]]:
    """What each job gives in a fork of its own, with its number, as soon as it is known; None for
    a fork that died.
    """
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, tuple[int, int, bytearray]] = {}
    while waiting or running:
        while waiting and len(running) < n_workers:
            number, job = waiting.pop()
            process, end = _in_fork(job)
            running[end] = (number, process, bytearray())
        for end in select.select([*running], [], [])[0]:
            number, process, answer = running[end]
            if chunk := os.read(end, 1 << 16):
                answer += chunk
                continue
            os.close(end)
            os.waitpid(process, 0)
            del running[end]
            yield number, json.loads(answer) if answer else None


def baseline(target: str) -> tuple[int, str, list[str]]:
    """The outcome without a fault, and the functions that it enters."""
    _REACHED.clear()
    return (*_outcome(target), sorted(_REACHED))


def with_fault(fault: Fault) -> tuple[int, str]:
    """The outcome with a fault."""
    _RAISING[fault.function] = EXCEPTIONS[fault.exception]
    return tuple(_outcome(fault.target))


class Report(NamedTuple):
    """Which functions were reached, and the faults that became something else than an internal
    error, with what came and what comes without the fault.
    """

    n_tried: int
    unreached: list[str]
    wrong: list[tuple[Fault, Outcome, Outcome]]


def report(
    names: Sequence[str] = (*TARGETS, *IN_MEMORY),
    *,
    n: int | None = None,
    seed: int = 1,
    n_workers: int = 2,
    log: Path | None = None,
) -> Report:
    """Tries all faults on some targets, or a sample of n of those in functions that are reached.

    With a log, each outcome is written to it as a line, and what it has already is not tried again:
    all faults take hours.
    """
    functions = load()
    jobs: list[Callable[[], object]] = [lambda name=name: baseline(name) for name in names]
    known: dict[str, Outcome] = {}
    reached: dict[str, list[str]] = {}
    for number, answer in outcomes(jobs, n_workers=n_workers):
        code, words, entered = answer
        known[names[number]], reached[names[number]] = Outcome(code, words), entered
    faults = [
        Fault(function, exception, target)
        for target in names
        for function in reached[target]
        if function not in GUARDS
        for exception in EXCEPTIONS
    ]
    # all of them in random order too: what a run that was broken off has tried is a sample
    faults = random.Random(seed).sample(faults, len(faults) if n is None else n)
    tried = _logged(log)
    left = [fault for fault in faults if fault not in tried]
    jobs = [lambda fault=fault: with_fault(fault) for fault in left]
    for number, answer in outcomes(jobs, n_workers=n_workers):
        outcome = Outcome(*answer) if answer is not None else Outcome(-1, "the process died")
        tried[left[number]] = outcome
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps([left[number], outcome]) + "\n")
    wrong = [
        (fault, tried[fault], known[fault.target])
        for fault in faults
        if tried[fault] not in (INTERNAL, known[fault.target])
    ]
    entered = set().union(*reached.values())
    unreached = [function for function in functions if function not in entered]
    return Report(len(faults), unreached, wrong)


def _logged(log: Path | None) -> dict[Fault, Outcome]:
    """The outcomes in a log."""
    if log is None or not log.exists():
        return {}
    lines = map(json.loads, log.read_text().splitlines())
    return {Fault(*fault): Outcome(*outcome) for fault, outcome in lines}


def main(words: Sequence[str] | None = None) -> int:
    """Prints the faults that became something else than an internal error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="how many faults (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-memory", action="store_true", help="only what is called in Python")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log", type=Path, help="a file of outcomes, from which a run goes on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    names = IN_MEMORY if options.in_memory else (*TARGETS, *IN_MEMORY)
    result = report(
        names,
        n=options.sample,
        seed=options.seed,
        n_workers=options.workers,
        log=options.log and options.log.absolute(),
    )
    if options.json:
        print(json.dumps(result._asdict()))
        return 0
    for fault, outcome, expected in result.wrong:
        print(f"{fault.exception} in {fault.function}, target {fault.target}:")
        print(f"    gave     {outcome.exit_code} {outcome.words}")
        print(f"    expected {expected.exit_code} {expected.words}, or an internal error")
    n, n_unreached = len(_FUNCTIONS), len(result.unreached)
    print(f"{result.n_tried} faults in {n - n_unreached} of {n} functions, on {len(names)} targets")
    print(f"{len(result.wrong)} became something else than an internal error")
    print(f"not reached: {', '.join(result.unreached)}")
    return int(bool(result.wrong))


if __name__ == "__main__":
    sys.exit(main())
