"""What a command refuses, as one sentence for the user."""

from __future__ import annotations


class UserError(Exception):
    """The command cannot run as asked; the message says why and what to do."""
