"""An Adam for 16-bit parameters, with a 32-bit copy of each in its state: 12 bytes a parameter."""

import torch


class MixedPrecisionAdam(torch.optim.Optimizer):
    """Adam without bias correction, so that the state has no count of steps."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"])

    def update(self, parameter, rate):
        state = self.state[parameter]
        if not state:
            state["master"] = parameter.float()
            state["mean"] = torch.zeros_like(state["master"])
            state["variance"] = torch.zeros_like(state["master"])
        gradient = parameter.grad.float()
        state["mean"].lerp_(gradient, 0.1)
        state["variance"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        state["master"].addcdiv_(state["mean"], state["variance"].sqrt() + 1e-8, value=-rate)
        parameter.copy_(state["master"])
