"""Explain why shape execution cannot run an op; torch's own messages describe its internals."""

from __future__ import annotations

_NO_MEMORY = "it reads a tensor's memory, which shape execution does not have"
_NO_RULE = "torch cannot infer its result without values"
# Part of a message → the reason.
_REASONS = {
    "data is not allocated yet": _NO_MEMORY,
    "Cannot access data pointer": _NO_MEMORY,
    "Cannot access storage": _NO_MEMORY,
    "Attempted to set the storage": _NO_MEMORY,
    "ShapeStorage": _NO_MEMORY,
    "no fake impl": _NO_RULE,
    "could not find the fake impl": _NO_RULE,
    "Meta tensors": _NO_RULE,
    "'Meta' backend": _NO_RULE,
    "INTERNAL ASSERT FAILED": _NO_RULE,
}


def find_reason(error: BaseException) -> str:
    """Return why shape execution cannot run code that raised an error, "" if the error may be the model's own.

    >>> find_reason(RuntimeError("x INTERNAL ASSERT FAILED at y, please report a bug to PyTorch"))
    'torch cannot infer its result without values'
    """
    return next((reason for part, reason in _REASONS.items() if part in str(error)), "")


def describe_failure(error: BaseException) -> str:
    """Return the reason for a failure in one line, or else the type and message of the error.

    >>> describe_failure(ValueError("no\\nsuch scale"))
    'ValueError: no'
    """
    if reason := find_reason(error):
        return reason
    text = str(error).strip().partition("\n")[0]
    if type(error).__module__.startswith("fvflops") and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
