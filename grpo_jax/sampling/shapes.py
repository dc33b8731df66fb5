"""The static shapes of a session, from short ladders, so that few programs are compiled.

Prompts are read one by one or many together, in buckets of length; slots get longer by doubling,
and where few completions are left they move into a quarter of the slots.
"""

import dataclasses

_MANY = 16  # so many slots, or more, shrink to a quarter when that is enough


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static shapes of a session."""

    rows: int  # slots
    bucket: int  # prompts are padded to a multiple of so many tokens
    prefill: int  # prompts read together, at most
    burst: int  # tokens a slot gets between two looks of the host, at most
    multiple: int = 1  # slots, and prompts read together, come in multiples of this
    context: int | None = None  # positions the model was made for; None: no end

    @property
    def ladder(self) -> list[int]:
        """The numbers of slots there may be, largest first."""
        sizes = [self._rounded(self.rows)]
        while sizes[-1] >= _MANY and self._rounded(sizes[-1] // 4) < sizes[-1]:
            sizes.append(self._rounded(sizes[-1] // 4))
        return sizes

    def slots(self, wanted: int) -> int:
        """The least number of slots that holds so many completions."""
        return min((n for n in self.ladder if n >= wanted), default=self.ladder[0])

    def fewer(self, slots: int) -> int:
        """The next smaller number of slots, 0 where there is none."""
        return max((n for n in self.ladder if n < slots), default=0)

    def length(self, needed: int, longest: int) -> int:
        """The least number of positions, of a ladder of doublings up to `longest`."""
        length = self.bucket
        while length < needed:
            length *= 2
        return self._within(min(length, max(longest, needed)))

    def width(self, length: int) -> int:
        """The width that a prompt is padded to: of a bucket's multiples up to four times, then of
        coarser ones, so that there are two widths between a power of two and the next."""
        step = self.bucket
        while length > 4 * step:
            step *= 2
        return self._within(-(-length // step) * step)

    def _within(self, length: int) -> int:
        return length if self.context is None else min(length, self.context)

    def reads(self, prompts: int) -> list[int]:
        """The numbers of prompts to read together: there are two, so few programs are compiled.

        Most of a large read is prompts; what does not fill half of one is read one by one.
        """
        one, many = self._rounded(1), self._rounded(self.prefill)
        full, rest = divmod(prompts, many)
        if 2 * rest > many:
            return [many] * (full + 1)
        return [many] * full + [one] * -(-rest // one)

    def _rounded(self, number: int) -> int:
        return -(-max(number, 1) // self.multiple) * self.multiple
