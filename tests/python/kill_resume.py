#!/usr/bin/env python3
r"""Ends a training by SIGKILL again and again, resumes it, and compares it with one left alone.

    kill_resume.py --tilemoe build/release/apps/tilemoe/tilemoe --kills 50 --inside-save 10 \
        --results kill.jsonl

Kills fall at random times after the start of the process; some wait for a save to begin and fall at
a random time after that. A kill counts as inside a save when it leaves an unfinished checkpoint
behind. In the end every line of the log (loss, gradient norm, load, to the last digit) and every
byte of the last checkpoint must be those of the run left alone; and after each kill the folder has
the newest checkpoints that the run is to keep. Options that it does not know go to
`tilemoe train`. Needs nothing but Python.
"""

import argparse
import filecmp
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).parents[2] / "python" / "tilemoe" / "bench"))
import records  # noqa: E402  without the package

UNFINISHED = ".unfinished"
# 4.4 million numbers with the optimiser's, so that a save takes a while, and a step does not.
MODEL = ["--layers", "2", "--width", "64", "--experts", "32", "--expert-width", "128", "--top-k", "2",
         "--heads", "2", "--head-width", "16", "--batch", "2", "--length", "64"]
SAVE_EVERY = 5
KEEP = 3
# A kill comes on average after less than half of these; a run that reaches its end all the same is
# compared, and another is begun.
STEPS_PER_KILL = 40
LONGEST_WAIT = 120  # seconds for anything that must happen


def make_text(path, rng):
    """40 KB of made-up words in paragraphs."""
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9)))
             for _ in range(300)]
    with open(path, "w", encoding="ascii") as file:
        while file.tell() < 40_000:
            file.write(" ".join(rng.choice(words) for _ in range(30)) + ".\n\n")


class Runs:
    def __init__(self, tilemoe, folder, text, steps, options):
        self.command = [tilemoe, "train", *MODEL, "--text", text, "--steps", str(steps),
                        "--warm-up", "5", "--save-every", str(SAVE_EVERY), "--keep", str(KEEP), *options]
        self.folder = folder
        self.output = os.path.join(folder, "output.txt")

    def start(self, run):
        resume = checkpoints(run)
        place = ["--resume", run] if resume else ["--out", run]
        with open(self.output, "w", encoding="utf-8") as output:
            return subprocess.Popen(self.command + place, stdout=output, stderr=subprocess.STDOUT)

    def finish(self, process):
        status = process.wait(timeout=3600)
        if status != 0:
            self.fail(f"the training ended with status {status}")

    def fail(self, reason):
        with open(self.output, encoding="utf-8", errors="replace") as output:
            sys.exit(f"FAILED: {reason}\n--- its output:\n{output.read()[-4000:]}")


def names(run, suffix):
    try:
        return sorted(name for name in os.listdir(run) if name.endswith(suffix))
    except FileNotFoundError:
        return []


def checkpoints(run):
    return names(run, ".safetensors")


def step_of(name):
    return int(name.split("-")[1].split(".")[0])


def wait_for_save(run, process):
    """Returns once an unfinished checkpoint exists, or the process has ended."""
    deadline = time.monotonic() + LONGEST_WAIT
    while not names(run, UNFINISHED) and process.poll() is None:
        if time.monotonic() > deadline:
            sys.exit("FAILED: no save began")


def kill(runs, run, rng, inside_save, longest_delay, save_seconds):
    """One life of the training, ended by SIGKILL. Says what the kill met; None if it came late."""
    before = checkpoints(run)
    process = runs.start(run)
    if inside_save:
        if names(run, UNFINISHED):  # left by the last kill; the new process removes it
            deadline = time.monotonic() + LONGEST_WAIT
            while names(run, UNFINISHED) and process.poll() is None:
                if time.monotonic() > deadline:
                    runs.fail("an unfinished checkpoint was not removed")
        wait_for_save(run, process)
        time.sleep(rng.uniform(0, save_seconds))
    else:
        try:
            process.wait(timeout=rng.uniform(0, longest_delay))
        except subprocess.TimeoutExpired:
            pass
    process.send_signal(signal.SIGKILL)
    status = process.wait()
    if status == 0:
        return None
    if status != -signal.SIGKILL:
        runs.fail(f"the training ended with status {status} before it could be killed")
    after = checkpoints(run)
    require_kept(runs, before, after)
    return {"resumed_from": step_of(before[-1]) if before else None,
            "newest_after": step_of(after[-1]) if after else None,
            "inside_save": bool(names(run, UNFINISHED))}


def require_kept(runs, before, after):
    """Ends the program unless the folder has the expected checkpoints: the newest and those before
    it, each a save apart, and at most one more than before, of a run that was killed before it
    removed the older ones."""
    kept = [step_of(name) for name in after]
    saved = kept[-1] // SAVE_EVERY if kept else 0
    expected = [SAVE_EVERY * save for save in range(max(1, saved - KEEP + 1), saved + 1)]
    if kept[-len(expected):] != expected if expected else kept:
        runs.fail(f"of the checkpoints {expected} the folder has {kept}; before the kill {before}")
    if before and (not after or after[-1] < before[-1]):
        runs.fail(f"{before[-1]} is lost; the folder has {kept}")
    if len(kept) > max(KEEP, len(before)) + 1:
        runs.fail(f"the folder has {kept}, expected {KEEP} or one more than before the kill: {before}")


def read_steps(run):
    """Step -> what the log says of it, the times left out."""
    steps = {}
    with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as file:
        for line in map(json.loads, file):
            if line["event"] not in ("step", "eval"):
                continue
            line.pop("tokens_per_s", None)
            key = (line["event"], line["step"])
            # A run killed after its last save evaluates once more.
            if steps.setdefault(key, line) != line:
                sys.exit(f"FAILED: the log of {run} has {key} twice:\n{steps[key]}\n{line}")
    return steps


def compare(alone, killed):
    """Ends the program unless both runs are the same."""
    steps_alone, steps_killed = read_steps(alone), read_steps(killed)
    if steps_alone.keys() != steps_killed.keys():
        sys.exit("FAILED: the logs have different steps: "
                 f"{sorted(steps_alone.keys() ^ steps_killed.keys())[:5]}")
    for key, line in steps_alone.items():
        if line != steps_killed[key]:
            sys.exit(f"FAILED: {key} differs:\n{line}\n{steps_killed[key]}")
    if checkpoints(alone) != checkpoints(killed) or not checkpoints(alone):
        sys.exit(f"FAILED: checkpoints {checkpoints(alone)} and {checkpoints(killed)}")
    for name in checkpoints(alone):
        if not filecmp.cmp(os.path.join(alone, name), os.path.join(killed, name), shallow=False):
            sys.exit(f"FAILED: {name} differs")
    return len(steps_alone)


def watch_saves(runs, run, process):
    """Seconds from now to a training's first save, and the longest save that a watcher sees."""
    start, began, first, longest = time.monotonic(), None, None, 0.0
    while process.poll() is None:
        now = time.monotonic()
        if names(run, UNFINISHED):
            began = began or now
            first = first or now - start
        elif began:
            longest, began = max(longest, now - began), None
        time.sleep(0.0005)
    if first is None:
        runs.fail("no save was seen")
    return first, longest


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tilemoe", required=True, help="the program")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inside-save", type=int, default=10, help="kills that must meet a save")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", help="results file to write: one line")
    arguments, options = parser.parse_known_args()
    rng = random.Random(arguments.seed)

    with tempfile.TemporaryDirectory(prefix="tilemoe-kill-") as folder:
        text = os.path.join(folder, "text.txt")
        make_text(text, rng)
        steps = STEPS_PER_KILL * arguments.kills
        runs = Runs(os.path.abspath(arguments.tilemoe), folder, text, steps, options)

        alone, killed = os.path.join(folder, "alone"), os.path.join(folder, "killed")
        start = time.monotonic()
        process = runs.start(alone)
        first_save, save_seconds = watch_saves(runs, alone, process)
        runs.finish(process)
        seconds = time.monotonic() - start
        print(f"left alone: {steps} steps in {seconds:.1f} s, the longest save {save_seconds:.3f} s")

        longest_delay = 1.5 * first_save + seconds / arguments.kills
        kills, met = [], 0
        while len(kills) < arguments.kills or met < arguments.inside_save:
            if len(kills) > 4 * arguments.kills:
                sys.exit(f"FAILED: only {met} of {len(kills)} kills fell inside a save")
            missing, left = arguments.inside_save - met, arguments.kills - len(kills)
            aim = missing > 0 and (rng.random() < 0.4 or left <= missing)
            result = kill(runs, killed, rng, aim, longest_delay, save_seconds)
            if result is None:
                compare(alone, killed)
                shutil.rmtree(killed)
                continue
            kills.append(result)
            met += result["inside_save"]
            print(f"kill {len(kills)}: {result}", flush=True)
        runs.finish(runs.start(killed))
        lines = compare(alone, killed)

    resumed = sum(entry["resumed_from"] is not None for entry in kills)
    print(f"{len(kills)} kills, {met} inside a save, {resumed} after a resume: "
          f"{lines} log lines and the last checkpoints are the same")
    if arguments.results:
        info = json.loads(subprocess.check_output([arguments.tilemoe, "info", "--json"], text=True))
        values = {"kills": len(kills), "inside_save": met, "killed_after_a_resume": resumed,
                  "keep": KEEP, "save_every": SAVE_EVERY, "steps": steps, "log_lines_equal": lines,
                  "options": " ".join(options)}
        of = platform.machine(), {"tilemoe": info["version"]}, info["commit"]
        records.write(arguments.results, [records.Measurement("kill-resume", *of, values)])


if __name__ == "__main__":
    main()
