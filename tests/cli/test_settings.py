"""Values of flags from profiles, files and the environment: which one wins, and what is refused."""

from __future__ import annotations

import json
import os
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource
from click.testing import CliRunner
from dflash_cli import profiles
from dflash_cli.main import COMMANDS, cli
from dflash_cli.profiles import PROFILES, Profile
from dflash_cli.settings import META, REPLACED, Settings, Value, default_config, merge, settings_of

from pyggml_dflash.options import TRIM_VARIABLE, EngineOptions, SamplingOptions
from tests.cli.dflash_command import PICO, dflash

SIXTEEN = Profile(name="sixteen", summary="", flags=(("--chunk", "16"), ("--device", "CPU")))


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setattr(profiles, "PROFILES", (*PROFILES, SIXTEEN))
    return SIXTEEN


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv("DFLASH_CONFIG", str(path))
    return path


def shown(*args: str) -> dict[str, dict[str, Any]]:
    """What `dflash env` shows, by setting."""
    done = CliRunner().invoke(cli, ["env", "--json", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout)["settings"])


def refused(*args: str) -> str:
    """The message of a command line that exits 2."""
    done = CliRunner().invoke(cli, list(args))
    assert done.exit_code == 2, done.output
    return done.output


SOURCES = ("default", "profile", "file", "environment", "flag")


@pytest.mark.parametrize(("weaker", "stronger"), [*combinations(SOURCES, 2)])
def test_the_stronger_source_wins(
    weaker: str, stronger: str, config: Path, monkeypatch: pytest.MonkeyPatch, sixteen: Profile
) -> None:
    flags: list[str] = []
    for source in (weaker, stronger):
        if source == "profile":
            flags += ["--profile", "sixteen"]
        elif source == "file":
            config.write_text("chunk = 32")
        elif source == "environment":
            monkeypatch.setenv("DFLASH_CHUNK", "64")
        elif source == "flag":
            flags += ["--chunk", "128"]
    expected = {
        "profile": {"value": "16", "from": "profile sixteen"},
        "file": {"value": "32", "from": str(config)},
        "environment": {"value": "64", "from": "DFLASH_CHUNK"},
        "flag": {"value": "128", "from": "flag"},
    }
    assert shown(*flags)["chunk"] == expected[stronger]


@pytest.mark.parametrize("order", [1, -1])
def test_a_flag_wins_wherever_it_stands(order: int, sixteen: Profile) -> None:
    flags = [("--profile", "sixteen"), ("--chunk", "8")][::order]
    assert shown(*flags[0], *flags[1])["chunk"] == {"value": "8", "from": "flag"}


def test_without_sources_everything_is_a_default() -> None:
    assert shown()["seed"] == {"value": None, "from": "default"}
    assert {value["from"] for value in shown().values()} == {"default"}


def test_a_command_runs_with_the_values_that_are_shown(config: Path) -> None:
    config.write_text('chunk = 64\nthreads = 1\nspec = "off"\n[run]\nmax-tokens = 2\nnfc = false\n')
    env = {"DFLASH_MAX_CTX": "512", "DFLASH_CONFIG": str(config), "DFLASH_MODEL": str(PICO)}
    found = dflash("run", "-p", "Once", "--json", "--chunk", "32", env=env).json
    assert (found["chunk"], found["threads"], found["n_ctx"]) == (32, 1, 512)
    assert (found["spec"], found["usage"]["completion_tokens"]) == ("off", 2)


def test_shown_origins_are_those_that_click_knows(
    config: Path, monkeypatch: pytest.MonkeyPatch, sixteen: Profile
) -> None:
    config.write_text('threads = 2\nlogit-bias = ["1=2"]\n')
    monkeypatch.setenv("DFLASH_SLOTS", "1")
    monkeypatch.setenv("DFLASH_DEVICE_CAP", "CPU=3 B=4")
    monkeypatch.setenv("DFLASH_TOP_K", "")  # empty is not set
    group = click.Context(cli)
    line = ["run", "--profile", "sixteen", "--nfc", "--spec", "off"]
    name, command, args = cli.resolve_command(group, line)
    assert command is not None
    settings: Settings = group.meta[META]
    kinds = {
        "flag": ParameterSource.COMMANDLINE,
        "DFLASH_": ParameterSource.ENVIRONMENT,
        str(config): ParameterSource.DEFAULT_MAP,
        "profile": ParameterSource.DEFAULT_MAP,
    }
    with command.make_context(name, args, parent=group) as ctx:
        for param in settings_of(command).values():
            found = settings.find(param.name or "")
            kind = next(
                (v for k, v in kinds.items() if found is not None and found.origin.startswith(k)), None
            )
            assert ctx.get_parameter_source(param.name or "") == (kind or ParameterSource.DEFAULT), param.name
        assert ctx.params["device_cap"] == (("CPU", 3 * 2**20), ("B", 4 * 2**20))
        assert ctx.params["logit_bias"] == ((1, 2.0),)
        assert (ctx.params["threads"], ctx.params["chunk"], ctx.params["top_k"]) == (2, 16, 0)


def test_every_option_of_engine_and_sampling_is_a_setting() -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    found = {param.name: param.envvar for param in settings_of(command).values()}
    fields = {*EngineOptions.__dataclass_fields__, *SamplingOptions.__dataclass_fields__}
    assert set(found) == (fields - {"queue_limit"}) | {"config", "profile"}  # one request has no queue
    assert found["trim_interval"] == TRIM_VARIABLE
    assert found["max_ctx"] == "DFLASH_MAX_CTX"
    assert len(set(found.values())) == len(found)


def test_a_table_is_for_its_command_and_wins_there(config: Path) -> None:
    config.write_text("chunk = 16\ntemperature = 0.5\n[run]\nchunk = 32\n[fit]\nchunk = 64\njson = true\n")
    assert [shown(name)["chunk"]["value"] for name in ("run", "fit", "chat")] == ["32", "64", "16"]
    assert "temperature" not in shown("fit")  # which does not sample


def test_a_file_names_paths_from_where_it_lies(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config.parent / "m.gguf").write_bytes(b"")
    monkeypatch.setenv("HOME", str(config.parent))
    for text in ("m.gguf", "~/m.gguf"):
        config.write_text(f'model = "{text}"')
        assert shown()["model"] == {"value": str(config.parent / "m.gguf"), "from": str(config)}


def test_the_users_file_is_read_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    path = default_config()
    assert path.is_relative_to(tmp_path)
    assert shown()["chunk"]["from"] == "default"
    path.parent.mkdir(parents=True)
    path.write_text("chunk = 32")
    assert shown()["chunk"] == {"value": "32", "from": str(path)}


BAD_FILES = [
    ("max_ctx = 3", "'max_ctx' is unknown; did you mean max-ctx?"),
    ("temprature = 3", "'temprature' is unknown; did you mean temperature?"),
    ("qqqq = 3", "'qqqq' is unknown; 'dflash env' lists what there is"),
    ('config = "x"', "'config' is unknown"),
    ("max-tokens = 3", "'max-tokens' is for some commands only: write it in a table, as [run]"),
    ("[rnu]", "'rnu' is unknown; did you mean run?"),
    ("[run]\nmax_tokens = 3", "'max_tokens' in [run] is unknown; did you mean max-tokens?"),
    ("[chat]\nqiet = true", "'qiet' in [chat] is unknown; did you mean quiet?"),
    ("[devices]", "'dflash devices' has no settings"),
    ("run = 3", "run is 3; it must be a table, as in [run]"),
    ("max-ctx = true", "max-ctx is True; it must be text or a number"),
    ("threads = [3]", "threads is [3]; it must be text or a number"),
    ("threads = 1979-05-27", "threads is datetime.date(1979, 5, 27); it must be"),
    ('nfc = "no"', "nfc is 'no'; it must be true or false"),
    ("nfc = 0", "nfc is 0; it must be true or false"),
    ("device-cap = [1, {}]", "device-cap is {}; it must be text or a number"),
    ('model = "~nobody-there/x"', "there is no such home folder"),
    ("max-ctx =", "is not TOML: "),
    ("max-ctx = 1\nmax-ctx = 2", "is not TOML: "),
    ("chunk = 12.5", "'12.5' is no chunk"),
    ("chunk = 0", "chunk is 0; it must be a whole number of at least 1"),
    ("temperature = nan", "temperature is nan"),
    ('cache-type-k = "q9"', "'q9' is not one of"),
    ('profile = "cuda1"', "is 'cuda1'; did you mean cuda-1? 'dflash profiles' lists those there are"),
    ('profile = ["cuda-1", "cpu-tiny"]', "2 profiles are asked for (cuda-1, cpu-tiny); name one"),
    ("profile = []", "0 profiles are asked for"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_what_is_wrong_in_a_file_exits_2_and_names_the_file(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    told = refused("run", "-p", "x")
    assert message in told
    assert str(config) in told or "profiles are asked for" in told


def test_bytes_that_are_no_text_are_no_configuration(config: Path) -> None:
    config.write_bytes(b"a = '\xff'")
    assert f"configuration file {config} is not TOML" in refused("run", "-p", "x")


def test_a_deep_file_is_refused(config: Path) -> None:
    config.write_text(f"chunk = {'[' * 20000}")
    assert f"configuration file {config} is not TOML" in refused("run", "-p", "x")


@pytest.mark.parametrize(("path", "message"), [("no/such.toml", "does not exist"), ("/", "cannot be read: ")])
def test_a_file_that_is_named_has_to_be_there(path: str, message: str) -> None:
    told = refused("run", "-p", "x", "--config", path)
    assert told.startswith(f"dflash: error: configuration file {path} {message}")


def test_help_comes_whatever_the_file_says(config: Path) -> None:
    config.write_text("x = 1")
    for flag in ("-h", "--help"):
        assert CliRunner().invoke(cli, ["run", flag]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DFLASH_MAX_CTX", "x", "'x' is no context length; pass tokens as in 8192, 8k or 1m"),
        ("DFLASH_THREADS", "0", "threads is 0; it must be a whole number of at least 1"),
        ("DFLASH_TOP_P", "7", "top_p is 7.0; it must be a number"),
        ("DFLASH_SPEC", "maybe", "'maybe' is not one of"),
        ("DFLASH_NFC", "maybe", "'maybe' is not a valid boolean"),
        ("DFLASH_PROFILE", "cuda1", "is 'cuda1'; did you mean cuda-1?"),
    ],
)
def test_a_bad_variable_is_quoted_and_named(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    told = refused("run", "-p", "x")
    assert message in told
    assert name in told


def test_a_model_from_elsewhere_that_is_missing_exits_3_and_says_who_named_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DFLASH_MODEL", "no/such.gguf")
    done = CliRunner().invoke(cli, ["run", "-p", "x"])
    assert done.exit_code == 3
    assert done.output == "dflash: error: no/such.gguf, named by DFLASH_MODEL, does not exist\n"


def test_a_variable_that_means_nothing_is_told_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_MAXCTX", "1")
    monkeypatch.setenv("DFLASH_TEMPERATURE", "0.5")  # is none of fit's, but of other commands
    monkeypatch.setenv("DFLASH_GGML_SOURCE", "x")
    line = "dflash: DFLASH_MAXCTX is set and means nothing; did you mean DFLASH_MAX_CTX?\n"
    done = CliRunner().invoke(cli, ["env", "fit"])
    assert done.exit_code == 0
    assert [told for told in done.output.splitlines(True) if told.startswith("dflash:")] == [line]
    assert "dflash:" not in CliRunner().invoke(cli, ["env", "run", "--quiet"]).output


def test_the_trim_variable_keeps_its_grammar(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("prefill-pool-trim-tokens = 4096")
    monkeypatch.setenv(TRIM_VARIABLE, "8k")
    assert shown()["prefill-pool-trim-tokens"] == {"value": "8k", "from": TRIM_VARIABLE}
    done = dflash("run", str(PICO), "--raw", "-p", "Once", "-n", "1", env={TRIM_VARIABLE: "8k"})
    assert done.code == 0
    assert done.err.count(f"{TRIM_VARIABLE} is '8k'") == 1


def test_one_choice_of_devices_replaces_a_weaker_one() -> None:
    split = {name: Value("x", "profile") for name in ("target_device", "expert_device", "max_ctx")}
    cpu = {"device": Value("CPU", "file")}
    assert set(merge([split, cpu], ())) == {"device", "max_ctx"}
    assert set(merge([split], ("device",))) == {"max_ctx"}
    assert set(merge([split], ("target_devices",))) == {"expert_device", "max_ctx"}
    assert set(merge([cpu], ("target_device",))) == set()
    assert set(merge([cpu, split], ())) == set(split)
    assert all(name in gone for name, gone in REPLACED.items())


def test_profiles_are_well_formed() -> None:
    names = [profile.name for profile in PROFILES]
    assert set(names) >= {"cpu-tiny", "cuda-1", "cuda-split-2", "qwen-next-r9700-strix"}
    assert len(set(names)) == len(names)
    for profile in PROFILES:
        assert profile.summary
        flags, variables = [f for f, _ in profile.flags], [v for v, _ in profile.environment]
        assert all(flag.startswith("--") for flag in flags)
        assert len(set(flags)) == len(flags)
        assert len(set(variables)) == len(variables)


def test_the_split_profile_has_its_pair_of_devices_and_auto() -> None:
    (profile,) = (p for p in PROFILES if p.name == "qwen-next-r9700-strix")
    assert dict(profile.flags) == {
        "--target-device": "hip:0",
        "--expert-device": "hip:1",
        "--max-ctx": "auto",
    }
    assert profile.environment == ()
    layer = {flag: Value(text, "profile") for flag, text in profile.flags}
    assert "--max-ctx" not in merge([layer], {"--max-ctx"})


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_profile_sets_what_the_command_has_or_is_refused(profile: Profile) -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    known = {opt: param.opts[0] for param in command.params for opt in param.opts}
    missing = [flag for flag, _ in profile.flags if flag not in known]
    if missing:
        told = refused("run", "--profile", profile.name)
        assert f"profile {profile.name} sets {missing[0]}, which 'dflash run' does not have" in told
    else:
        found = shown("--profile", profile.name)
        for flag, text in profile.flags:
            assert found[known[flag][2:]] == {"value": text, "from": f"profile {profile.name}"}
        assert found["profile"] == {"value": profile.name, "from": "flag"}


def test_the_smallest_profile_runs_the_shipped_model() -> None:
    done = dflash("run", "-p", "Once", "-n", "1", "--json", "--profile", "cpu-tiny", "--spec", "off")
    assert done.code == 0, done.err
    assert (done.json["device"], done.json["n_ctx"]) == ("CPU", 8192)


def test_only_one_profile_is_taken() -> None:
    told = refused("run", "--profile", "cuda-1", "--profile", "cpu-tiny")
    assert told == "dflash: error: 2 profiles are asked for (cuda-1, cpu-tiny); name one\n"


def test_a_profile_leaves_variables_that_are_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Profile(name="vars", summary="", flags=(), environment=(("TEST_A", "1"), ("TEST_B", "2")))
    monkeypatch.setattr(profiles, "PROFILES", (made,))
    monkeypatch.setenv("TEST_A", "5")
    monkeypatch.setenv("TEST_B", "2")
    monkeypatch.delenv("TEST_B")
    done = CliRunner().invoke(cli, ["env", "--profile", "vars"])
    assert "dflash: TEST_A stays '5' as it is set; profile vars has '1'\n" in done.output
    assert "TEST_B stays" not in done.output
    assert (os.environ["TEST_A"], os.environ["TEST_B"]) == ("5", "2")
    listed = CliRunner().invoke(cli, ["profiles"]).stdout
    assert "  environment  TEST_A=1 TEST_B=2\n" in listed


def test_profiles_are_listed() -> None:
    listed = CliRunner().invoke(cli, ["profiles"])
    assert listed.exit_code == 0
    assert "cuda-1: One NVIDIA GPU, with the largest context that fits.\n" in listed.stdout
    assert "--target-device hip:0 --expert-device hip:1 --max-ctx auto\n" in listed.stdout
    found = json.loads(CliRunner().invoke(cli, ["profiles", "--json"]).stdout)
    assert [profile["name"] for profile in found] == [profile.name for profile in PROFILES]


def test_a_profile_is_shown_by_its_name() -> None:
    shown = CliRunner().invoke(cli, ["profiles", "cuda-1"]).stdout
    assert shown.startswith("cuda-1: ")
    assert "--device CUDA0 --max-ctx auto" in shown
    assert "cpu-tiny" not in shown
    told = refused("profiles", "cuda1")
    assert told == (
        "dflash: error: profile is 'cuda1'; did you mean cuda-1? 'dflash profiles' lists those there are\n"
    )


def test_env_shows_what_is_said_of_a_command_alone(config: Path) -> None:
    config.write_text("[serve]\nport = 9000\nmodel-name = ['a', 'b']\n")
    found = shown("serve", "--queue-limit", "3")
    assert found["port"] == {"value": "9000", "from": str(config)}
    assert found["model-name"] == {"value": ["a", "b"], "from": str(config)}
    assert found["queue-limit"] == {"value": "3", "from": "flag"}
    assert "host" not in found  # it is as `dflash serve --help` says
    assert "port" not in shown("run")


@pytest.mark.parametrize("source", ["flag", "environment", "file", "table"])
def test_env_does_not_tell_the_key_of_a_server(
    source: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["env", "serve"]
    if source == "flag":
        args += ["--api-key", "s3cret"]
    elif source == "environment":
        monkeypatch.setenv("DFLASH_API_KEY", "s3cret")
    else:
        config.write_text(("[serve]\n" if source == "table" else "") + "api-key = 's3cret'\n")
    for words in (args, [args[0], "--json", *args[1:]]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        assert "(hidden)" in done.output
        assert "s3cret" not in done.output


def test_env_is_a_table_for_people(config: Path) -> None:
    config.write_text("chunk = 32\nnfc = false\n")
    done = CliRunner().invoke(cli, ["env", "fit", "--device-cap", "CPU=3", "--device-cap", "B=1"])
    assert done.exit_code == 0
    first, _, *rows = done.stdout.splitlines()
    assert first == f"configuration file: {config}"
    cells = [row.split(maxsplit=2) for row in rows]
    assert cells[0] == ["setting", "value", "from"]
    assert ["chunk", "32", str(config)] in cells
    assert ["nfc", "false", str(config)] in cells
    assert ["draft", "-", "default"] in cells
    assert any(row.startswith("device-cap ") and "CPU=3, B=1  " in row for row in rows)


def test_env_says_that_a_file_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CliRunner().invoke(cli, ["env"]).stdout.splitlines()[0].endswith("(not there)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("devices",), "'dflash devices' has no settings"),
        (("env",), "'dflash env' has no settings"),
        (("rum",), "No such command 'rum'"),
        (("run", "--max-ctx", "x"), "'x' is no context length"),
        (("--bogus",), "--bogus"),
    ],
)
def test_env_refuses_what_the_command_refuses(words: tuple[str, ...], message: str) -> None:
    assert message in refused("env", *words)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ('model = "no/such.gguf"', 3, "such.gguf, named by {config}, does not exist"),
        ("chunk = 12.5", 2, "'12.5' is no chunk"),
    ],
)
def test_env_shows_a_value_that_the_command_refuses_and_where_it_comes_from(
    config: Path, text: str, code: int, message: str
) -> None:
    config.write_text(f"{text}\nmax-ctx = 64\n")
    done = CliRunner().invoke(cli, ["env", "--json", "fit"])
    assert done.exit_code == code
    assert message.format(config=config) in done.stderr
    found = json.loads(done.stdout)["settings"]
    name, _, value = text.partition(" = ")
    assert found[name]["value"].endswith(value.strip('"'))
    assert found[name]["from"] == str(config)
    assert found["max-ctx"] == {"value": "64", "from": str(config)}
    assert found["min-ctx"] == {"value": None, "from": "default"}


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    command = cli.get_command(click.Context(cli), "fit")
    assert command is not None
    secret = click.Option(["--pass-phrase"], envvar="DFLASH_PASS_PHRASE", hide_input=True)
    monkeypatch.setattr(command, "params", [*command.params, secret])
    monkeypatch.setenv("DFLASH_PASS_PHRASE", "open sesame")
    assert shown("fit")["pass-phrase"] == {"value": "(hidden)", "from": "DFLASH_PASS_PHRASE"}


def test_commands_that_open_an_engine_take_profiles_and_files() -> None:
    group = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(group, name)
        assert command is not None
        keys = settings_of(command).keys()
        assert ("max-ctx" in keys) == ("profile" in keys) == ("config" in keys)
