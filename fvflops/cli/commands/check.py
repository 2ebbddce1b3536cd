"""`fvflops check`: compare a model with its budget, or update the budget."""

from __future__ import annotations

import argparse

from fvflops import paths
from fvflops.cli import shared_options
from fvflops.cli.argument_values import parse_depth
from fvflops.cli.open_analysis import open_analysis
from fvflops.cli.outputs import write_report
from fvflops.cli.parser import add_options
from fvflops.comparison.budget_file import Budget, find_budget, load_budgets
from fvflops.comparison.model_budget import budget_report, check_budget, render_markdown, rewrite_budget, update_report
from fvflops.formulas import load_table

EXAMPLES = (
    "fvflops check zoo:resnet50 --budget budget.yaml --update",
    "fvflops check zoo:resnet50 --budget budget.yaml",
)
FIRST = ("--budget", "--update", "--name", "--batch", "--format")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser, None, note="the budget's, else default")
    shared_options.add_model(parser)
    shared_options.add_run(parser)
    shared_options.add_trace_only(parser)
    shared_options.add_backward(parser)
    add_options(
        parser,
        """
        budget:
        --budget FILE  YAML file with the budgets of models
        --name NAME  the model's name in the file; default: MODEL
        --update  write the model's costs into the file
        --depth N  with --update: also write FLOPs budgets of modules down to this level
        --summary FILE  append the result to a file in Markdown, such as $GITHUB_STEP_SUMMARY
        """,
        required={"budget": True},
        type={"depth": parse_depth},
    )
    shared_options.add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare a model with its budget, or update it; return 1 where the model is not within its budget, else 0."""
    if arguments.depth is not None and not arguments.update:
        raise ValueError("--depth applies to --update only: add --update")
    name = arguments.name or arguments.model
    exists = paths.exists(arguments.budget)
    if not exists and not arguments.update:
        raise ValueError(f"there is no budget file {arguments.budget!r}: --update creates it")
    budgets = load_budgets(arguments.budget) if exists else {}
    budget = budgets.get(name) if arguments.update else find_budget(budgets, name, arguments.budget)
    table_name = _choose_table(arguments.table, budget)
    table = load_table(table_name)
    if arguments.update:
        paths.check_writable(arguments.budget)
    analysis = open_analysis(arguments.model, arguments, table)
    if arguments.update:
        path, depth = arguments.budget, arguments.depth
        changes = rewrite_budget(path, analysis, budget, name=name, table=arguments.table, depth=depth)
        write_report(update_report(path, name, changes, added=budget is None), arguments)
        budget = load_budgets(path)[name]
    assert budget is not None  # find_budget raises without one, and rewrite_budget writes it
    result = check_budget(analysis, budget, table=table_name)
    if not arguments.update:
        write_report(budget_report(result), arguments)
    if arguments.summary is not None:
        paths.append_text(arguments.summary, render_markdown(result) + "\n\n")
    return 0 if result.passed else 1


def _choose_table(requested: str | None, budget: Budget | None) -> str:
    if budget is None:
        return requested or "default"
    budget_table = budget.table or "default"
    if requested not in (None, budget_table):
        raise ValueError(
            f"must be {budget_table}, as in the budget of {budget.name}; got {requested!r}: change `table:` in the "
            "file, or use another --name"
        )
    return budget_table
