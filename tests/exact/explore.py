"""Runs a program through every outcome of its choices and adds up what comes out: a law without any noise."""

from collections import defaultdict

import torch


class Chooser:
    """Follows a script of choices, then takes the first open branch and remembers the others."""

    def __init__(self, script):
        self.script, self.step, self.probability, self.branches = script, 0, 1.0, []

    def __call__(self, weights):
        """An index, chosen in proportion to `weights`; every index of positive weight gets its run."""
        open_ = [i for i, weight in enumerate(weights) if weight > 0]
        if self.step < len(self.script):
            choice = self.script[self.step]
        else:
            choice = open_[0]
            self.branches += [(*self.script, choice_) for choice_ in open_[1:]]
            self.script = (*self.script, choice)
        self.step += 1
        self.probability *= weights[choice] / sum(weights)
        return choice


class Explored:
    """The choices of a walk that are not drawn but split: a child is accepted in a share `ratio` of all cases."""

    def __init__(self, choose):
        self.choose, self.thrown = choose, set()

    def accept(self, trees, nodes, ratios):
        assert not self.thrown & {*zip(trees, nodes, strict=True)}, "a coin was thrown twice"
        self.thrown |= {*zip(trees, nodes, strict=True)}
        shares = [min(1.0, max(0.0, ratio)) for ratio in ratios.tolist()]
        return torch.tensor([self.choose([share, 1.0 - share]) == 0 for share in shares])

    def pick(self, nodes, weights):
        return torch.tensor([self.choose(row) for row in weights.tolist()])


def explore(program):
    """{outcome: probability} of `program(choose)` over all choices."""
    law, scripts = defaultdict(float), [()]
    while scripts:
        chooser = Chooser(scripts.pop())
        law[program(chooser)] += chooser.probability
        scripts += chooser.branches
    return dict(law)


def extend(cycle, length):
    """The law of the first `length` tokens when `cycle(text)` gives the law of what one cycle adds to `text`."""
    frontier, done = {(): 1.0}, defaultdict(float)
    while frontier:
        text, probability = frontier.popitem()
        for added, share in cycle(text).items():
            longer = (*text, *added)
            if len(longer) >= length:
                done[longer[:length]] += probability * share
            else:
                frontier[longer] = frontier.get(longer, 0.0) + probability * share
    return dict(done)
