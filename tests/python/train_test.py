"""`tilemoe train` from outside: stopped, resumed, refused, out of room."""

import array
import math
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import kill_resume

TILEMOE = os.environ["TILEMOE"]

SIZES = ["--layers", "1", "--width", "48", "--experts", "8", "--top-k", "2", "--expert-width", "32",
         "--heads", "3", "--head-width", "16", "--batch", "2", "--length", "32", "--warm-up", "5"]
STEPS = 30
NEWEST = f"step-{STEPS:08}.safetensors"


def limit_file_size():
    """Room for the log and for half a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))


class Train(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.TemporaryDirectory()
        cls.text = os.path.join(cls.shared.name, "text.txt")
        kill_resume.make_text(cls.text, kill_resume.random.Random(1))
        cls.alone = os.path.join(cls.shared.name, "alone")
        subprocess.run(cls.command("--out", cls.alone), check=True, stdout=subprocess.DEVNULL)

    @classmethod
    def tearDownClass(cls):
        cls.shared.cleanup()

    @classmethod
    def command(cls, *options, steps=STEPS, save_every=5, keep=3):
        return [TILEMOE, "train", "--text", cls.text, "--steps", str(steps), "--save-every",
                str(save_every), "--keep", str(keep), *SIZES, *options]

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.run_folder = os.path.join(temporary.name, "run")

    def copy_of_alone(self):
        shutil.copytree(self.alone, self.run_folder)

    def files(self):
        return sorted(os.listdir(self.run_folder))

    def contents(self):
        """Names and bytes of the checkpoints."""
        contents = {}
        for name in kill_resume.checkpoints(self.run_folder):
            with open(os.path.join(self.run_folder, name), "rb") as file:
                contents[name] = file.read()
        return contents

    def resume(self, *options, **arguments):
        """Ends well, and with the very run that was left alone."""
        result = self.result([TILEMOE, "train", "--resume", self.run_folder, *options], **arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        kill_resume.compare(self.alone, self.run_folder)

    def result(self, command, **arguments):
        return subprocess.run(command, text=True, capture_output=True, timeout=300, **arguments)

    def error(self, *options, **arguments):
        result = self.result([TILEMOE, "train", *options], **arguments)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertTrue(result.stderr.startswith("tilemoe: error: "), result.stderr)
        return result.stderr

    def wait_for_checkpoint(self, process):
        deadline = time.monotonic() + 120
        while not kill_resume.checkpoints(self.run_folder):
            self.assertTrue(process.poll() is None and time.monotonic() < deadline)
            time.sleep(0.001)

    def test_signals_save_and_end_well(self):
        long = 100_000
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A shell starts a background job with SIGINT ignored, nohup a program with SIGHUP.
            process = subprocess.Popen(self.command("--out", self.run_folder, steps=long),
                                       text=True, stdout=subprocess.PIPE,
                                       preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
            self.wait_for_checkpoint(process)
            process.send_signal(number)
            output, _ = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 0)
            self.assertIn(f"tilemoe train --resume {self.run_folder}", output)
            newest = kill_resume.step_of(kill_resume.checkpoints(self.run_folder)[-1])
            logged = max(step for _, step in kill_resume.read_steps(self.run_folder))
            self.assertEqual(newest, logged)  # no step is lost
            shutil.rmtree(self.run_folder)

    def test_a_closed_pipe_saves_and_ends_well(self):
        process = subprocess.Popen(self.command("--out", self.run_folder, steps=100_000), text=True,
                                   stdout=subprocess.PIPE)
        process.stdout.readline()
        process.stdout.close()
        self.assertEqual(process.wait(timeout=120), 0)
        newest = kill_resume.step_of(kill_resume.checkpoints(self.run_folder)[-1])
        self.assertEqual(newest, max(step for _, step in kill_resume.read_steps(self.run_folder)))

    def test_ignored_signals_stay_ignored(self):
        for number in (signal.SIGINT, signal.SIGHUP):
            process = subprocess.Popen(self.command("--out", self.run_folder, steps=300),
                                       stdout=subprocess.DEVNULL,
                                       preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
            self.wait_for_checkpoint(process)
            process.send_signal(number)
            self.assertEqual(process.wait(timeout=120), 0)
            self.assertEqual(kill_resume.checkpoints(self.run_folder)[-1], "step-00000300.safetensors")
            shutil.rmtree(self.run_folder)

    def test_a_stopped_run_goes_on_bit_for_bit(self):
        # Stopped wherever the signal meets it, or not at all when it is fast.
        process = subprocess.Popen(self.command("--out", self.run_folder), stdout=subprocess.DEVNULL)
        self.wait_for_checkpoint(process)
        process.send_signal(signal.SIGINT)
        self.assertIn(process.wait(timeout=120), (0, -signal.SIGINT))
        self.resume()

    def test_earlier_checkpoints_lead_to_the_same_end(self):
        self.copy_of_alone()
        first, second, newest = kill_resume.checkpoints(self.run_folder)
        os.remove(os.path.join(self.run_folder, newest))
        result = self.result([TILEMOE, "train", "--save-every", "5", "--keep", "3", "--resume",
                              os.path.join(self.run_folder, first)])
        self.assertEqual(result.returncode, 0, result.stderr)
        kill_resume.compare(self.alone, self.run_folder)

    def test_changed_options_are_named(self):
        error = self.error("--resume", self.alone, "--lr", "0.5", "--seed", "7", "--layers", "1")
        self.assertRegex(error, r"lr: \S+ in the checkpoint, 0\.5 now")
        self.assertRegex(error, r"seed: 0 in the checkpoint, 7 now")
        self.assertNotIn("layers", error)

    def test_another_text_is_refused(self):
        with open(self.text, "rb") as file:
            before = file.read()
        try:
            with open(self.text, "ab") as file:
                file.write(b"more")
            self.assertIn("SHA-256", self.error("--resume", self.alone))
        finally:
            with open(self.text, "wb") as file:
                file.write(before)

    def test_a_damaged_checkpoint_names_the_one_before(self):
        self.copy_of_alone()
        newest = os.path.join(self.run_folder, NEWEST)
        size = os.path.getsize(newest)
        with open(newest, "r+b") as file:
            file.seek(size - 10)
            file.write(b"spoilt")
        self.assertIn("damaged", self.error("--resume", self.run_folder))
        os.truncate(newest, size // 2)
        error = self.error("--resume", self.run_folder)
        self.assertIn(f"{newest}: truncated", error)
        advice = error.strip().split("\n")[-1].split()
        self.assertEqual(advice[0], "--resume")
        result = self.result([TILEMOE, "train", *advice, "--save-every", "5", "--keep", "3"])
        self.assertEqual(result.returncode, 0, result.stderr)
        kill_resume.compare(self.alone, self.run_folder)

    def test_foreign_files_are_refused(self):
        self.copy_of_alone()
        foreign = os.path.join(self.run_folder, "foreign.safetensors")
        with open(foreign, "wb") as file:
            file.write(b"\x02\0\0\0\0\0\0\0{}")
        self.assertIn("no checkpoint of", self.error("--resume", foreign))
        self.assertIn("not a safetensors file", self.error("--resume", self.text))
        self.assertIn("there is no checkpoint", self.error("--resume", foreign + "x"))

    def test_a_full_disk_leaves_the_last_checkpoint(self):
        self.copy_of_alone()
        first, second, newest = kill_resume.checkpoints(self.run_folder)
        os.remove(os.path.join(self.run_folder, second))
        os.remove(os.path.join(self.run_folder, newest))
        before = self.contents()
        error = self.error("--resume", self.run_folder, preexec_fn=limit_file_size)
        self.assertIn("was not saved: cannot write", error)
        self.assertEqual(self.contents(), before)
        self.assertEqual(self.files(), ["log.jsonl", "run.json", first])
        self.resume()

    def test_a_folder_is_for_one_run(self):
        process = subprocess.Popen(self.command("--out", self.run_folder, steps=100_000),
                                   stdout=subprocess.DEVNULL)
        try:
            self.wait_for_checkpoint(process)
            self.assertIn("another process", self.error("--resume", self.run_folder))
        finally:
            process.kill()
            process.wait()
        before = self.contents()
        self.assertIn("--resume", self.error("--out", self.run_folder))
        self.assertEqual(self.contents(), before)

    def test_a_resumed_run_keeps_what_it_was_told_to_keep(self):
        log = os.path.join(self.shared.name, "elsewhere.jsonl")
        command = self.command("--out", self.run_folder, "--log", log, keep=100)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        steps = [f"step-{step:08}.safetensors" for step in range(5, STEPS + 1, 5)]
        self.assertEqual(kill_resume.checkpoints(self.run_folder), steps)
        with open(log, encoding="utf-8") as file:
            lines = file.read().count("\n")
        first = os.path.join(self.run_folder, steps[0])
        for options in ([], ["--keep", "100"]):
            result = self.result([TILEMOE, "train", "--resume", first, *options])
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(kill_resume.checkpoints(self.run_folder), steps)
        with open(log, encoding="utf-8") as file:
            self.assertGreaterEqual(file.read().count("\n"), lines)
        self.assertNotIn("log.jsonl", self.files())

    def test_checkpoints_of_others_are_left_alone(self):
        self.copy_of_alone()
        names = kill_resume.checkpoints(self.run_folder)
        os.remove(os.path.join(self.run_folder, "run.json"))
        for name in names[1:]:
            os.remove(os.path.join(self.run_folder, name))
        others = [f"step-{step:08}.safetensors" for step in (1, 2, 3)]
        for name in others:
            with open(os.path.join(self.run_folder, name), "wb") as file:
                file.write(b"mine")
        result = self.result([TILEMOE, "train", "--save-every", "5", "--keep", "1", "--resume",
                              self.run_folder])
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(kill_resume.checkpoints(self.run_folder), [*others, names[0], NEWEST])

    def test_the_text_is_known_by_its_contents(self):
        self.copy_of_alone()
        os.remove(os.path.join(self.run_folder, NEWEST))
        same = os.path.join(self.shared.name, ".", "text.txt")
        result = self.result([TILEMOE, "train", "--resume", self.run_folder, "--text", same])
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(kill_resume.read_steps(self.run_folder), kill_resume.read_steps(self.alone))

    def test_a_log_may_not_be_the_text_nor_any_other_file(self):
        with open(self.text, "rb") as file:
            before = file.read()
        link = os.path.join(self.shared.name, "link.txt")
        os.symlink(self.text, link)
        self.addCleanup(os.remove, link)
        for log in (self.text, link, os.path.join(self.shared.name, "..",
                                                  os.path.basename(self.shared.name), "text.txt")):
            command = self.command("--out", self.run_folder, "--log", log)[2:]
            self.assertIn("--log", self.error(*command))
        with open(self.text, "rb") as file:
            self.assertEqual(file.read(), before)

    def test_a_log_may_be_a_device(self):
        self.copy_of_alone()
        self.assertEqual(self.result([TILEMOE, "train", "--log", "/dev/null", "--resume",
                                      self.run_folder]).returncode, 0)

    def test_a_damaged_log_is_not_cut(self):
        self.copy_of_alone()
        log = os.path.join(self.run_folder, "log.jsonl")
        with open(log, encoding="utf-8") as file:
            lines = file.readlines()
        for damaged in ("\n", lines[10][:20] + "\n"):
            text = "".join([*lines[:10], damaged, *lines[11:]])
            with open(log, "w", encoding="utf-8") as file:
                file.write(text)
            self.assertIn("log.jsonl line 11 ", self.error("--resume", self.run_folder))
            with open(log, encoding="utf-8") as file:
                self.assertEqual(file.read(), text)

    def test_a_gradient_that_is_no_number_is_not_saved(self):
        command = self.command("--out", self.run_folder, "--lr", "300", "--head-lr", "300", "--final-lr",
                               "1", steps=400, save_every=1, keep=1)[2:]
        self.assertIn("not a finite number", self.error(*command))
        name = kill_resume.checkpoints(self.run_folder)[-1]
        with open(os.path.join(self.run_folder, name), "rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            values = array.array("f", file.read())
        self.assertTrue(all(map(math.isfinite, values)))

    def test_names_that_are_not_utf8_are_refused_before_the_training(self):
        for option in ("--text", "--log"):
            command = [*map(os.fsencode, self.command("--out", self.run_folder)), option.encode(), b"\xff.txt"]
            result = subprocess.run(command, capture_output=True, timeout=300)
            self.assertEqual(result.returncode, 1)
            self.assertIn(option.encode() + b" ", result.stderr)
            self.assertIn(b"UTF-8", result.stderr)
            self.assertFalse(os.path.exists(self.run_folder))

    def test_numbers_are_what_they_look_like(self):
        for option, value in [("--temperature", "nan"), ("--seed", "99999999999999999999999"),
                              ("--steps", "010"), ("--steps", "0x10"), ("--lr", "inf"), ("--lr", "01.5"),
                              ("--keep", "+3"), ("--threads", "1e1"), ("--sample", "1.5")]:
            result = self.result([TILEMOE, "train", "--out", self.run_folder, option, value])
            self.assertEqual(result.returncode, 2, (option, value))
            self.assertIn(option, result.stderr)
        self.assertFalse(os.path.exists(self.run_folder))

    def test_threads_that_do_not_start_are_an_error(self):
        result = self.result([*self.command("--out", self.run_folder), "--threads", "256"],
                             preexec_fn=lambda: resource.setrlimit(
                                 resource.RLIMIT_AS, (2_000_000 << 10, 2_000_000 << 10)))
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("threads is 256, of which the system started", result.stderr)

    def test_texts_that_cannot_be_read_are_named(self):
        out = ["--out", self.run_folder]
        self.assertIn("nowhere.txt", self.error("--text", "nowhere.txt", *out))
        self.assertIn(self.shared.name, self.error("--text", self.shared.name, *out))
        empty = os.path.join(self.shared.name, "empty.txt")
        with open(empty, "wb"):
            pass
        self.assertIn("empty.txt is empty", self.error("--text", self.text, empty, *out))
        self.assertFalse(os.path.exists(self.run_folder))


if __name__ == "__main__":
    unittest.main()
