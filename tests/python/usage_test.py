"""Wrong command lines: one sentence on standard error, the status that is documented, and nothing done.

So for output that nobody can take: no command says that all is well with a full disk.
"""

import os
import pathlib
import subprocess
import tempfile
import unittest

import small_run
from small_run import TILEMOE, tilemoe

FAILED, WRONG_USAGE = 1, 2
# The arguments, the status, and a part of the sentence. {run} and {text} are those of a small run.
# On a machine without a GPU: of a build without CUDA, and of one with it.
NO_CUDA = ("TileMoE was built without CUDA; install the CUDA wheel", "use the CPU backend")
CASES = [
    ("", WRONG_USAGE, "a command is required"),
    ("trian", WRONG_USAGE, "unknown command trian; did you mean train?"),
    ("generat {run}", WRONG_USAGE, "did you mean generate?"),
    ("zzzzzz", WRONG_USAGE, "unknown command zzzzzz; `tilemoe --help` lists"),
    ("bogus --help", WRONG_USAGE, "unknown command bogus; `tilemoe --help` lists"),
    ("--help trian", WRONG_USAGE, "unknown command trian; did you mean train?"),
    ("chekc -h", WRONG_USAGE, "unknown command chekc; did you mean check?"),
    ("trian --version", WRONG_USAGE, "unknown command trian; did you mean train?"),
    ("help trian", WRONG_USAGE, "unknown command trian; did you mean train?"),
    ("help train bench", WRONG_USAGE, "unknown argument bench"),
    ("--hepl", WRONG_USAGE, "unknown option --hepl; did you mean --help?"),
    ("train --stpes 5", WRONG_USAGE, "unknown option --stpes; did you mean --steps?"),
    ("train --save_every=5", WRONG_USAGE, "unknown option --save_every; did you mean --save-every?"),
    ("train --quack", WRONG_USAGE, "unknown option --quack; `tilemoe train --help` lists"),
    ("train more", WRONG_USAGE, "unknown argument more"),
    ("train --steps", WRONG_USAGE, "--steps"),
    ("train --steps many", WRONG_USAGE, "--steps: expected an integer, got 'many'"),
    ("train --steps 0 --text {text}", WRONG_USAGE, "--steps must be in [1, "),
    ("train --save-every 0 --text {text}", WRONG_USAGE, "--save-every must be in [1, 1099511627776], got 0"),
    ("train --keep -1 --text {text}", WRONG_USAGE, "--keep must be in [1, "),
    ("train --warm-up 60 --steps 50 --text {text}", WRONG_USAGE, "--warm-up must be in [0, 50]"),
    ("train --width 20 --text {text}", WRONG_USAGE, "--width must be a positive multiple of"),
    ("train --routing neerest", WRONG_USAGE, "neerest not in {{top-k,nearest"),
    ("train --threads 99999", WRONG_USAGE, "--threads"),
    ("train --dense --experts-off --text {text}", WRONG_USAGE, "exclude each other"),
    ("train --sample 400 --resume {run}", WRONG_USAGE, "unknown option --sample"),
    ("train --resume {run} --seed 7", WRONG_USAGE, "seed: 0 in the checkpoint, 7 now"),
    ("train --resume {run} --steps 20", WRONG_USAGE, "--steps must be >= 30, the step of"),
    ("train --resume {run} --width 64 --steps 60", WRONG_USAGE, "width: 48 in the checkpoint, 64 now"),
    ("train --resume {run} --length 16 --batch 4", WRONG_USAGE, "length: 32 in the checkpoint, 16 now"),
    *((f"train {given}", WRONG_USAGE, given.split()[0]) for given in (
        "--clip nan", "--seed 99999999999999999999999", "--steps 010", "--steps 0x10", "--lr inf",
        "--lr 01.5", "--keep +3", "--threads 1e1", "--batch 1.5")),
    ("train --resume nowhere", FAILED, "no checkpoint found at nowhere"),
    ("train --text nowhere.txt", FAILED, "cannot read nowhere.txt: No such file or directory"),
    ("train --text {run}", FAILED, "it is a folder"),
    ("train --text {text} /dev/null", FAILED, "/dev/null is empty"),
    ("train --text {text} --width 16384 --experts 65536 --expert-width 16384", FAILED,
     "GB of memory (parameters "),
    ("train --text {text} --layers 1000000 --width 4096", FAILED, "GB are free"),
    ("train --text {text} --width 1048576 --experts 1048576 --expert-width 1048576", FAILED,
     "bytes of W1 overflows"),
    ("generate", WRONG_USAGE, "run is required"),
    ("generate {run} --bytes 0", WRONG_USAGE, "--bytes must be >= 1, got 0"),
    ("generate {run} --temperature -1", WRONG_USAGE, "--temperature must be >= 0 (0 = greedy), got -1"),
    ("generate {run} --temperature nan", WRONG_USAGE, "--temperature: expected a finite number, got 'nan'"),
    ("generate {run} --seed -1", WRONG_USAGE, "--seed must be >= 0, got -1"),
    ("generate {run} --promt Moon", WRONG_USAGE, "did you mean --prompt?"),
    ("generate nowhere", FAILED, "no checkpoint found at nowhere"),
    ("generate {text}", FAILED, "not a safetensors file"),
    ("plot", WRONG_USAGE, "log is required"),
    ("plot nope.jsonl", FAILED, "cannot read nope.jsonl: No such file or directory"),
    ("plot .", FAILED, "cannot read ./log.jsonl: No such file or directory"),
    ("plot nope.jsonl --format gif", WRONG_USAGE, "gif"),
    ("check no-such-case", WRONG_USAGE, "no case matches"),
    ("check --repeat -1", WRONG_USAGE, "--repeat"),
    ("bench", WRONG_USAGE, "`python -m tilemoe bench` compares the layer"),
    ("bench --config cpu-t512", WRONG_USAGE, "`tilemoe_kernels` times its kernels"),
    ("check --device cuda", FAILED, NO_CUDA),
    ("info --jsno", WRONG_USAGE, "did you mean --json?"),
]


class Usage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.TemporaryDirectory()
        cls.text, cls.run_folder = small_run.make(cls.shared.name)

    @classmethod
    def tearDownClass(cls):
        cls.shared.cleanup()

    def test_wrong_command_lines_are_answered_with_one_sentence(self):
        before = small_run.contents(self.shared.name)
        for line, status, sentence in CASES:
            with self.subTest(line), tempfile.TemporaryDirectory() as empty:
                words = line.format(run=self.run_folder, text=self.text).split()
                result = tilemoe(*words, cwd=empty)
                self.assertEqual(result.returncode, status, result.stderr)
                self.assertEqual(result.stdout, "")
                self.assertRegex(result.stderr, r"\Atilemoe: error: [^\n]+\n\Z")
                sentences = (sentence,) if isinstance(sentence, str) else sentence
                self.assertTrue(any(one.replace("{{", "{") in result.stderr for one in sentences), result.stderr)
                self.assertLess(len(result.stderr), 400)
                self.assertNotRegex(result.stderr, r"\.cpp|terminate")  # the user's, not the library's
                self.assertEqual(os.listdir(empty), [])
        self.assertEqual(small_run.contents(self.shared.name), before)

    def test_help_lists_the_statuses(self):
        result = tilemoe("--help")
        self.assertEqual(result.returncode, 0)
        for status in ("0 done", "1 the work failed", "2 wrong usage", "130", "143", "129", "141"):
            self.assertIn(status, result.stdout)

    def test_the_scripts_print_their_help_and_nothing_else_happens(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        with tempfile.TemporaryDirectory() as tools:
            for tool in ("cmake", "apt-get", "ctest"):
                file = pathlib.Path(tools, tool)
                file.write_text(f"#!/bin/sh\necho {tool} was called\nexit 1\n")
                file.chmod(0o755)
            env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
            for script in ("test.sh", "train.sh"):
                for option in ("--help", "-h"):
                    with self.subTest(script=script, option=option):
                        result = subprocess.run([root / script, option], text=True, capture_output=True,
                                                env=env, timeout=60)
                        self.assertEqual((result.returncode, result.stderr), (0, ""))
                        self.assertTrue(result.stdout.startswith("usage: "), result.stdout)
                        self.assertNotIn("was called", result.stdout)

    def test_output_that_cannot_be_written_is_an_error(self):
        commands = ["--help", "--version", "train --help", "info", "info --json", "check --list",
                    "check one-token/float32",
                    f"generate {self.run_folder} --bytes 3", f"train --resume {self.run_folder}"]
        for command in commands:
            with self.subTest(command), open("/dev/full", "w") as full:
                result = subprocess.run([TILEMOE, *command.split()], stdout=full, stderr=subprocess.PIPE,
                                        text=True, timeout=300)
                self.assertEqual(result.returncode, FAILED, result.stderr)
                self.assertIn("tilemoe: error: cannot write the output", result.stderr)


if __name__ == "__main__":
    unittest.main()
