#!/usr/bin/env python3
"""A long conversation at random: answers that are stopped by Ctrl-C, that run to the end of the context, /clear, until so many tokens were generated.
Memory must stay flat, every answer must be what a fresh process says to the same conversation, and at rest no processor may be used.
  scripts/long_chat.py VOLLEY --model DIR --device cpu|cuda --tokens 10000 --context 1024 --seed 1 --checks 20
Ends with one line of figures and exit code 0, or says what did not hold and ends with 1. Needs Python 3.9, nothing else.
"""
import argparse
import ast
import json
import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
import time

LIMIT = 120  # seconds that nothing may take
SYSTEM = "You tell long stories."
WORDS = "Tell me a long story about the sea , a number machine and two cats that count to ten thousand without a pause .".split()


def fail(text):
    print(f"failed: {text}", flush=True)
    sys.exit(1)


class Chat:
    """`volley chat` on pipes: the bytes of stdout and the lines of stderr as they come."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.lines, self.out = queue.Queue(), bytearray()
        os.set_blocking(self.process.stdout.fileno(), False)
        threading.Thread(target=self._read_err, daemon=True).start()

    def _read_err(self):
        for line in self.process.stderr:
            self.lines.put(line.decode().rstrip("\n"))
        self.lines.put(None)

    def say(self, line):
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def line(self):
        try:
            line = self.lines.get(timeout=LIMIT)
        except queue.Empty:
            fail(f"nothing happened for {LIMIT} s")
        if line is None:
            fail(f"the program ended with {self.process.wait()}")
        return line

    def said(self):
        """All of stdout so far. An answer's text is in the pipe, which holds more than any, before the lines of stderr behind it."""
        try:
            while piece := os.read(self.process.stdout.fileno(), 65536):
                self.out += piece
        except BlockingIOError:
            pass
        return self.out

    def wait_for_bytes(self, n):
        while len(self.said()) < n:
            if not select.select([self.process.stdout], [], [], LIMIT)[0]:
                fail(f"nothing was said for {LIMIT} s")
            if self.process.poll() is not None:
                fail(f"the program ended with {self.process.returncode}")

    def resident(self):
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def ticks(self):
        with open(f"/proc/{self.process.pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


def ids_of(line):
    return ast.literal_eval(line.split(": ", 1)[1])


def fresh(args, messages, tokens):
    """Prompt and answer ids of a process that knows nothing of what was before."""
    request = {"messages": messages, "max_tokens": tokens}
    command = [args.volley, "chat", "--json", "--show-tokens"] + options(args)
    done = subprocess.run(command, input=json.dumps(request).encode() + b"\n", capture_output=True, timeout=LIMIT)
    found = {line.split(": ")[0]: ids_of(line) for line in done.stderr.decode().splitlines() if " tokens: [" in line}
    if done.returncode or len(found) != 2:
        fail(f"a fresh process ended with {done.returncode}: {done.stderr.decode()} {done.stdout.decode()[-300:]}")
    return found["prompt tokens"], found["answer tokens"]


def options(args):
    own = ["-m", args.model, "--device", args.device, "-c", str(args.context), "-t", "0.8", "--seed", str(args.seed), "--ignore-eos"]
    return own + ["--draft", args.draft] * bool(args.draft)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volley")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=10000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checks", type=int, default=20, help="answers that a fresh process must repeat")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    chat = Chat([args.volley, "chat", "--show-tokens", "-s", SYSTEM] + options(args))
    system = [{"role": "system", "content": SYSTEM}]
    messages, turns, tokens, resident = list(system), [], 0, []
    counts = dict(stopped=0, context=0, refused=0, clear=0)
    start = time.monotonic()
    while tokens < args.tokens:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        before = len(chat.said())
        chat.say(text)
        line = chat.line()
        if line.startswith("error: the context is full"):  # the message was not answered, and is no part of the conversation
            counts["refused"] += 1
            prompt = None
        elif line.startswith("prompt tokens: "):
            prompt = ids_of(line)
            room = args.context - len(prompt)
            messages.append({"role": "user", "content": text})
            # A byte is a token at most. Stopped well before the end of the context, so that the signal finds the answer under way.
            if room > args.context // 4 and rng.random() < 0.8:
                chat.wait_for_bytes(before + rng.randint(1, room // 2))
                chat.process.send_signal(signal.SIGINT)
            answer, end = None, None
            while end is None:
                line = chat.line()
                if line.startswith("answer tokens: "):
                    answer = ids_of(line)
                elif line == "[stopped]":
                    end = "stopped"
                elif line.startswith(f"the context of {args.context} tokens is full"):
                    end = "context"
                elif not line.startswith("warning: "):
                    fail(f"unexpected: {line}")
            counts[end] += 1
            tokens += len(answer)
            if end == "context" and len(prompt) + len(answer) != args.context:
                fail(f"the context ended at {len(prompt) + len(answer)} of {args.context} tokens")
            turns.append((list(messages), prompt, answer))
        else:
            fail(f"unexpected: {line}")
        if prompt is not None:
            # With what /stats says all of the answer has come, the line break behind it as well.
            chat.say("/stats")
            while not chat.line().endswith(f"context of {args.context} tokens"):
                pass
            said = bytes(chat.said()[before:]).decode()
            messages.append({"role": "assistant", "content": said, "cut": True})
        if prompt is None or rng.random() < 0.15:
            chat.say("/clear")
            if (line := chat.line()) != "new conversation":
                fail(f"unexpected: {line}")
            counts["clear"] += 1
            messages = list(system)
        resident.append((tokens, chat.resident()))
    seconds = time.monotonic() - start

    time.sleep(0.5)
    ticks = chat.ticks()
    time.sleep(2)
    ticks = chat.ticks() - ticks
    if ticks > 1:
        fail(f"{10 * ticks} ms of a processor in 2 s at rest")
    power = gpu_power() if args.device == "cuda" else ""
    # The first quarter may touch memory for the first time.
    early = max(bytes_ for at, bytes_ in resident if at <= args.tokens / 4 or at == resident[0][0])
    late = max(bytes_ for _, bytes_ in resident)
    if late - early > 8 << 20:
        fail(f"memory grew from {early >> 20} to {late >> 20} MiB after {args.tokens // 4} tokens")
    chat.process.stdin.close()
    if chat.process.wait(LIMIT) != 0:
        fail(f"the end of input gave exit code {chat.process.returncode}")

    checked = rng.sample(turns, min(args.checks, len(turns)))
    for conversation, prompt, answer in checked:
        # A line break at the end of what was said may be the answer's own or the chat's: the prompt's ids tell.
        for own in range(2 ** sum("cut" in message for message in conversation)):
            asked, i = [], 0
            for message in conversation:
                content = message["content"]
                if "cut" in message:
                    content = content if own >> i & 1 else content[:-1]
                    i += 1
                asked.append({"role": message["role"], "content": content})
            found, again = fresh(args, asked, len(answer))
            if found == prompt:
                break
        if found != prompt or again != answer:
            at = next((i for i, (a, b) in enumerate(zip(answer, again)) if a != b), min(len(answer), len(again)))
            fail(f"a fresh process says something else from token {at} of {len(answer)} on, prompt of {len(prompt)} (equal: {found == prompt})")
    print(
        f"{tokens} tokens in {len(turns)} answers, {seconds:.1f} s: {counts['stopped']} stopped, {counts['context']} to the end of the context, "
        f"{counts['refused']} refused as it was full, {counts['clear']} times /clear; memory {early / 2**20:.1f} MiB after a quarter, {late / 2**20:.1f} MiB at most; "
        f"{len(checked)} answers equal those of fresh processes; {10 * ticks} ms of processor in 2 s at rest{power}"
    )


def gpu_power():
    query = ["nvidia-smi", "--query-gpu=power.draw,utilization.gpu,clocks.sm,clocks.mem", "--format=csv,noheader"]
    time.sleep(3)
    return "; GPU at rest: " + subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]


if __name__ == "__main__":
    main()
