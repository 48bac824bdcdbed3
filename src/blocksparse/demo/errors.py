"""What the demo refuses, as one sentence for the user."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot run as asked; the message says why and what to do."""
