"""Files of tests that take longest, the longest first.

A worker runs a whole file (tools/test), so that one that begins last leaves the other workers without work.
"""

LONG_FILES = (
    "capture/shapes/test_opinfo.py",
    "peers/test_patching_peers.py",
    "plan/memory/test_memory_ranks.py",
    "capture/restore/test_restore.py",
    "comparison/test_diff.py",
    "compat/test_deepspeed.py",
    "measure/test_kernels_annotation.py",
    "sweep/test_sweep.py",
)
