"""The allocator: what is freed is used again, until it is returned."""

import platform
import subprocess
import sys

import pytest

from tests.support.checkout import ROOT

# Prints the page faults of 20 blocks of 64 MB that are written to, and the MB that the process holds at the end.
PROGRAM = f"""
import resource, runpy
allocator = runpy.run_path({str(ROOT / "fvflops/sweep/allocator.py")!r})
if KEEP:
    assert allocator["keep_freed_memory"]()
for _ in range(20):
    block = bytearray(b"1" * (64 << 20))
    del block
allocator["return_freed_memory"]()
pages = int(open("/proc/self/statm").read().split()[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt, pages * resource.getpagesize() >> 20)
"""


def measure(keep):
    program = PROGRAM.replace("KEEP", str(keep))
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return map(int, output.split())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_freed_memory_is_used_again_and_then_returned():
    faults, _ = measure(keep=False)
    kept_faults, held = measure(keep=True)
    assert kept_faults < faults / 5
    assert held < 64
