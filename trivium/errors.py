"""What can go wrong, and the exit code that says whose turn it is.

0 is success, 2 is for what the caller can fix, 1 for work that failed, 130 and 143 for an interruption.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LONGEST = 1000  # characters of a sentence
_MOST = 100  # problems that one error lists


class TriviumError(Exception):
    """A failure in one sentence per line, of bounded length; the command line prints it without a traceback."""

    exit_code = 1

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(map(printable, sentences)))


class UserError(TriviumError):
    """The caller can fix it: the sentence says what to type next."""

    exit_code = 2


class ConfigError(UserError):
    """One or more problems in a configuration, each with its dotted key, all reported at once."""

    def __init__(self, *problems: str) -> None:
        more = len(problems) - _MOST
        if more > 1:
            problems = (*problems[:_MOST], f"and {more:,} problems more; correct these first")
        self.problems: tuple[str, ...] = tuple(map(printable, problems))
        super().__init__(*problems)

    @property
    def sentence(self) -> str:
        """All problems on one line, to stand inside another error."""
        return "; ".join(self.problems)

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


class FileError(UserError):
    """The operating system refused to read or write a file: no space, no permission, a broken disk."""


class Diverged(TriviumError):
    """The loss or a gradient stopped being finite; the weights are those of the last good step."""


class OutOfMemory(TriviumError):
    """The device has no memory left; the sentence names the setting to change."""


class Interrupted(TriviumError):
    """Ctrl-C (130) or SIGTERM (143) ended the run after a checkpoint was written."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def printable(text: str, most: int = LONGEST) -> str:
    """`text` on one line, with characters that a terminal would obey as escapes, cut in the middle if it is longer."""
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    tail = most // 4
    return text if len(text) <= most else f"{text[: most - tail - 5]} ... {text[-tail:]}"


def shown(value: object, most: int = 80) -> str:
    """The repr of a value for a sentence, cut: a file may hold a name of any length or depth."""
    try:
        text = repr(value[: most + 1] if isinstance(value, str | bytes) else value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    except Exception:  # an integer of more than 4,300 digits, or a stranger's __repr__
        text = f"a long {type(value).__name__}" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(names: Iterable[str], most: int = 10) -> str:
    """Names out of a file for a sentence: the first few, each of bounded length, and how many more there are."""
    every = list(names)
    first = [printable(name, 80) for name in every[:most]]
    return ", ".join(first) + (f" and {len(every) - most:,} more" if len(every) > most else "")


_HINTS = {
    errno.ENOSPC: "make room, or name another place",
    errno.EDQUOT: "make room, or name another place",
    errno.EACCES: "change who may use it, or name another place",
    errno.EPERM: "change who may use it, or name another place",
    errno.EROFS: "name a place on a disk that can be written",
    errno.ENAMETOOLONG: "name a shorter path",
}


def file_error(error: OSError, where: object = "") -> FileError:
    """The sentence for an OSError that nobody else answered; `where` is named if the error names no file."""
    name = final_name(os.fspath(error.filename)) if isinstance(error.filename, str | os.PathLike) else str(where)
    reason = error.strerror or str(error) or type(error).__name__
    hint = _HINTS.get(error.errno or 0)
    return FileError((f"{printable(name, 400)}: " if name else "") + reason + (f"; {hint}" if hint else ""))


def final_name(path: str) -> str:
    """A path as the user knows it: what is being prepared by the name that it is going to have."""
    shown = re.sub(r"(?:^|(?<=/))\.tmp-([^/]+)-\d+(?=/|$)", r"\1", path)
    return re.sub(r"/(?:\.new-model|\.model-lock|\.lock)(?=/|$)", "", shown)


def with_file_errors(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with a FileError in the place of a bare OSError; it names the last path among the arguments."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            given = [*args, *(kwargs[name] for name in ("source", "folder", "path", "runs") if name in kwargs)]
            paths = [value for value in given if isinstance(value, str | os.PathLike)]
            raise file_error(error, paths[-1] if paths else "") from error

    return call


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
