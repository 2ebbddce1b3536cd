"""Files of tests that take longest, the longest first.

A worker runs a whole file (tools/test), so that one that begins last leaves the other workers without work.
"""

LONG_FILES = (
    "plan/sharding/test_optimizer_sharding.py",  # its processes wait most of the time
    "plan/test_families.py",
    "docs/test_examples.py",
    "capture/shapes/test_shapes.py",
    "peers/test_patching_peers.py",
    "plan/test_layouts.py",
    "plan/memory/test_memory_ranks.py",
    "models/test_e3nn.py",
    "project/test_first_answers.py",
    "integrations/test_integrations.py",
    "plan/test_ranks.py",
    "plan/search/test_search.py",
    "zoo/test_zoo.py",
    "capture/shapes/test_opinfo.py",
    "capture/restore/test_restore.py",
    "cli/test_settings.py",
    "sweep/test_sweep.py",
)
