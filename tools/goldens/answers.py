"""What the cases of tests/support/first_answers return, print, log and warn of."""

from __future__ import annotations

import json
from functools import partial

from goldens.jobs import Folder, Job, file_name
from tests.support.first_answers.answers import KINDS, answer, cases_of


def jobs() -> list[Job]:
    return [Job(f"answers/{kind}", partial(_write, kind)) for kind in KINDS if kind != "commands"]


def _write(kind: str, folder: Folder) -> None:
    for name in cases_of(kind):
        text = json.dumps(answer(f"{kind}: {name}"), indent=1, ensure_ascii=False)
        folder.write(f"{file_name([name])}.json", text)
