"""What guessing brings, live: each pass beside what its tokens would have taken without guesses, by measured prices.

Plain decoding would have made one pass for every token that a request got. The first of them is the pass that was
made, less the price of its guessed rows; each further one is a plain pass of as many requests, at the price that
control has measured and goes on measuring. What else a plain cycle takes (planning, drawing, the books) is learnt from
the cycles in which nobody guessed, less what only a drafter asks for in them: grades, budgets, and its looking on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.control.depth import Control
from outrider.record import Record, Saving, Tally

DOUBT = 0.1
"""By how much of itself a price is off before a pass of its width was seen: what is asked of the cost model."""
DOUBT_REST = 0.3
"""As much for what else a plain cycle takes, before one was seen."""
BELIEF = 8.0
"""Passes that this belief is worth; what they show outweighs it soon."""
REFINE = 0.02
"""Weight of one more pass, after the first ones, which all count alike."""
FADING = 0.995
"""What a pass leaves of the weight of earlier evidence: prices drift while nobody sees passes of their width."""
LATELY = 0.998
"""What a pass leaves of the weight of those before it: `Economy.recent` is of the last 500."""


def price_of(control: Control, rows: int) -> float:
    """Expected seconds of a pass of so many rows, at the contexts of now: all that is asked of control here."""
    return control.prices.rows(rows)


@dataclass(slots=True)
class _Mean:
    """Of values and of their squares; old ones fade. weight: of the evidence, in passes."""

    seen: int = 0
    value: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def learn(self, value: float) -> None:
        self.seen += 1
        self.weight += 1
        weight = max(REFINE, 1 / self.seen)
        self.value += weight * (value - self.value)
        self.square += weight * (value * value - self.square)


@dataclass(frozen=True, slots=True)
class Price:
    """What the tokens of a pass would have taken plainly: its first token's pass, and each further token's.

    Attributes:
        doubt, further_doubt: standard deviations of these prices themselves. noise: of a single further pass.
    """

    first: float
    further: float
    doubt: float
    further_doubt: float
    noise: float

    def of(self, delivered: int, spent: float) -> Saving:
        """The saving of a request that got so many tokens by a pass of so many seconds."""
        more = delivered - 1
        return Saving(
            spent, self.first + more * self.further, self.doubt + more * self.further_doubt, more * self.noise**2
        )


class Economy:
    """Prices the passes of one engine.

    Args:
        price: expected seconds of a pass by its rows, as it stands now.

    Attributes:
        recent: of the last passes, all requests together.
    """

    def __init__(self, price: Callable[[int], float]) -> None:
        self._price = price
        self._rest: dict[int, _Mean] = {}
        """Seconds of a plain cycle beside its pass, by the bits of its number of requests; negative ones: in flight."""
        self._misses: dict[int, _Mean] = {}
        """Logarithm of a pass's seconds over its price, by the bits of its rows."""
        self.recent = Saving()

    def settle(self, record: Record, tallies: Mapping[int, Tally]) -> Saving | None:
        """Price a pass, add each request's part to its tally, learn; returns the sum, None where nobody decoded, or
        a graph was taken meanwhile."""
        if not record.cycles or record.captures:
            return None
        price = self.price(record)
        whole = Saving()
        for cycle in record.cycles:
            saving = price.of(cycle.delivered, record.seconds_total)
            tallies[cycle.request_id].saving.add(saving)
            whole.add(saving)
        self._learn(record)
        self.recent.fade(LATELY)
        self.recent.add(whole)
        return whole

    def price(self, record: Record) -> Price:
        """What the tokens of a pass would have taken plainly."""
        count = len(record.cycles)
        alone, (rest, unsure) = self._price(count), self._rest_of(record)
        further, noise = alone + rest, self._noise(count) * alone
        sure = self._doubt(count) * alone + unsure
        if not _guesses(record):
            return Price(record.seconds_total - record.seconds_books, further, 0.0, sure, noise)
        if record.overlaps:
            return Price(further, further, sure, sure, noise)
        plainly = count + record.prefill_rows
        wide, narrow = self._price(record.rows), self._price(plainly)
        own = max(0.0, record.seconds_verify - max(0.0, wide - narrow))
        is_wider = record.rows > plainly
        doubt = self._doubt(record.rows) * wide + self._doubt(plainly) * narrow if is_wider else 0.0
        return Price(own + rest, further, doubt + unsure, sure, noise)

    def _rest_of(self, record: Record) -> tuple[float, float]:
        """Seconds of a plain cycle beside its pass, and by how much they may be off: of the nearest number of requests
        that was seen; before one was, what drawing and the books took in this pass, or nothing where nobody knows."""
        key = _bits(record)
        seen = [other for other in self._rest if (other < 0) == (key < 0)]
        if not seen:
            rest = max(0.0, record.seconds_sample - record.seconds_books)
            return rest, DOUBT_REST * rest
        found = self._rest[min(seen, key=lambda other: (abs(other - key), other))]
        return found.value, DOUBT_REST * found.value * math.sqrt(BELIEF / (BELIEF + found.seen))

    def _learn(self, record: Record) -> None:
        plain, price = not _guesses(record), self._price(record.rows)
        if record.overlaps:
            if plain:
                self._rest.setdefault(_bits(record), _Mean()).learn(max(0.0, record.seconds_total - price))
            return
        if record.prefill_rows:
            return
        if plain:
            rest = max(0.0, record.seconds_total - record.seconds_verify - record.seconds_books)
            self._rest.setdefault(_bits(record), _Mean()).learn(rest)
        if price > 0 and record.seconds_verify > 0:
            for other in self._misses.values():
                other.weight *= FADING
            miss = math.log(record.seconds_verify / price)
            self._misses.setdefault(record.rows.bit_length(), _Mean()).learn(miss)

    def _doubt(self, rows: int) -> float:
        """By how much of itself the price of so many rows may be off: what passes showed, and before them `DOUBT`."""
        seen = self._misses.get(rows.bit_length(), _Mean())
        return math.sqrt((BELIEF * DOUBT**2 + seen.weight * seen.value**2) / (BELIEF + seen.weight))

    def _noise(self, rows: int) -> float:
        """Of single passes of so many rows around their price."""
        seen = self._misses.get(rows.bit_length(), _Mean())
        return math.sqrt((BELIEF * DOUBT**2 + seen.weight * seen.square) / (BELIEF + seen.weight))


def _guesses(record: Record) -> bool:
    """Whether a pass did more than plain decoding would have done in it."""
    more = record.rows > len(record.cycles) + record.prefill_rows
    return more or any(cycle.asked or cycle.drafted for cycle in record.cycles)


def _bits(record: Record) -> int:
    bits = len(record.cycles).bit_length()
    return -bits if record.overlaps else bits
