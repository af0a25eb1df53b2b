"""`--chat-template-file`: what `run`, `batch` and `env` make of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from dflash_cli.main import cli

from pyggml_dflash import Engine
from tests.cli.dflash_command import Outcome

FOX = "Tell me a story about a shy fox."
GIVEN = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}Once upon a time"
FEW = ("-n", "4", "--threads", "1", "--max-ctx", "512", "--spec", "off")


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "given.jinja"
    path.write_text(GIVEN)
    return path


def here(*args: str | Path, env: Mapping[str, str] | None = None) -> Outcome:
    """A command in this process."""
    done = CliRunner().invoke(cli, [str(arg) for arg in args], env=env, catch_exceptions=False)
    return Outcome(done.exit_code, done.stdout, done.stderr)


def test_run_answers_the_prompt_that_it_writes(given: Path) -> None:
    found = here("run", "-p", FOX, *FEW, "--json", "--chat-template-file", given).json
    with Engine.open(max_ctx=512, threads=1, spec="off") as engine:
        prompt = engine.tokenize(f"user: {FOX} Once upon a time", add_special=False)
        assert found["tokens"] == list(engine.generate(prompt, max_tokens=4).tokens)
        assert found["usage"]["prompt_tokens"] == len(prompt)


def test_it_is_a_setting_and_a_path_of_the_files_folder(given: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('chat-template-file = "given.jinja"')
    env = {"DFLASH_CONFIG": str(config)}
    shown = here("env", "--json", env=env).json["settings"]["chat-template-file"]
    assert shown == {"value": str(given), "from": str(config)}
    env["DFLASH_CHAT_TEMPLATE_FILE"] = "other.jinja"
    shown = here("env", "--json", env=env).json["settings"]["chat-template-file"]
    assert shown == {"value": "other.jinja", "from": "DFLASH_CHAT_TEMPLATE_FILE"}
    done = here("run", "-p", FOX, *FEW, env=env)
    problem = "chat_template is 'other.jinja'; there is no such file (DFLASH_CHAT_TEMPLATE_FILE)"
    assert (done.code, done.err.splitlines()[-1]) == (2, f"dflash: error: {problem}")


@pytest.mark.parametrize("command", ["run", "serve", "batch", "chat", "fit"])
def test_every_command_refuses_one_that_cannot_work_before_it_loads(command: str, tmp_path: Path) -> None:
    broken, junk = tmp_path / "broken.jinja", tmp_path / "junk.gguf"
    broken.write_text("{% for m in messages %}\n{{ m.content }")
    junk.write_bytes(b"GGUFjunk")  # exits 3 where it is opened first
    (tmp_path / "in.txt").write_text("Hello\n")
    own = {"run": ("-p", FOX), "serve": ("--port", "0")}.get(command, ())
    model = (tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", junk) if command == "batch" else (junk,)
    done = here(command, *model, *own, "--chat-template-file", broken)
    problem = f"chat_template is {str(broken)!r}; line 2: unexpected '}}'"
    assert (done.code, done.err.splitlines()[-1]) == (2, f"dflash: error: {problem}")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_flag_that_raw_leaves_out_is_refused_and_a_setting_is_passed_over(given: Path) -> None:
    done = here("run", "-p", FOX, *FEW, "--raw", "--chat-template-file", given)
    assert (done.code, done.err) == (
        2,
        "dflash: error: --chat-template-file gives the chat template, which --raw leaves out\n",
    )
    assert here("run", "--chat-template-file", "", "-p", FOX).code == 2
    set_for_all = {"DFLASH_CHAT_TEMPLATE_FILE": str(given)}
    found = here("run", "-p", "Once", *FEW, "--raw", "--json", env=set_for_all).json
    assert found["tokens"] == here("run", "-p", "Once", *FEW, "--raw", "--json").json["tokens"]


def test_a_batch_goes_on_with_the_same_template_only(given: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": FOX}) + "\n")
    line = ("batch", source, "-o", target, *FEW, "--chat-template-file", given)
    assert here(*line).code == 0
    record = json.loads(target.read_text())["response"]["body"]
    with Engine.open(max_ctx=512, threads=1, spec="off", chat_template=given) as engine:
        answer = engine.chat([{"role": "user", "content": FOX}], max_tokens=4)
    assert record["choices"][0]["message"]["content"] == answer.text
    assert record["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
    assert here(*line, "--resume").code == 0
    given.write_text(GIVEN.replace(" a time", " two times"))
    assert here(*line, "--resume").code == 2
    assert here(*line[:-2], "--resume").code == 2
