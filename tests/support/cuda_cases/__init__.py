"""Cases for which CUDA has kernels of its own, and what each comes to when recorded."""

from collections.abc import Callable, Iterator

from tests.support.cuda_cases.case import Case
from tests.support.cuda_cases.layer_ops import attention, convolution, recurrence
from tests.support.cuda_cases.other_ops import others

_FAMILIES = {"attention": attention, "recurrence": recurrence, "convolution": convolution, "others": others}


def list_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield "family: case" and the function that makes the case."""
    for family, make_cases in _FAMILIES.items():
        for name, make in make_cases().items():
            yield f"{family}: {name}", make
