"""The one kind of error that a user can mend, and how it is told.

A message is `<subject> must <rule>, got <value>`, in lower case, with the value shown; the hint is a line of its own.
Anything that is not an `MhaError` is a bug of ours.
"""

EXIT_FAILED, EXIT_USAGE, EXIT_CHECK = 1, 2, 3


class MhaError(Exception):
    """Something that the user can mend.

    `code` is a stable word for programs, `exit_code` what the process answers (1 could not, 2 usage, 3 the check says
    no), `path` the file it is about. All texts may hold untrusted characters: whoever prints them escapes them.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str = "failed",
        exit_code: int = EXIT_FAILED,
        path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.hint, self.code, self.exit_code, self.path = message, hint, code, exit_code, path


class UsageError(MhaError):
    """An option or argument that cannot mean anything: decided before any work, exit code 2."""

    def __init__(self, message: str, *, hint: str | None = None, path: str | None = None) -> None:
        super().__init__(message, hint=hint, code="usage", exit_code=EXIT_USAGE, path=path)
