"""What all callbacks of tf_smb have: the way to the box, and where they stand in `fit`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tf_smb.errors import FailedPreconditionError

# After this long, a wait says whom it waits for.
_QUIET_S = 3.0
# Between two looks at what is waited for.
_SLICE_S = 0.2


class SMBCallback(keras.callbacks.Callback):
    """A callback that works through the strategy of its model.

    Attributes:
        tf_smb_order: `fit` sorts by it, whatever the order of the user's list; other callbacks
            have 50.
        one_of_a_kind: Whether a fit may have only one of this class.
        record: What the strategy keeps about the model's fits; set by `fit`, and None where no
            SMBStrategy runs it.
    """

    tf_smb_order = 50
    one_of_a_kind = True

    def __init__(self) -> None:
        super().__init__()
        self.record: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the model can exchange.

        Raises:
            FailedPreconditionError: The model was not made under an SMBStrategy.
        """
        if not _is_plain() and not hasattr(self.model.distribute_strategy, "exchanges"):
            raise FailedPreconditionError(
                f"{type(self).__name__}: model '{self.model.name}' was not made inside "
                "'with tf_smb.SMBStrategy().scope():' [SMB-E335]"
            )

    @property
    def strategy(self) -> Any:
        """The strategy of the model; None where this process trains by itself."""
        strategy = self.model.distribute_strategy
        return strategy if getattr(strategy, "exchanges", False) else None

    @property
    def mirror(self) -> Any:
        """The model and its segment; None where this process trains by itself, or not yet."""
        strategy = self.strategy
        if strategy is None or not strategy.has_mirror(self.model):
            return None
        mirror = strategy.mirror(self.model)
        return mirror if mirror.started else None


def _is_plain() -> bool:
    """Whether this is the plain side of `tf-smb run --compare`: the script as plain Keras."""
    return os.environ.get("TF_SMB_PLAIN") == "1"


def announce(line: str) -> None:
    """Prints a line, at once: output of workers is often a pipe or a file."""
    print(line, flush=True)


def acting_worker(segment: Any) -> int | None:
    """Returns who acts for all: the lowest live worker in training; None if there is none.

    Not simply the lowest: one that is through its epochs, and waits for the others, can do nothing
    for them any more.
    """
    return min(
        (m.worker_index for m in segment.members() if m.state == "live" and m.training),
        default=None,
    )


def slices(
    segment: Any, timeout_s: float, waiting_for: Callable[[], tuple[str, Any]]
) -> Iterator[None]:
    """Yields again and again while one waits; ends after `timeout_s` without progress.

    Args:
        segment: Whose changes are waited for.
        timeout_s: How long nothing in the progress may change.
        waiting_for: Returns what is waited for, in words, and its progress.
    """
    begun = said_at = progress_at = time.monotonic()
    quiet_s, last = _QUIET_S, None
    while True:
        yield
        what, progress = waiting_for()
        now = time.monotonic()
        if progress != last:
            last, progress_at = progress, now
        if now - progress_at > timeout_s:
            return
        if now - said_at > quiet_s:
            said_at, quiet_s = now, min(60.0, quiet_s * 3)
            announce(f"tf_smb: waiting for {what} since {now - begun:.0f} s")
        segment.wait(min(_SLICE_S, timeout_s))
