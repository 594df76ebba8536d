"""Errors that are the user's to mend."""


class UserError(Exception):
    """One line that says what is wrong and what to do; the command exits with ``status``.

    Raised before anything was changed.
    """

    status = 1


class UsageError(UserError):
    """The command line itself does not parse."""

    status = 2
