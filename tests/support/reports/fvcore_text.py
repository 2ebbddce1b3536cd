"""The text of fvcore as it asks tabulate for it, whichever tabulate is installed."""

import importlib
import inspect
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import tabulate

TAKES_OPTION = "preserve_whitespace" in inspect.signature(tabulate.tabulate).parameters


def print_as_fvcore(function, *args, **kwargs) -> str:
    """Return what a function of fvcore prints, with the indentation that it asks for.

    fvcore asks through a setting of tabulate that tabulate 0.10 no longer obeys: there it is given one that does.
    """
    if not TAKES_OPTION:
        return function(*args, **kwargs)
    obeying = SimpleNamespace(tabulate=partial(tabulate.tabulate, preserve_whitespace=True), PRESERVE_WHITESPACE=False)
    module = importlib.import_module(function.__module__)
    with patch.object(module, "tabulate", obeying):
        return function(*args, **kwargs)
