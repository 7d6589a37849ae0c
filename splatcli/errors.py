"""The tree of errors a user can meet; each one knows its exit code and its remedy.

    SplatError              70  a bug of ours, if raised bare
    ├── UsageError           2  the command line or the settings
    ├── SceneError           3  input data: photos, cameras, points
    ├── ResourceError        4  memory, GPU, compiler
    ├── ModelFileError       5  a checkpoint, PLY or other model file that cannot be trusted
    ├── VersionError         6  a file made by a version that this one cannot read
    ├── DistributedError     7  ranks disagree
    ├── OutputError          8  the place results go to: permission, space, already there
    ├── LockedError          9  another process holds the run
    └── DivergedError       10  training ran away

Interrupted runs leave with 129 (SIGHUP), 130 (SIGINT) or 143 (SIGTERM).
"""

from __future__ import annotations

from typing import ClassVar


class SplatError(Exception):
    """What went wrong, where, and what to do about it.

    what: one sentence, with what was found and what was expected.
    where: the file, line, byte, key or flag concerned.
    remedy: what the user can do, a command when there is one; where none is given, what usually helps.
    """

    exit_code: ClassVar[int] = 70
    code: ClassVar[str] = "E070"
    usual_remedy: ClassVar[str | None] = None

    def __init__(self, what: str, *, where: object = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.remedy = remedy or self.usual_remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what if self.where is None else f"{self.where}: {self.what}"
        return text if self.remedy is None else f"{text}\n  help: {self.remedy}"

    def lines(self) -> list[str]:
        """The message for people."""
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if self.remedy is not None:
            lines.append(f"  help: {self.remedy}")
        return lines

    def as_dict(self) -> dict[str, object]:
        """The same facts for ``--json``."""
        return {
            "error": self.code,
            "what": self.what,
            "where": self.where,
            "help": self.remedy,
            "exit_code": self.exit_code,
        }


class UsageError(SplatError):
    """The command line or the settings cannot be followed."""

    exit_code = 2
    code = "E002"


class SceneError(SplatError):
    """Photos, cameras or points are missing, broken or contradict each other."""

    exit_code = 3
    code = "E003"


class ResourceError(SplatError):
    """Memory, device or compiler is not there or does not suffice."""

    exit_code = 4
    code = "E004"


class ModelFileError(SplatError):
    """A model file is unreadable, damaged, or not what it says it is."""

    exit_code = 5
    code = "E005"
    usual_remedy = "get the file anew: copy it again, or export it again from the program that made it"


class VersionError(SplatError):
    """A file was made by a version that this one does not understand."""

    exit_code = 6
    code = "E006"


class DistributedError(SplatError):
    """Processes that should agree do not."""

    exit_code = 7
    code = "E007"


class OutputError(SplatError):
    """Results cannot be written where they were asked for."""

    exit_code = 8
    code = "E008"
    usual_remedy = "make room in that place, or check its permissions"


class LockedError(SplatError):
    """Another process is using the run."""

    exit_code = 9
    code = "E009"


class DivergedError(SplatError):
    """Training ran away and could not be brought back."""

    exit_code = 10
    code = "E010"
