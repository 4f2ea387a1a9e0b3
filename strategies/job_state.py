"""Where a job was when it was backed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tf_smb.strategies.data_order import Deal, Position


@dataclass(frozen=True)
class JobState:
    """Where a job was when it was backed up.

    Attributes:
        steps: The most that any live worker had made.
        batches: That the writer had trained on.
        phase: Of the schedule, from 0.
        live: The workers that were.
        positions: How far the center has each worker's data, in the present deal.
        deals: Those before.
        kind: Of the data: "samples", "batches", "pipeline" or "anew".
        total: Samples, or batches, of an epoch; None if unknown.
        batch_size: Of `total`, in a step.
        shuffle: Whether their order changes.
        replicated: Whether every worker trains on all of them.
        seed: Of the order.
    """

    steps: int
    batches: int
    phase: int
    live: tuple[int, ...]
    positions: tuple[Position, ...]
    deals: tuple[Deal, ...]
    kind: str
    total: int | None
    batch_size: int
    shuffle: bool
    replicated: bool
    seed: int

    @property
    def num_workers(self) -> int:
        """How many the job had."""
        return len(self.positions)

    def first_epoch(self) -> int:
        """The epoch that the slowest live worker was in: those that had died do not count."""
        live = [self.positions[index].epoch for index in self.live]
        return min(live or [position.epoch for position in self.positions])

    def to_json(self) -> dict[str, Any]:
        """Returns it in what JSON can hold; tuples become lists."""
        deals = [
            {"batch_size": deal.batch_size, "positions": deal.positions} for deal in self.deals
        ]
        return {**self.__dict__, "deals": deals}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> JobState:
        """The opposite of `to_json`."""

        def positions(pairs: Any) -> tuple[Position, ...]:
            return tuple(Position(*pair) for pair in pairs)

        values = {name: state[name] for name in cls.__dataclass_fields__}
        deals = [Deal(deal["batch_size"], positions(deal["positions"])) for deal in state["deals"]]
        values.update(
            live=tuple(state["live"]), positions=positions(state["positions"]), deals=tuple(deals)
        )
        return cls(**values)
