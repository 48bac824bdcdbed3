"""What tuning refuses, as one sentence for the user."""

from __future__ import annotations

from blocksparse.check.validators import UserError


class TuneError(UserError, ValueError):
    """A model cannot be tuned as asked, or a plan cannot be used; the message says why and what to do."""
