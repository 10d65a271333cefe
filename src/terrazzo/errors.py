"""The error tree.

    TerrazzoError
    ├── BadInput     a plan, config, model or data set that cannot work: fix the input
    │   └── Damaged  a checkpoint that is not what was written: use an older one
    ├── Misuse       a correct object used at the wrong moment: fix the calling code
    │   └── RanksApart  ranks that came to one exchange with different things
    ├── ConnectionLost  another rank has ended or failed while this one exchanged with it
    ├── TimedOut     other ranks have not come to an exchange in time
    ├── SaveFailed   a checkpoint could not be written; earlier ones are intact
    │   └── FolderLost  the folder of a run was moved away under it
    ├── SwapFailed   a state in a swap file cannot be had any more; checkpoints are
    │   └── SwapChanged  it holds other bytes than were written
    ├── Diverged     the numbers left the range that training can recover from
    │   └── CopiesDiffer  of one state, on ranks that should hold the same
    └── Corrupted    a processor, memory or a drive is at fault: SwapChanged, CopiesDiffer, and more

Every message is one paragraph that names the value found, what was expected, and the edit that fixes it.
Assertions are reserved for bugs in Terrazzo itself.
"""

from __future__ import annotations

from terrazzo.exit_codes import BAD_INPUT, CORRUPTED, DIVERGED, FAILED

__all__ = [
    "BY_NAME",
    "BadInput",
    "ConnectionLost",
    "CopiesDiffer",
    "Corrupted",
    "Damaged",
    "Diverged",
    "FolderLost",
    "Misuse",
    "RanksApart",
    "SaveFailed",
    "SwapChanged",
    "SwapFailed",
    "TerrazzoError",
    "TimedOut",
    "lost_a_rank",
    "says_all",
    "timed_out",
]


class TerrazzoError(Exception):
    """Base of every error that Terrazzo raises on purpose.

    Attributes:
        exit_code: the exit code of a run that it ends.
        says_all: whether the message is enough, so that no traceback is shown.
        lasts: whether a run that is started again would end in the same way.
    """

    exit_code = FAILED
    says_all = False
    lasts = False


class BadInput(TerrazzoError, ValueError):
    """The plan, configuration, model or data cannot work; nothing has been started or changed."""

    exit_code = BAD_INPUT
    says_all = lasts = True


class Damaged(BadInput):
    """A checkpoint's bytes are not those that were written, or some are missing; nothing has been changed."""


class Misuse(TerrazzoError, RuntimeError):
    """A valid object was used at a moment when it cannot answer, such as reading a sharded parameter."""

    lasts = True


class RanksApart(Misuse):
    """Ranks have not run the same, and what they exchange does not belong together; no step uses it.

    Where an exchange itself shows that, all ranks of the mesh raise this, and have no connections from then on: what
    comes next raises it again. What else ranks compare, such as a state dict that they load, leaves connections as they
    are.
    """


class ConnectionLost(TerrazzoError, ConnectionError, RuntimeError):
    """Another rank has ended or failed while this one exchanged something with it; what it has printed says why."""

    says_all = True


class TimedOut(TerrazzoError, ConnectionError, RuntimeError):
    """Other ranks have not come to an exchange in the time of its process group; the message says where each waited."""

    says_all = True


class SaveFailed(TerrazzoError, RuntimeError):
    """A checkpoint could not be written completely; it is not visible, and earlier ones are intact."""

    says_all = True


class FolderLost(SaveFailed):
    """The folder that a run writes to was renamed, removed or replaced; nothing more is written there."""

    lasts = True


class SwapFailed(TerrazzoError, RuntimeError):
    """A state could not be written to a swap file, or read back as it was; checkpoints are intact."""

    says_all = True


class Diverged(TerrazzoError, ArithmeticError):
    """A loss or gradient became non-finite and no policy allows training to go on."""

    exit_code = DIVERGED
    says_all = lasts = True


class Corrupted(TerrazzoError):
    """A rank computes wrongly, or memory or a drive has changed what was written; earlier checkpoints are intact."""

    exit_code = CORRUPTED
    lasts = True


class CopiesDiffer(Diverged, Corrupted):
    """Ranks that should hold the same state do not; the message names those that are not as most are."""

    exit_code = CORRUPTED


class SwapChanged(SwapFailed, Corrupted):
    """A swap file holds other bytes than were written, by `offload.digest`."""


BY_NAME: dict[str, type[TerrazzoError]] = {
    name: each for name, each in globals().items() if isinstance(each, type) and issubclass(each, TerrazzoError)
}
"""The classes of the error tree by name, for errors that other ranks report."""


def says_all(error: BaseException) -> bool:
    """Whether an error's message is enough, so that it is shown without a traceback."""
    return isinstance(error, TerrazzoError) and error.says_all


def lost_a_rank(error: BaseException) -> bool:
    """Whether an error says that another rank has ended or failed; gloo's have no class of their own."""
    return isinstance(error, ConnectionLost) or (_is_of_gloo(error) and not timed_out(error))


def timed_out(error: BaseException) -> bool:
    """Whether an error says that other ranks have not come in time."""
    return isinstance(error, TimedOut) or (_is_of_gloo(error) and any(word in str(error) for word in _OF_TIME))


_OF_TIME = ("Timed out", "Application timeout")
"""What gloo says of time that is over: where it was waited, and elsewhere in the process, to which it closes all."""


def _is_of_gloo(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo/transport", _OF_TIME[1]))
