"""The files of the page's script."""

from __future__ import annotations

from pathlib import Path

import fvflops.reports.html as page

SCRIPTS = Path(page.__file__).parent / "scripts"
NAMES = sorted(path.relative_to(SCRIPTS).as_posix() for path in SCRIPTS.rglob("*.js"))
