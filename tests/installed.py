"""Run the python blocks of a page with the installed package alone: python -I tests/installed.py README.md"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import blocksparse

if Path(sys.prefix) not in Path(blocksparse.__file__).parents:
    sys.exit(f"this is not the installed package: {blocksparse.__file__}")
blocks = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), re.MULTILINE | re.DOTALL)
if not blocks:
    sys.exit(f"no python block in {sys.argv[1]}")
for block in blocks:
    exec(compile(block, sys.argv[1], "exec"), {"__name__": "__main__"})
