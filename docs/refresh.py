"""Runs the commands of docs/tutorial.md and puts what they print into it: `python docs/refresh.py [PART OF A COMMAND]`.

From the root of a clone, with fedfp8[cli,plots,digits,flower] installed; four minutes for all. Runs go to a temporary
folder, the plot of `compare` to docs/figures.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/tutorial.md"
BLOCK = re.compile(r"(?<=^```console\n)\$ ([^\n]*)\n.*?(?=^```)", re.M | re.S)
ROUND = re.compile(r"^\d+/\d+ .*\n", re.M)  # lines of rounds of `compare`, which the page leaves out


def printed(command: str, folder: Path) -> str:
    words = shlex.split(command)
    words = [sys.executable, *(["-m", *words] if words[0] == "fedfp8" else [str(ROOT / words[1])])]
    done = subprocess.run(words, cwd=folder, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout}{done.stderr}")
    return ROUND.sub("", done.stdout + done.stderr).strip()


def main(part: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:

        def again(block: re.Match[str]) -> str:
            return f"$ {block[1]}\n{printed(block[1], Path(folder))}\n" if part in block[1] else block[0]

        PAGE.write_text(BLOCK.sub(again, PAGE.read_text()))
        plot = Path(folder) / "runs/compare-digits/compare.png"
        if plot.exists():
            shutil.copy(plot, ROOT / "docs/figures/tutorial-compare.png")


if __name__ == "__main__":
    main(*sys.argv[1:2])
