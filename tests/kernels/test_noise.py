"""Philox against the published vectors, the law of the noise, and its independence of company."""

import math

import pytest
import scipy.stats
import torch

from outrider.kernels import noise

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, expected.
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(counter, key, expected):
    out = noise.philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert [int(word) for word in out] == expected


def plain_philox(counter, key):
    """Philox4x32-10 on Python integers, from the paper's section 4.3."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_words_are_keyed_by_seed_position_sample_stream_and_token():
    seed, sample, position, stream = 2**64 - 12345, 7, 4_000_000, noise.stream(noise.Purpose.ACCEPT, 5)
    got = noise.words(
        torch.tensor([seed - 2**64]), torch.tensor([sample]), torch.tensor([position]), torch.tensor([stream]), 11
    )
    for v in range(11):
        block = plain_philox([v >> 2, position, sample, stream], [seed & 0xFFFFFFFF, seed >> 32])
        assert int(got[0, v]) == block[v & 3]


def test_a_row_does_not_depend_on_its_neighbours_or_on_the_vocabulary():
    seeds, samples, positions = torch.arange(9) - 4, torch.arange(9) % 3, torch.arange(9) * 1000
    together = noise.gumbel(seeds, samples, positions, 1001)
    for row in range(9):
        one = slice(row, row + 1)
        alone = noise.gumbel(seeds[one], samples[one], positions[one], 4000)
        assert torch.equal(alone[0, :1001], together[row])


def test_uniform_stays_inside_the_open_interval_and_gumbel_finite():
    extremes = (torch.tensor([0.0, 2**32 - 1], dtype=torch.float64) + 0.5) * 2.0**-32
    assert extremes[0] > 0
    assert extremes[1] < 1
    assert torch.isfinite(-(-extremes.log()).log()).all()


def test_the_law_of_the_noise():
    seeds, zeros = torch.full((64,), 99), torch.zeros(64, dtype=torch.int32)
    positions = torch.arange(64, dtype=torch.int32)
    uniform = noise.uniform(seeds, zeros, positions, noise.stream(noise.Purpose.RESIDUAL, 3), 2000).flatten()
    gumbel = noise.gumbel(seeds, zeros, positions, 2000).flatten()
    assert scipy.stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3
    assert scipy.stats.kstest(gumbel.numpy(), "gumbel_r").pvalue > 1e-3
    assert abs(float(gumbel.mean()) - 0.5772156649) < 5 * math.pi / math.sqrt(6 * gumbel.numel())


def test_streams_of_purposes_and_nodes_are_disjoint():
    streams = [noise.stream(purpose, node) for purpose in noise.Purpose for node in range(-1, 5000)]
    assert len(set(streams)) == len(streams)
    assert noise.stream(noise.Purpose.MATCH) == noise.Purpose.MATCH == 0
    assert max(streams) < 2**32


def test_coins_are_built_from_the_words_of_the_same_streams():
    keys = [(2**64 - 5, 3, 77), (2**63, 0, 0), (12, 1, 2**31)]
    streams = [noise.stream(noise.Purpose.ACCEPT, 9), noise.stream(noise.Purpose.RESIDUAL)]
    expected = []
    for seed, sample, position in keys:
        columns = [torch.tensor([value]) for value in (seed - 2**64 if seed >= 2**63 else seed, sample, position)]
        rows = [noise.words(*columns, stream, 10)[0].tolist() for stream in streams]
        expected.append([[((w[i] * 2**32 + w[i + 1]) // 2**12 + 0.5) / 2**52 for i in range(0, 10, 2)] for w in rows])
    for num in range(1, 6):
        assert noise.coins(keys, streams, num).tolist() == [[row[:num] for row in rows] for rows in expected]
    own = noise.coins(keys, [[streams[0]], [streams[1]], [streams[0]]], 5).tolist()
    assert own == [expected[0][:1], expected[1][1:], expected[2][:1]]
    assert all(0 < u < 1 for u in (0.5 * 2.0**-52, (2**52 - 0.5) * 2.0**-52))
