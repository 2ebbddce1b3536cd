"""The allocator: what is freed is used again, until it is returned."""

import platform
import subprocess
import sys

import pytest

# Prints the page faults of 20 blocks of 64 MB that are written to, before and after freed memory is kept, and the MB
# that are held after it is returned.
PROGRAM = """
import resource
from fvflops.sweep import local_pool
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = bytearray(b"1" * (64 << 20))
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
begun = held()
print(faults(), int(local_pool.keep_freed_memory()), faults())
local_pool.return_freed_memory()
print(held() - begun)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_freed_memory_is_used_again_and_then_returned():
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    faults, can_keep, kept_faults, held = map(int, output.split())
    assert can_keep
    assert kept_faults < faults / 5
    assert held < 32
