"""`tilemoe train` from outside: stopped, resumed, refused, out of room."""

import array
import hashlib
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import kill_resume
import small_run
from small_run import TILEMOE

SIZES = [*small_run.SIZES, "--warm-up", "5"]
STEPS = small_run.STEPS
NEWEST = f"step-{STEPS:08}.safetensors"


def limit_file_size():
    """Room for the log and for half a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))


def with_older_names(checkpoint, *names):
    """Rewrites a checkpoint's state as an earlier version wrote it; names: (now, then), ..."""
    contents = pathlib.Path(checkpoint).read_bytes()
    size = 8 + int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:size])
    metadata = header["__metadata__"]
    field = next(key for key, value in metadata.items() if '"config"' in value)
    for now, then in names:
        assert f'"{now}"' in metadata[field]
        metadata[field] = metadata[field].replace(f'"{now}"', f'"{then}"')
    metadata["file_sha256"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text + contents[size:]
    digest = hashlib.sha256(whole).hexdigest()
    pathlib.Path(checkpoint).write_bytes(whole.replace(b"0" * 64, digest.encode(), 1))


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
            contents[name] = pathlib.Path(os.path.join(self.run_folder, name)).read_bytes()
        return contents

    def resume(self, *options, **arguments):
        """Ends well, and with the very run that was left alone."""
        result = self.result([TILEMOE, "train", "--resume", self.run_folder, *options], **arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        kill_resume.compare(self.alone, self.run_folder)

    def result(self, command, **arguments):
        return subprocess.run(command, text=True, capture_output=True, timeout=300, **arguments)

    def well(self, *options):
        result = self.result([TILEMOE, "train", *options])
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def error(self, *options, status=1, **arguments):
        result = self.result([TILEMOE, "train", *options], **arguments)
        self.assertEqual(result.returncode, status, result.stdout)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertTrue(result.stderr.startswith("tilemoe: error: "), result.stderr)
        return result.stderr

    def wait_for_checkpoint(self, process):
        deadline = time.monotonic() + 120
        while not kill_resume.checkpoints(self.run_folder):
            self.assertTrue(process.poll() is None and time.monotonic() < deadline)
            time.sleep(0.001)

    def require_no_step_lost(self):
        newest = kill_resume.step_of(kill_resume.checkpoints(self.run_folder)[-1])
        self.assertEqual(newest, max(step for _, step in kill_resume.read_steps(self.run_folder)))

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
            self.assertEqual(process.returncode, 128 + number)
            self.assertIn(f"tilemoe train --resume {self.run_folder}", output)
            self.require_no_step_lost()
            shutil.rmtree(self.run_folder)

    def test_a_closed_pipe_saves_and_ends_well(self):
        process = subprocess.Popen(self.command("--out", self.run_folder, steps=100_000), text=True,
                                   stdout=subprocess.PIPE)
        process.stdout.readline()
        process.stdout.close()
        self.assertEqual(process.wait(timeout=120), 128 + signal.SIGPIPE)
        self.require_no_step_lost()

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

    def test_a_stopped_run_continues_bit_for_bit(self):
        # Stopped wherever the signal meets it, or not at all when it is fast.
        process = subprocess.Popen(self.command("--out", self.run_folder), stdout=subprocess.DEVNULL)
        self.wait_for_checkpoint(process)
        process.send_signal(signal.SIGINT)
        self.assertIn(process.wait(timeout=120), (0, 128 + signal.SIGINT, -signal.SIGINT))
        self.resume()

    def test_earlier_checkpoints_lead_to_the_same_end(self):
        self.copy_of_alone()
        first, second, newest = kill_resume.checkpoints(self.run_folder)
        os.remove(os.path.join(self.run_folder, newest))
        self.well("--save-every", "5", "--keep", "3", "--resume", os.path.join(self.run_folder, first))
        kill_resume.compare(self.alone, self.run_folder)

    def test_a_run_with_older_names_of_options_is_resumed(self):
        self.copy_of_alone()
        first, _, newest = kill_resume.checkpoints(self.run_folder)
        path = os.path.join(self.run_folder, first)
        with_older_names(path, ("validation-bytes", "held-bytes"), ("validation_bytes", "held_bytes"))
        result = self.well("--resume", path, "--save-every", "5", "--keep", "3")
        self.assertEqual(result.stderr, "")
        ours, alone = (pathlib.Path(folder, newest).read_bytes() for folder in (self.run_folder, self.alone))
        self.assertEqual(ours, alone)
        generated = small_run.tilemoe("generate", path, "--bytes", "5", text=False)
        self.assertEqual(generated.returncode, 0, generated.stderr)

    def test_an_older_option_works_with_a_warning(self):
        warning = "tilemoe: warning: --held-bytes is the older name of --validation-bytes\n"
        result = self.well(*self.command("--out", self.run_folder, "--held-bytes", "3000", steps=6)[2:])
        self.assertEqual(result.stderr, warning)
        config = self.events("start")[0]["config"]
        self.assertEqual(config["validation-bytes"], 3000)
        self.assertNotIn("held-bytes", config)
        error = self.result([TILEMOE, "train", "--resume", self.run_folder, "--held-bytes", "4000"])
        self.assertEqual(error.returncode, 2)
        self.assertIn("validation-bytes: 3000 in the checkpoint, 4000 now", error.stderr)

    def test_changed_options_are_named(self):
        error = self.error("--resume", self.alone, "--clip", "0.25", "--lr", "0.5", "--seed", "7",
                           "--layers", "1", status=2)
        self.assertRegex(error, r"clip: \S+ in the checkpoint, 0\.25 now")
        self.assertRegex(error, r"seed: 0 in the checkpoint, 7 now")
        for name in ("layers", "lr: "):
            self.assertNotIn(name, error)

    def events(self, kind, folder=None):
        with open(os.path.join(folder or self.run_folder, "log.jsonl"), encoding="utf-8") as file:
            return [event for event in map(json.loads, file) if event["event"] == kind]

    def weights_after(self, *options):
        """The bytes of the last checkpoint of a copy of the run that continues with these options."""
        self.copy_of_alone()
        self.well("--resume", self.run_folder, *options)
        name = kill_resume.checkpoints(self.run_folder)[-1]
        contents = pathlib.Path(os.path.join(self.run_folder, name)).read_bytes()
        shutil.rmtree(self.run_folder)
        return name, contents

    def test_a_finished_run_is_extended(self):
        self.copy_of_alone()
        result = self.well("--resume", self.run_folder, "--steps", "40", "--lr", "0.001", "--batch", "4")
        self.assertEqual(result.stderr,
                         "changed: --batch from 2 to 4, --lr from 0.0045 to 0.001, --steps from 30 to 40\n")
        resume, = self.events("resume")
        self.assertEqual(resume["changed"], {"batch": {"from": 2, "to": 4}, "lr": {"from": 0.0045, "to": 0.001},
                                             "steps": {"from": 30, "to": 40}})
        self.assertEqual([event["step"] for event in self.events("step")], list(range(1, 41)))
        self.assertEqual(sum(self.events("step")[-1]["expert_load"][0]), 4 * 32 * 2)
        self.assertLessEqual(self.events("step")[30]["lr"], 0.001)
        # It is that run from here on: no option needs to be given again, and nothing is changed.
        again = self.result([TILEMOE, "train", "--resume", self.run_folder])
        self.assertEqual((again.returncode, again.stderr), (0, ""))
        self.assertIn("--steps with a larger number extends the run", again.stdout)
        self.assertNotIn("changed", self.events("resume")[-1])

    def test_an_extended_run_that_stops_continues_bit_for_bit(self):
        longer = ("--steps", "40", "--batch", "3")
        name, whole = self.weights_after(*longer)
        self.assertEqual(name, "step-00000040.safetensors")
        self.assertEqual(self.weights_after(*longer, "--threads", "1"), (name, whole))
        self.copy_of_alone()
        self.result([TILEMOE, "train", "--resume", self.run_folder, *longer])
        os.remove(os.path.join(self.run_folder, name))
        result = self.result([TILEMOE, "train", "--resume", self.run_folder])  # from step 35
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(pathlib.Path(os.path.join(self.run_folder, name)).read_bytes(), whole)

    def test_a_run_is_forked_into_another_folder(self):
        before = small_run.contents(self.alone)
        first = os.path.join(self.alone, kill_resume.checkpoints(self.alone)[0])
        self.well("--resume", first, "--out", self.run_folder, "--lr", "0.01")
        self.assertEqual(small_run.contents(self.alone), before)
        self.assertEqual(self.events("resume")[0]["checkpoint"], first)
        self.assertEqual(list(self.events("resume")[0]["changed"]), ["lr"])
        self.assertEqual([event["step"] for event in self.events("step")], list(range(21, STEPS + 1)))
        shutil.rmtree(self.run_folder)
        result = self.result([TILEMOE, "train", "--resume", first, "--out", self.run_folder])
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        name = kill_resume.checkpoints(self.run_folder)[-1]
        for folder in (self.alone, self.run_folder):  # unchanged, it is the run that was left alone
            self.assertEqual(pathlib.Path(os.path.join(folder, name)).read_bytes(), before[name][0])

    def test_a_short_run_works_with_the_defaults(self):
        command = [TILEMOE, "train", "--text", self.text, "--out", self.run_folder, *small_run.SIZES]
        for steps, warm_up in ((1, 0), (25, 2)):
            result = self.result([*command, "--steps", str(steps)])
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(self.events("start")[0]["config"]["warm-up"], warm_up)
            shutil.rmtree(self.run_folder)

    def test_the_output_shows_progress_and_ends_with_a_sample(self):
        result = self.result(self.command("--out", self.run_folder, steps=60))
        lines = result.stdout.split("\n")
        self.assertRegex(lines[0], r"^\d+ parameters; the run is in ")
        self.assertRegex(result.stdout, r"(?m)^about \S+ left: \d+ steps and the evaluation$")
        losses = [event["loss"] / math.log(2) for event in self.events("step")]
        self.assertIn(f"step 1/60  {losses[0]:.3f} bits/byte (this step)", result.stdout)
        mean = sum(losses[-20:]) / 20
        self.assertIn(f"step 60/60  {mean:.3f} bits/byte (mean of the last 20 steps)", result.stdout)
        sample = result.stdout.split("writes more:\n")[1]
        self.assertGreater(len(sample), 150)
        self.assertTrue(all(c.isprintable() or c in "\n\t" for c in sample), sample)
        # After a resume the mean is of the steps since, not of nothing.
        os.remove(os.path.join(self.run_folder, kill_resume.checkpoints(self.run_folder)[-1]))
        result = self.result([TILEMOE, "train", "--resume", self.run_folder])
        self.assertIn(f"step 56/60  {losses[55]:.3f} bits/byte (this step)", result.stdout)
        self.assertIn(f"step 60/60  {sum(losses[-5:]) / 5:.3f} bits/byte (mean of the last 5 steps)",
                      result.stdout)

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
        advice = error.split("; try the previous checkpoint with ")[1].split()
        self.assertEqual(advice[0], "--resume")
        self.well(*advice, "--save-every", "5", "--keep", "3")
        kill_resume.compare(self.alone, self.run_folder)

    def test_foreign_files_are_refused(self):
        self.copy_of_alone()
        foreign = os.path.join(self.run_folder, "foreign.safetensors")
        pathlib.Path(foreign).write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        self.assertIn("not a checkpoint of", self.error("--resume", foreign))
        self.assertIn("not a safetensors file", self.error("--resume", self.text))
        self.assertIn("no checkpoint found at", self.error("--resume", foreign + "x"))

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

    def test_a_resumed_run_keeps_the_checkpoints_of_keep(self):
        log = os.path.join(self.shared.name, "elsewhere.jsonl")
        command = self.command("--out", self.run_folder, "--log", log, keep=100)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        steps = [f"step-{step:08}.safetensors" for step in range(5, STEPS + 1, 5)]
        self.assertEqual(kill_resume.checkpoints(self.run_folder), steps)
        lines = pathlib.Path(log).read_text().count("\n")
        first = os.path.join(self.run_folder, steps[0])
        for options in ([], ["--keep", "100"]):
            self.well("--resume", first, *options)
            self.assertEqual(kill_resume.checkpoints(self.run_folder), steps)
        self.assertGreaterEqual(pathlib.Path(log).read_text().count("\n"), lines)
        self.assertNotIn("log.jsonl", self.files())

    def test_checkpoints_of_others_are_left_alone(self):
        self.copy_of_alone()
        names = kill_resume.checkpoints(self.run_folder)
        os.remove(os.path.join(self.run_folder, "run.json"))
        for name in names[1:]:
            os.remove(os.path.join(self.run_folder, name))
        others = [f"step-{step:08}.safetensors" for step in (1, 2, 3)]
        for name in others:
            pathlib.Path(os.path.join(self.run_folder, name)).write_bytes(b"mine")
        self.well("--save-every", "5", "--keep", "1", "--resume", self.run_folder)
        self.assertEqual(kill_resume.checkpoints(self.run_folder), [*others, names[0], NEWEST])

    def test_the_text_is_known_by_its_contents(self):
        self.copy_of_alone()
        os.remove(os.path.join(self.run_folder, NEWEST))
        same = os.path.join(self.shared.name, ".", "text.txt")
        self.well("--resume", self.run_folder, "--text", same)
        self.assertEqual(kill_resume.read_steps(self.run_folder), kill_resume.read_steps(self.alone))

    def test_a_log_may_not_be_the_text_nor_any_other_file(self):
        before = pathlib.Path(self.text).read_bytes()
        link = os.path.join(self.shared.name, "link.txt")
        os.symlink(self.text, link)
        self.addCleanup(os.remove, link)
        for log in (self.text, link, os.path.join(self.shared.name, "..",
                                                  os.path.basename(self.shared.name), "text.txt")):
            command = self.command("--out", self.run_folder, "--log", log)[2:]
            self.assertIn("--log", self.error(*command))
        self.assertEqual(pathlib.Path(self.text).read_bytes(), before)

    def test_a_log_may_be_a_device(self):
        self.copy_of_alone()
        self.assertEqual(self.result([TILEMOE, "train", "--log", "/dev/null", "--resume",
                                      self.run_folder]).returncode, 0)

    def test_a_damaged_log_is_not_cut(self):
        self.copy_of_alone()
        log = os.path.join(self.run_folder, "log.jsonl")
        lines = pathlib.Path(log).read_text().splitlines(keepends=True)
        for damaged in ("\n", lines[10][:20] + "\n"):
            text = "".join([*lines[:10], damaged, *lines[11:]])
            pathlib.Path(log).write_text(text)
            self.assertIn("log.jsonl line 11 ", self.error("--resume", self.run_folder))
            self.assertEqual(pathlib.Path(log).read_text(), text)

    def test_a_gradient_that_is_no_number_is_not_saved(self):
        command = self.command("--out", self.run_folder, "--lr", "300", "--head-lr", "300", "--final-lr",
                               "1", steps=400, save_every=1, keep=1)[2:]
        self.assertIn("is not finite", self.error(*command))
        name = kill_resume.checkpoints(self.run_folder)[-1]
        with open(os.path.join(self.run_folder, name), "rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            values = array.array("f", file.read())
        self.assertTrue(all(map(math.isfinite, values)))

    def test_names_that_are_not_utf8_are_refused_before_the_training(self):
        for option in ("--text", "--log"):
            command = [*map(os.fsencode, self.command("--out", self.run_folder)), option.encode(), b"\xff.txt"]
            result = subprocess.run(command, capture_output=True, timeout=300)
            self.assertEqual(result.returncode, 2)
            self.assertIn(option.encode() + b" ", result.stderr)
            self.assertIn(b"UTF-8", result.stderr)
            self.assertFalse(os.path.exists(self.run_folder))

    def test_threads_that_do_not_start_are_an_error(self):
        result = self.result([*self.command("--out", self.run_folder), "--threads", "256"],
                             preexec_fn=lambda: resource.setrlimit(
                                 resource.RLIMIT_AS, (2_000_000 << 10, 2_000_000 << 10)))
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("threads is 256, but the system started only", result.stderr)


if __name__ == "__main__":
    unittest.main()
