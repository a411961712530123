"""Stand-ins for a GPU machine: its tools, the programs of a build, and wheels."""

import pathlib
import tempfile
import unittest
import zipfile

INFO = """echo '{"version": "0.2.0", "commit": "0123abcd", "backends": [{"name": "cpu"}]}'"""


class StandIns(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.program("tilemoe", f'if [ "$1" = info ]; then {INFO}; else echo "3 cases, 0 failures"; fi')
        self.gpus(1)

    def program(self, name, script, place="programs"):
        file = self.folder / place / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\necho $0 >>{self.folder}/ran\n{script}\n")
        file.chmod(0o755)

    def gpus(self, count, mib=81559):
        answer = f'[[ "$1" = *memory.total* ]] && echo "{mib} MiB" || echo "Stand-in, 1.0, 100 MHz, 5 W"'
        self.program("nvidia-smi", "\n".join([answer] * count), place="tools")

    def runs_of(self, name):
        return sum(line.endswith("/" + name) for line in (self.folder / "ran").read_text().split())

    def wheel(self, name, **files):
        """A wheel with these modules; what a test calls torch is only there to be found."""
        file = self.folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as archive:
            for module, source in files.items():
                archive.writestr(f"{module}.py", source)
            folder = f"{name}-1.0.dist-info"
            archive.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{folder}/RECORD", "")
        return file
