#!/usr/bin/env python3
"""Counts every model of a library and writes one CSV: tools/sweep.py timm|torchvision|transformers.

Each model is built on the meta device; one that needs values is built again with random weights, if they fit into
--memory. With --execution real each is built with random weights and run for real, on smaller inputs where it takes
them, and those of transformers shrunken. One row is written as each model is done, so that a sweep which was stopped
goes on where it was. Prints how many were counted, each failure with its cause, and what work outside the dispatcher
was reported; exits with 1 if a model failed, or reports such work and is not in sweeping/expected.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from sweeping.expected import EXPECTED_UNSEEN, find_unexpected  # noqa: E402
from sweeping.pool import GIB, Pool, PoolError  # noqa: E402
from sweeping.result import NotASweep, Result, append_result, read_results, write_results  # noqa: E402
from sweeping.worker import load_library  # noqa: E402

from fvflops.formulas import TableError, load_table  # noqa: E402

LIBRARIES = ("timm", "torchvision", "transformers")


class BadInput(ValueError):
    """Something in the command line that cannot be done; the message replays it and says what to do."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="tools/sweep.py", description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument(
        "--execution",
        choices=("shapes", "real"),
        default="shapes",
        help="shapes: without weights where that is possible; real: with random weights, and real numbers (shapes)",
    )
    parser.add_argument("--out", type=Path, help="the CSV (default: sweep-LIBRARY.csv, or sweep-LIBRARY-real.csv)")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="workers (default: one a core)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only models whose name matches, such as 'vit*'")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N of them")
    parser.add_argument(
        "--table", default="default", help="the convention: a shipped one, or a path (default: default)"
    )
    parser.add_argument("--again", action="store_true", help="count those too that are in the CSV")
    parser.add_argument("--retry-failed", action="store_true", help="count those again that failed")
    parser.add_argument("--timeout", type=_positive, default=300, metavar="S", help="seconds for a model (default 300)")
    parser.add_argument(
        "--memory", type=_positive, default=12, metavar="GIB", help="for the weights of a model that needs values (12)"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def choose(names: Sequence[str], pattern: str, limit: int | None, library: str) -> list[str]:
    """Return the names that match, at most `limit`."""
    chosen = [name for name in names if fnmatchcase(name, pattern)]
    if not chosen:
        raise BadInput(
            f"--only {pattern!r} matches none of the {len(names):,} models of {library}: * matches any text, "
            f"as in {names[0][:3] + '*'!r}"
        )
    return chosen[:limit]


def open_results(path: Path, drop: Iterable[str], *, failed: bool, real: bool = False) -> dict[str, Result]:
    """Return the results that a CSV holds, without those to be counted again, and leave a CSV of just those.

    With `real` it must be of real runs.
    """
    try:
        results = read_results(path)
        if real and any(result.execution == "shapes" for result in results.values()):
            raise NotASweep(f"{path} is of a sweep by shapes")
        dropped = set(drop)
        kept = {
            name: result for name, result in results.items() if name not in dropped and not (failed and result.error)
        }
        write_results(path, kept.values())
    except NotASweep as error:
        raise BadInput(f"{error}: name another file with --out") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"--out {path}: {reason}: name a file that can be written") from None
    return kept


def summarise(library: str, version: str, results: Sequence[Result], seconds: float, jobs: int) -> str:
    """Return the text that is printed at the end."""
    failed = [result for result in results if result.error]
    how = Counter(result.execution for result in results if not result.error)
    unseen = [result for result in results if result.unseen]
    unexpected = find_unexpected(library, unseen)
    unknown = Counter(
        item.rpartition(" ")[0] for result in results if result.unknown_ops for item in result.unknown_ops.split("; ")
    )
    lines = [
        f"{library} {version}: of {len(results):,} models {sum(how.values()):,} are counted "
        f"({how['shapes']:,} by shapes, {how['real']:,} by a real run) and {len(failed):,} failed"
    ]
    lines += [f"  failed {result.model}: {result.error}" for result in failed]
    lines.append(f"  unseen work: in {len(unseen):,} models, {len(unexpected):,} of them unexpected")
    for result in unseen:
        reason = "unexpected" if result in unexpected else f"expected: {EXPECTED_UNSEEN[library][result.model]}"
        lines.append(f"  unseen in {result.model}: {result.unseen} ({reason})")
    ledger = {kind: sum(getattr(result, kind) or 0 for result in results) for kind in ("counted", "free", "omitted")}
    lines.append(f"  calls of ops: {', '.join(f'{calls:,} {kind}' for kind, calls in ledger.items())}")
    lines += [f"  unknown {op}: in {models:,} models" for op, models in unknown.most_common()]
    return "\n".join([*lines, f"{seconds:.0f} s with {jobs} workers"])


class Progress:
    """A line on the terminal that is written over; nothing where standard error is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = self._failed = 0
        self._begun = time.monotonic()
        self._shown = sys.stderr.isatty()

    def step(self, result: Result) -> None:
        """Say that one more model is done."""
        self._done += 1
        self._failed += bool(result.error)
        left = (time.monotonic() - self._begun) / self._done * (self._total - self._done)
        bar = "#" * (20 * self._done // self._total)
        self._write(f"[{bar:<20}] {self._done}/{self._total}, {self._failed} failed, {left:.0f} s left: {result.model}")

    def close(self) -> None:
        """Clear the line."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._shown:
            print(f"\r{text[:118]:<118}", end="" if text else "\r", file=sys.stderr, flush=True)


def main() -> int:
    """Run the sweep and return the exit code."""
    arguments = parse()
    is_real = arguments.execution == "real"
    path = arguments.out or Path(f"sweep-{arguments.library}{'-real' if is_real else ''}.csv")
    begun = time.monotonic()
    try:
        library = load_library(arguments.library)
        try:
            names = library.list_names()
        except ImportError as error:
            raise BadInput(f"{arguments.library} cannot be imported ({error}): install it") from None
        load_table(arguments.table)
        chosen = choose(names, arguments.only, arguments.limit, arguments.library)
        dropped = chosen if arguments.again else ()
        results = open_results(path, dropped, failed=arguments.retry_failed, real=is_real)
    except (BadInput, TableError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    todo = [name for name in chosen if name not in results]
    pool = Pool(
        arguments.library,
        library.real_ways if is_real else library.ways,
        arguments.table,
        execution="real" if is_real else "auto",
        jobs=arguments.jobs,
        timeout=arguments.timeout,
        memory=arguments.memory * GIB,
    )
    progress = Progress(max(1, len(todo)))
    stopped = False
    try:
        for result in pool.run(todo):
            append_result(path, result)
            results[result.model] = result
            progress.step(result)
    except KeyboardInterrupt:
        stopped = True
    except PoolError as error:
        print(f"sweep: {error}: import it in Python to see why", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sweep: --out {path}: {error.strerror or error}: make room, or name another file", file=sys.stderr)
        return 2
    progress.close()
    done = [results[name] for name in chosen if name in results]
    print(summarise(arguments.library, library.version(), done, time.monotonic() - begun, arguments.jobs))
    if stopped:
        print(f"stopped with {len(chosen) - len(done):,} left: the same command goes on", file=sys.stderr)
    failed = any(result.error for result in done) or find_unexpected(arguments.library, done)
    return 1 if stopped or failed else 0


if __name__ == "__main__":
    sys.exit(main())
