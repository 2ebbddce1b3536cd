"""Work of a compiled extension is reported for every kind of output; compiling it takes a minute."""

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

from fvflops import FlopCountAnalysis
from tests.support.models.parts import Parts

SOURCE = r"""
#include <torch/extension.h>

static void double_into(const torch::Tensor& x, torch::Tensor out) {
    for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i];
}
torch::Tensor dispatched(torch::Tensor x) { auto out = torch::empty_like(x); double_into(x, out); return out; }
torch::Tensor allocated(torch::Tensor x) {
    torch::Tensor out = at::detail::empty_cpu(x.sizes(), x.options());
    double_into(x, out);
    return out;
}
torch::Tensor wrapped(torch::Tensor x) {
    auto* memory = new float[x.numel()];
    torch::Tensor out = torch::from_blob(memory, x.sizes(), [](void* p) { delete[] static_cast<float*>(p); });
    double_into(x, out);
    return out;
}
void in_place(torch::Tensor x) { double_into(x, x); }
void into(torch::Tensor x, torch::Tensor out) { double_into(x, out); }
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    return cpp_extension.load_inline(
        "fvflops_test_extension",
        SOURCE,
        functions=["dispatched", "allocated", "wrapped", "in_place", "into"],
        build_directory=str(tmp_path_factory.mktemp("extension")),
    )


class Scan(Parts):
    def forward(self, x):
        if self.output == "in_place":
            self.extension.in_place(x)
            return x
        if self.output in ("zeros_like", "empty_like", "clone"):
            out = getattr(torch, self.output)(x)
            self.extension.into(x, out)
            return out
        return getattr(self.extension, self.output)(x)


@pytest.mark.long
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("execution", ["auto", "real"])
@pytest.mark.parametrize(
    "output", ["dispatched", "allocated", "wrapped", "in_place", "zeros_like", "empty_like", "clone"]
)
def test_compiled_function_is_reported_in_its_module(extension, output, execution, is_last):
    model = nn.Sequential(
        nn.Linear(8, 8), Scan(extension=extension, output=output), *([] if is_last else [nn.Linear(8, 8)])
    )
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    analysis = FlopCountAnalysis(model, x, execution=execution).unsupported_ops_warnings(False)
    # torch creates a new storage object at each access to memory that it does not own.
    calls = (1, 2) if output == "wrapped" else (1,)
    assert analysis.unsupported_ops("1") in [{"unseen::Scan.forward": count} for count in calls]
    (source,) = {item.source for item in analysis.trace().signatures if item.op == "unseen::Scan.forward"}
    assert source.startswith("tests/capture/unseen/test_unseen_extension.py:")
