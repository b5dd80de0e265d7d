"""The rows of trees on the device: what kernels walk by address is what tensors say."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import select
from outrider.models.seats import DeviceTree, Outline, Seats, tree_rows
from tests.kernels.conftest import make_triton

CPU = torch.device("cpu")
VOCAB = 50


def seated(count: int):
    seats = Seats(count, levels=4, blocks=3, block_size=8, kernels=select("plain", CPU), vocab_size=VOCAB, device=CPU)
    for seat in range(count):
        seats.take(seat, length=9 + seat, end=40, prompt=5, seed=seat, sample=0, heat=0.0, token=7 + seat)
        seats.extend(seat, 0, [1 + 3 * seat, 2 + 3 * seat, 3 + 3 * seat])
    index = list(range(count))
    seats.allow(index, [4] * count)
    return seats.crew(seats.index(index), 3)


def chains(crew, nodes: int) -> DeviceTree:
    every = torch.arange(nodes).expand(crew.size, -1)
    return DeviceTree(torch.arange(crew.size * nodes).view(crew.size, nodes) % VOCAB, every - 1, every + 1)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_walks_by_address_follow_the_nodes_of_their_own_request(size, nodes):
    """A pass of one node a request is where a flat view would step over what lies between."""
    crew = seated(size)
    tree = chains(crew, nodes)
    rows = tree_rows(crew, tree, Outline(nodes, 1, nodes, nodes + 1))
    slots = torch.tensor([[seat * 24 + 8 + 8 + seat + place for place in range(1, nodes + 1)] for seat in range(size)])
    assert rows.slots.tolist() == slots.flatten().tolist()
    draws = torch.nn.functional.pad(tree.tokens, (0, 1), value=3).flatten()  # every guess is right
    for kernels in (select("plain", CPU), make_triton()):
        walks = kernels.walk(draws, rows.trees)
        assert walks.counts.tolist() == [nodes] * size
        assert walks.said[:, :-1].tolist() == tree.tokens.tolist()
