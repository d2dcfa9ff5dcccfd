"""Which case is whose, where several processes share the cases of one run: a case is taken by creating its file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


class Claims:
    """Files in a folder that all processes of a run see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, suite: str, case: str) -> Path:
        name = hashlib.sha256(json.dumps([suite, case]).encode()).hexdigest()
        return self.folder / f"{name[:24]}.taken"

    def free(self, suite: str, case: str) -> bool:
        """Has nobody taken it?"""
        return not self._file(suite, case).exists()

    def take(self, suite: str, case: str) -> bool:
        """Take it. False: somebody has."""
        try:
            os.close(os.open(self._file(suite, case), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
