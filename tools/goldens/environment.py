"""The environment in which outputs are written: what must be set before Python starts."""

from __future__ import annotations

ENVIRONMENT = {
    "COLUMNS": "80",
    "LINES": "24",
    "NO_COLOR": "1",
    "PYTHON_COLORS": "0",
    "TERM": "dumb",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "MPLBACKEND": "agg",
}
UNSET = ("FORCE_COLOR", "CLICOLOR_FORCE", "GITHUB_STEP_SUMMARY", "PYTHONWARNINGS")
