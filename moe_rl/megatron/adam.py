"""Implements Adam on torch ops, with the state layout of the FusedAdam of apex and TransformerEngine.

Megatron's distributed optimizer can load a distributed checkpoint only if the step count is in the param group and the
state is {exp_avg, exp_avg_sq}, as in these two optimizers. torch.optim.Adam, which Megatron uses when neither is
installed, keeps the step per parameter, so its state cannot be restored. With this optimizer, a CPU run takes the same
path as a GPU run.
"""

from __future__ import annotations

import torch


class FusedAdam(torch.optim.Optimizer):
    """Implements Adam with decoupled (adam_w_mode) or coupled weight decay: Kingma and Ba 2015; Loshchilov and Hutter
    2019.

    The update is m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), times lr.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **unused):
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self._update(group, params)

    def _update(self, group, params):
        lr, (beta1, beta2), decay, step = group["lr"], group["betas"], group["weight_decay"], group["step"]
        grads = [p.grad for p in params]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_addcdiv_(params, first, scale, -lr / (1 - beta1**step))


def install() -> None:
    """Make megatron-core use FusedAdam if it found neither TransformerEngine nor apex."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
