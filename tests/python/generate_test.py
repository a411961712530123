"""`tilemoe generate`: text from a checkpoint, and from nothing else."""

import fcntl
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

import small_run
from small_run import TILEMOE, tilemoe


class Generate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.TemporaryDirectory()
        cls.text, cls.run_folder = small_run.make(cls.shared.name)
        os.remove(cls.text)  # no text is needed

    @classmethod
    def tearDownClass(cls):
        cls.shared.cleanup()

    def text_of(self, *options, run=None):
        result = tilemoe("generate", run or self.run_folder, *options, text=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_a_seed_decides_the_text(self):
        text = self.text_of("--bytes", "80")
        self.assertEqual(len(text), 80)
        self.assertEqual(text, self.text_of("--bytes", "80", "--seed", "0"))
        self.assertEqual(text, self.text_of("--bytes", "80", "--threads", "1"))
        self.assertEqual(text[:50], self.text_of("--bytes", "50"))
        others = {self.text_of("--bytes", "80", "--seed", str(seed)) for seed in range(1, 4)}
        self.assertEqual(len(others - {text}), 3)

    def test_temperature_zero_draws_nothing(self):
        greedy = {self.text_of("--bytes", "60", "--temperature", "0", "--seed", str(seed))
                  for seed in range(3)}
        self.assertEqual(len(greedy), 1)
        self.assertNotEqual(greedy, {self.text_of("--bytes", "60", "--temperature", "2")})

    def test_stdout_is_the_prompt_and_the_text(self):
        prompt = b"a prompt of bytes \xff\xfe longer than the window of the model, which is 32 bytes"
        text = self.text_of(b"--prompt", prompt, "--bytes", "40")
        self.assertEqual((text[:len(prompt)], len(text)), (prompt, len(prompt) + 40))
        # Text that the model does not see any more has no effect.
        longer = self.text_of(b"--prompt", b"x" + prompt, "--bytes", "40")
        self.assertEqual(longer, b"x" + text)
        others = {self.text_of(b"--prompt", prompt + end, "--bytes", "40")[-40:]
                  for end in (b" ", b".", b"\n", b"qqqq", b" the end")}
        self.assertGreater(len(others), 1)

    def test_a_checkpoint_file_stands_for_itself(self):
        first = os.path.join(self.run_folder, "step-00000020.safetensors")
        newest = os.path.join(self.run_folder, f"step-{small_run.STEPS:08}.safetensors")
        self.assertEqual(self.text_of(run=newest), self.text_of())
        self.assertNotEqual(self.text_of(run=first), self.text_of())

    def test_nothing_is_written(self):
        before = small_run.contents(self.run_folder)
        self.text_of("--bytes", "5")
        self.assertEqual(small_run.contents(self.run_folder), before)

    def test_reads_a_run_that_is_trained(self):
        folder = os.open(self.run_folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.text_of("--bytes", "5")
        finally:
            os.close(folder)

    def test_only_the_weights_are_read_but_all_is_checked(self):
        checkpoint = os.path.join(self.shared.name, "damaged.safetensors")
        newest = os.path.join(self.run_folder, f"step-{small_run.STEPS:08}.safetensors")
        size = os.path.getsize(newest)
        for place in (40, size // 8, size - 10):  # the header, a weight, the optimizer's last number
            content = bytearray(pathlib.Path(newest).read_bytes())
            content[place] ^= 1
            pathlib.Path(checkpoint).write_bytes(content)
            result = tilemoe("generate", checkpoint)
            self.assertEqual((result.returncode, result.stdout), (1, ""), place)
            self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
            self.assertIn(checkpoint, result.stderr)

    def test_bytes_come_as_they_are_made(self):
        process = subprocess.Popen([TILEMOE, "generate", self.run_folder, "--bytes", "100000000"],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        start = time.monotonic()
        self.assertEqual(len(process.stdout.read(30)), 30)
        self.assertLess(time.monotonic() - start, 60)
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        self.assertEqual(process.wait(timeout=60), -signal.SIGINT)  # to a shell 130

    def test_a_closed_pipe_ends_it(self):
        shell = subprocess.run(["bash", "-c", 'set -o pipefail; "$0" generate "$1" --bytes 100000000 | '
                                "head -c 10", TILEMOE, self.run_folder], capture_output=True, timeout=60)
        self.assertEqual((shell.returncode, len(shell.stdout)), (141, 10))


if __name__ == "__main__":
    unittest.main()
