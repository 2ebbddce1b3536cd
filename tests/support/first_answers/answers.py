"""Answer one case: its result, and all that was said meanwhile."""

import importlib
import io
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch

KINDS = ("ops", "layers", "higher_order", "transforms", "instruments", "restores", "features", "sources", "commands")
# What libraries say once per process, whoever calls them.
SAID_ONCE = ("flex_attention called without torch.compile()", "Failed to load ", "Unable to import `torchao` ")
Case = Callable[[], Any]


def find_case(name: str) -> Case:
    """Return the case "kind: name"; only the module of its kind is imported."""
    kind, _, rest = name.partition(": ")
    return cases_of(kind)[rest]


def cases_of(kind: str) -> dict[str, Case]:
    module = importlib.import_module(f"tests.support.first_answers.{kind}")
    found = module.CASES
    return found


def answer(name: str) -> dict[str, Any]:
    """Run a case in an empty folder, and return what it returned or raised, printed, logged and warned of."""
    case = find_case(name)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.set_warn_always(True)  # what torch's kernels say once per process
    logs = []
    out, err = io.StringIO(), io.StringIO()
    with (
        _empty_folder(),
        _logged(logs),
        warnings.catch_warnings(record=True) as warned,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        warnings.simplefilter("always")
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)  # as Python does by default
        try:
            result = {"returned": case()}
        except Exception as error:
            result = {"raised": f"{type(error).__name__}: {error}", "notes": getattr(error, "__notes__", [])}
    said = {
        "printed": out.getvalue(),
        "errors": [line for line in err.getvalue().splitlines() if not line.startswith(SAID_ONCE)],
        "logged": logs,
        "warned": [
            f"{item.category.__name__}: {item.message}"
            for item in warned
            if not str(item.message).startswith(SAID_ONCE)
        ],
    }
    return json.loads(json.dumps({**result, **said}))


@contextmanager
def _empty_folder():
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@contextmanager
def _logged(messages: list[str]) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname} {record.getMessage()}")  # type: ignore
    logger = logging.getLogger("fvflops")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Yield where two answers differ, and how."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in dict.fromkeys([*left, *right]):
            yield from differences(left.get(key), right.get(key), f"{path}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif left != right:
        yield f"{path}: {str(left)[:2000]!r} / {str(right)[:2000]!r}"
