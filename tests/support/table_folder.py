"""Write tables for tests, and signatures to price with them."""

import torch

from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.formulas import FormulaTable, load_table
from fvflops.trace import Signature


class TableFolder:
    """A folder of tables: calling it writes one and loads it."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, text: str, name: str = "mine.yaml") -> FormulaTable:
        (self.folder / name).write_text(text)
        return load_table(str(self.folder / name))


def signature(op: str, *shapes: tuple[int, ...], out: tuple[int, ...] = (1,)) -> Signature:
    """Return the signature of a call of an aten op's default overload on tensors of these shapes."""
    overload = getattr(torch.ops.aten, op.removeprefix("aten::")).default
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return describe_call(overload, tensors, {}, torch.empty(out, device="meta"))
