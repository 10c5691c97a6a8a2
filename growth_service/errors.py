"""The errors that people see, by who has to act.

Each message says what is wrong, which value, what is allowed, and what to do.
The command line turns them into exit codes; nothing else catches them.
"""


class GrowthError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class UserError(GrowthError, ValueError):
    """The input is wrong: a job file, a flag, an argument. Exit code 2."""

    exit_code = 2


class JobFileError(UserError):
    """A job file is missing, is not YAML, or does not describe a job."""


class DataNotFoundError(UserError):
    """A data set is not on this machine; the message names the ways to get it."""


class ResourceError(UserError):
    """The job asks for more than the machine or cluster can ever give."""


class SiteError(UserError):
    """A path does not name a place where a block can be inserted."""


class NotFiniteError(UserError):
    """A loss or a feature is NaN or infinite: the network diverged, or its inputs are not finite."""


class CheckpointError(GrowthError):
    """A checkpoint is damaged, incomplete, or of an unknown format version."""


class RankDisagreementError(GrowthError):
    """Two ranks hold different weights where they must be equal."""


class WorkFailedError(GrowthError):
    """The work itself failed (a trial, a worker, a server); state is kept."""
