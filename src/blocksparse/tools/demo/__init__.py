"""`blocksparse demo`: a real model reads a real text with each preset; a table, a JSON file and a picture.

`persuasion.txt` is Jane Austen, *Persuasion* (1818). Public domain. The text of Debian's package
`r-cran-janeaustenr`, unwrapped: one paragraph a line, a blank line between.
"""

from pathlib import Path

from blocksparse.check.validators import UserError

TEXT = Path(__file__).with_name("persuasion.txt")
"""Default text of the demo."""


def read_text(path: Path, option: str) -> str:
    """The text of the file that was given as `option`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{option}' must be a readable UTF-8 text: {path}: {error}") from None
