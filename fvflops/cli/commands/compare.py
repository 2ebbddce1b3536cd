"""`fvflops compare`: one model in several conventions, and why they differ."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

from fvflops.cli.commands.count import parse_assumptions, with_input_hint, write
from fvflops.cli.models import load_model
from fvflops.features.conventions import report
from fvflops.features.conventions.compare import compare
from fvflops.features.conventions.model import Comparison

FORMATS = ("text", "json")


def run(arguments: argparse.Namespace) -> int:
    """Compare the conventions that the arguments name on a model and write the report; return the exit code."""
    if arguments.format not in FORMATS:
        raise ValueError(f"compare writes {' or '.join(FORMATS)}, not {arguments.format!r}")
    names = [name for name in (arguments.tables or "").split(",") if name]
    if arguments.tables is not None and not names:
        raise ValueError(f"--tables {arguments.tables!r} names no convention: write default,fvcore,torch")
    subject = load_model(arguments.model, arguments.input, config=arguments.config, device=arguments.device)
    subject.model.train(arguments.train)
    # The reference comes first, and once.
    tables = list(dict.fromkeys([arguments.table, *names])) if names else ()
    compared = with_input_hint(
        subject,
        lambda: compare(
            subject.model,
            subject.inputs,
            kwargs=subject.kwargs,
            tables=tables,
            execution=arguments.execution,
            assume=parse_assumptions(arguments.assume),
        ),
    )
    compared = replace(compared, subject=f"{arguments.model} on {compared.subject}")
    against = arguments.table if arguments.table in compared.tallies else next(iter(compared.tallies))
    text = _to_json(compared) if arguments.format == "json" else report.render(compared, against=against)
    write(text, arguments.output)
    return 0


def _to_json(comparison: Comparison) -> str:
    return json.dumps(
        {
            "subject": comparison.subject,
            "conventions": {
                name: {**asdict(tally), "total": tally.total} for name, tally in comparison.tallies.items()
            },
            "differences": [
                {"from": first, "to": second, "reasons": [asdict(reason) for reason in reasons]}
                for (first, second), reasons in comparison.differences.items()
            ],
        },
        indent=2,
    )
