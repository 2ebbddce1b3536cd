"""The public interface: names, signatures, methods and first lines of docstrings."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from typing import Any

from goldens.jobs import Folder, Job

# Modules whose paths are public too.
_MODULES = (
    "fvflops",
    "fvflops.zoo",
    "fvflops.integrations.accelerate",
    "fvflops.integrations.lightning",
    "fvflops.integrations.transformers",
    "fvflops.integrations.pytest_plugin",
    "fvflops.reports.count_json",
    "fvflops.reports.html",
    "fvflops.devices.utilisation",
)


def jobs() -> list[Job]:
    """Return the job."""
    return [Job("api", _write)]


def _write(folder: Folder) -> None:
    for name in _MODULES:
        try:
            module: Any = importlib.import_module(name)
        except ImportError as error:
            folder.write(f"{name}.txt", f"ImportError: {error}")
            continue
        names = sorted(getattr(module, "__all__", ()) or _own_names(module))
        lines = [f"{name}: {_summary(module)}", f"__all__ {list(getattr(module, '__all__', ()))}", ""]
        for public in names:
            lines += [*_describe(public, getattr(module, public)), ""]
        folder.write(f"{name}.txt", "\n".join(lines))


def _own_names(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _describe(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__mro__[1:-1])
        lines = [f"class {name}({bases}){_signature(value)}: {_summary(value)}"]
        if dataclasses.is_dataclass(value):
            lines += [f"  field {field.name}: {field.type}" for field in dataclasses.fields(value)]
        if issubclass(value, tuple) and hasattr(value, "_fields"):
            lines += [f"  field {field}" for field in value._fields]
        if issubclass(value, enum.Enum):
            lines += [f"  member {member.name} = {member.value!r}" for member in value]
        return [*lines, *_describe_members(value)]
    if callable(value):
        return [f"def {name}{_signature(value)}: {_summary(value)}"]
    return [f"{name}: {type(value).__name__}"]


def _describe_members(value: type) -> list[str]:
    own = {
        name: member
        for base in reversed(value.__mro__)
        if base.__module__.partition(".")[0] == "fvflops"
        for name, member in vars(base).items()
        if not name.startswith("_")
    }
    lines = []
    for name, member in sorted(own.items()):
        if isinstance(member, (staticmethod, classmethod)):
            kind = type(member).__name__
            lines.append(f"  {kind} {name}{_signature(getattr(value, name))}: {_summary(getattr(value, name))}")
        elif isinstance(member, property):
            lines.append(f"  property {name}: {_summary(member)}")
        elif inspect.isfunction(member):
            lines.append(f"  def {name}{_signature(member)}: {_summary(member)}")
    return lines


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"


def _summary(value: Any) -> str:
    return (inspect.getdoc(value) or "").strip().partition("\n")[0]
