"""Files of tests that take longest, the longest first.

A worker runs a whole file (tools/test), so that one that begins last leaves the other workers without work.
"""

LONG_FILES = (
    "capture/shapes/test_opinfo.py",
    "peers/test_torch_flops.py",
    "plan/memory/test_memory_ranks.py",
    "capture/restore/test_restore.py",
    "comparison/test_diff.py",
    "compat/test_deepspeed.py",
    "measure/test_kernels_annotation.py",
    "peers/test_deepspeed.py",
    "peers/test_calflops.py",
    "sweep/test_sweep.py",
)
