"""Optimizer and schedule plugins for tests, some valid and some invalid."""

import torch

NOT_CALLABLE = 3


def straight(train, step):
    return train.lr * (1 - step / 1000)


def no_step(train):
    return train.lr


def negative(train, step):
    return -1.0


def divides(train, step):
    return 1 / (step - step)


class NotAnOptimizer:
    pass


class _Sgd(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.keep(p, group)
                    p.add_(p.grad, alpha=-group["lr"])

    def keep(self, p, group):
        pass


class NoRate(torch.optim.Optimizer):
    def __init__(self, params, speed=1.0):
        super().__init__(params, {"speed": speed})


class NoDecay(_Sgd):
    def __init__(self, params, lr):
        super().__init__(params, lr)


class CountsInInts(_Sgd):
    def keep(self, p, group):
        self.state[p]["count"] = self.state[p].get("count", 0) + 1


class KeepsShards(_Sgd):
    def keep(self, p, group):
        self.state[p]["shard"] = p.to_local().clone()


class CountsInGroups(_Sgd):
    def keep(self, p, group):
        group["count"] = group.get("count", 0) + 1


class Raises(_Sgd):
    def __init__(self, params, lr, weight_decay=0.0):
        raise KeyError("inside")


class RaisesInAStep(_Sgd):
    def keep(self, p, group):
        p.no_such_attribute()
