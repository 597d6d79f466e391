"""What can go wrong, and the exit code that says whose turn it is.

0 is success, 2 is for what the caller can fix, 1 for work that failed, 130 and 143 for an interruption.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence


class TriviumError(Exception):
    """A failure told in one sentence; the command line prints it without a traceback."""

    exit_code = 1


class UserError(TriviumError):
    """The caller can fix it: the sentence says what to type next."""

    exit_code = 2


class ConfigError(UserError):
    """One or more problems in a configuration, each with its dotted key, all reported at once."""

    def __init__(self, *problems: str) -> None:
        self.problems: tuple[str, ...] = problems
        super().__init__("\n".join(problems))

    def under(self, key: str) -> ConfigError:
        """The same problems as seen from the parent of `key`."""
        return ConfigError(*(_join(key, problem) for problem in self.problems))

    @staticmethod
    def gather(errors: Sequence[ConfigError]) -> None:
        """Raise all of `errors` as one, if there are any."""
        if errors:
            seen = dict.fromkeys(problem for error in errors for problem in error.problems)
            raise ConfigError(*seen)


class DataError(UserError):
    """A text, shard or tokenizer file cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint or model file is missing, damaged or meant for something else."""


class BusyError(UserError):
    """Another process is working in the same folder."""


class RequestError(UserError):
    """A model was asked for something that it cannot do."""


class Diverged(TriviumError):
    """The loss or a gradient stopped being finite; the weights are those of the last good step."""


class OutOfMemory(TriviumError):
    """The device has no memory left; the sentence names the setting to change."""


class Interrupted(TriviumError):
    """Ctrl-C (130) or SIGTERM (143) ended the run after a checkpoint was written."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def pip_install(*packages: str) -> str:
    """The command that installs packages for the Python that runs this, whether its environment is active or not."""
    own, found = os.path.abspath(sys.executable or "python"), shutil.which("python")
    if found is not None and os.path.abspath(found) == own:
        own = "python"
    with contextlib.suppress(OSError):  # the current folder may be gone
        own = own.removeprefix(os.getcwd() + os.sep)
    return f"{shlex.quote(own)} -m pip install {' '.join(packages)}"


def _join(key: str, problem: str) -> str:
    """`key` in front of a problem: with a dot if the problem starts with a dotted key of its own."""
    head = problem.split(":", 1)[0]
    keyed = ":" in problem and " " not in head
    return f"{key}.{problem}" if keyed else f"{key}: {problem}"
