"""Ctrl-C, progress bars and broken pipes, in processes with real terminals, pipes and signals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

from tests.cli.dflash_command import COMMAND, ENDLESS, LIMIT_S, dflash, terminal

FOX = ("-p", "Tell me a story about a shy fox.")


def test_ctrl_c_stops_the_answer_and_keeps_what_was_printed() -> None:
    with terminal("run", *FOX, *ENDLESS) as screen:
        start = screen.wait_for("Once upon a time")
        screen.type("\x03")
        assert screen.wait() == 130
    answer, _, timings = screen.shown[start:].rstrip().rpartition("dflash: ")
    assert answer.endswith("\r\n")  # the line of timings begins a line
    assert timings.startswith("prompt 21 tokens, ")
    assert timings.endswith("finish: cancelled")
    assert "Traceback" not in screen.shown


def test_an_interrupt_leaves_the_text_on_a_pipe() -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", *FOX, *ENDLESS, "--quiet"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process:
        first = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(LIMIT_S) == 130
    assert first == b"Once"
    assert rest.endswith(b"\n")


def test_an_interrupted_answer_is_still_one_json_object() -> None:
    with terminal("run", "-p", " fox" * 2000, "--chunk", "1", "--json") as screen:
        screen.wait_for("reading the prompt")
        screen.type("\x03")
        assert screen.wait() == 130
    assert '"finish_reason": "cancelled"' in screen.shown
    assert '"text": ""' in screen.shown


def test_interrupts_are_seen_by_a_main_thread_that_waits_and_the_last_one_ends_it() -> None:
    code = (
        "import os, signal, threading\n"
        "from dflash_cli.answer import StopOnInterrupt\n"
        "class Deaf:\n"
        "    asked = threading.Event()\n"
        "    def cancel(self): self.asked.set()\n"
        "def press(): os.kill(os.getpid(), signal.SIGINT)\n"
        "with StopOnInterrupt(Deaf(), last=2):\n"
        "    press()\n"
        "    Deaf.asked.wait()\n"
        "    print('asked', flush=True)\n"
        "    press()\n"
        "    threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "asked\n", "")


def test_after_an_answer_an_interrupt_is_what_it_was() -> None:
    code = (
        "import os, signal\n"
        "from dflash_cli.answer import StopOnInterrupt\n"
        "with StopOnInterrupt(None, last=2): pass\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: print('raised', signal.set_wakeup_fd(-1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "raised -1\n", "")


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", *FOX, *ENDLESS, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stdout.read(4) == b"Once"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(LIMIT_S) == 0


def test_bars_go_to_a_terminal_on_standard_error_and_nowhere_else() -> None:
    flags = ("run", "--raw", "-p", "fox " * 300, "-n", "2", "--chunk", "64")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave
    )
    os.close(slave)
    assert process.stdout is not None
    with process:
        shown = _read_all(master)
        out = process.stdout.read()
        assert process.wait(LIMIT_S) == 0
    os.close(master)
    plain = dflash(*flags)
    assert out.decode() == plain.out
    assert "reading the prompt" in shown
    assert "t/s" in shown
    assert "\x1b" not in plain.err
    assert "reading the prompt" not in plain.err


def test_no_bars_when_quiet() -> None:
    with terminal("run", "--raw", "-p", "fox " * 100, "-n", "1", "--chunk", "16", "--quiet") as screen:
        assert screen.wait() == 0
    assert "\x1b" not in screen.shown
    assert "reading" not in screen.shown


def test_the_wait_for_a_prompt_on_a_pipe_is_told() -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    with process:
        assert process.stderr.readline() == b"dflash: reading the prompt from standard input\n"
        out, _ = process.communicate(b"Tell me a story about a shy fox.", LIMIT_S)
    assert out == b"Once\n"


def _read_all(master: int) -> str:
    shown = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
    return shown.decode(errors="replace")
