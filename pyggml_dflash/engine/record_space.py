"""Which rows of the record are whose: what forwards write there waits until a drafter reads it. Layer 6.

With one slot there is one room, for prompts and decoding. With several, each has a small room of its own for
the rows that it decodes, and all share one for prompts, whose rows are read before those of the next forward
come; prompts that share a forward lie one behind the other in it. No room is larger than that one: a drafter
reads at once what waits in a room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# That a slot decodes plainly before its drafter has to read them; fewer where chunks are shorter.
OWN_ROWS: Final = 32


@dataclass(frozen=True, slots=True)
class Room:
    """`n_rows` rows of the record from `first` on; the one in front of them, if any, is of no room."""

    first: int
    n_rows: int


@dataclass(frozen=True, slots=True)
class RecordSpace:
    """The rooms of `n_slots` slots, for forwards of up to `most` rows, verify ones of up to `max_width`."""

    n_slots: int
    most: int
    max_width: int

    @property
    def shared(self) -> Room:
        """The room of prompts, the largest: that many rows a drafter may have to read at once."""
        return Room(0, self.most)

    def own(self, slot: int) -> Room:
        """The room of what a slot decodes."""
        if self.n_slots == 1:
            return self.shared
        n_rows = min(max(OWN_ROWS, self.max_width), self.most)
        return Room(self.most + 1 + slot * (n_rows + 1), n_rows)

    @property
    def n_rows(self) -> int:
        """Rows of the whole record."""
        last = self.own(self.n_slots - 1)
        return last.first + last.n_rows

    def has(self, slot: int, first: int, n: int) -> bool:
        """True if `n` rows from `first` on are in a room that the slot may write to."""
        rooms = (self.shared, self.own(slot))
        return any(room.first <= first and first + n <= room.first + room.n_rows for room in rooms)
