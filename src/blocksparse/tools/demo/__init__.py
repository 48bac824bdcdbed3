"""`blocksparse demo`: a real model reads a real text with each preset; a table, a JSON file and a picture.

`persuasion.txt` is Jane Austen, *Persuasion* (1818). Public domain. The text of Debian's package
`r-cran-janeaustenr`, unwrapped: one paragraph a line, a blank line between.
"""

from pathlib import Path

TEXT = Path(__file__).with_name("persuasion.txt")
"""Default text of the demo."""
