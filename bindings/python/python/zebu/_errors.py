"""What is raised. Every class is an ``OSError`` with ``errno`` and a message of one line, and with the
``filename`` of what could not be opened, if that is what failed."""

from __future__ import annotations


class Error(OSError):
    """A failure of an image, or of the storage below it."""

    def __str__(self) -> str:
        return str(self.strerror or super().__str__())


class NotFoundError(Error, FileNotFoundError):
    """A file does not exist: ``filename``, which may be a backing file of the one that was asked for."""


class NotPermittedError(Error, PermissionError):
    """A write to an image that is open for reading, or what the permissions of a file forbid."""


class LockedError(Error):
    """Another process uses the image."""


class CorruptError(Error):
    """The image is damaged."""


class DirtyError(Error):
    """The image was not closed by its last writer, and must be repaired first."""


class OutOfRangeError(Error, ValueError):
    """The request is not inside the disk."""


class NoSpaceError(Error):
    """There is no space left on the storage."""


class UnsupportedError(Error):
    """The image, or the request, needs something that is not supported."""


class RefusedError(Error, ValueError):
    """The request makes no sense, or the rules for untrusted images forbid it."""


class LimitError(Error):
    """An untrusted image goes beyond one of its limits."""
