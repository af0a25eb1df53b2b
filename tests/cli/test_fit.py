"""`dflash fit`: the table, its JSON, its exit codes, and that its flags open what it shows."""

from __future__ import annotations

import shlex

import pytest

from pyggml_dflash.options import TRIM_VARIABLE
from tests.cli.dflash_command import PICO, dflash, told

CAPPED = ("--threads", "1", "--device", "CPU", "--repack", "off", "--fit-margin", "5%")


def test_the_memory_of_a_context_is_shown_with_the_search_behind_it() -> None:
    done = dflash("fit", str(PICO), "--max-ctx", "auto", "--device-cap", "CPU=30", *CAPPED)
    assert (done.code, done.err) == (0, "")
    for words in (
        "weights (mapped)",
        "state",
        "graphs",
        "headroom",
        "contexts that were tried",
        "q4_0",
    ):
        assert words in done.out
    assert "pico-q8_0.gguf" in done.out


def test_json_has_the_whole_report_and_its_flags_run() -> None:
    report = dflash(
        "fit", str(PICO), "--max-ctx", "auto", "--device-cap", "CPU=30MiB", "--json", *CAPPED
    ).json
    (share,) = report["devices"]
    assert share["available"] == 30 * 2**20
    assert sum(share["terms"].values()) + share["headroom"] <= share["available"]
    assert 0 < report["n_ctx"] < report["n_ctx_train"] == 8192
    assert not report["trace"][0]["fits"]
    told("run", str(PICO), "--raw", "-p", "Once", "-n", "2", *report["flags"])
    again = dflash("fit", str(PICO), "--json", *report["flags"]).json
    assert [again[key] for key in ("n_ctx", "chunk", "flags")] == [
        report[key] for key in ("n_ctx", "chunk", "flags")
    ]


def test_the_flags_in_the_text_are_those_of_the_report() -> None:
    options = ("fit", str(PICO), "--cache-type-k", "q8_0", "--max-ctx", "2k", *CAPPED)
    last = told(*options).splitlines()[-1]
    flags = shlex.split(last.partition(": ")[2])
    found = ["--max-ctx", "2048", "--chunk", "512"]
    assert sorted(flags) == sorted([*found, "--cache-type-k", "q8_0", *CAPPED])


@pytest.mark.parametrize("command", ["fit", "run"])
def test_a_context_that_does_not_fit_exits_4(command: str) -> None:
    more = ("-p", "x") if command == "run" else ()
    done = dflash(command, str(PICO), *more, "--max-ctx", "8k", "--device-cap", "CPU=25MiB", *CAPPED)
    assert done.code == 4
    if command == "run":
        assert done.out == ""
        assert "CPU" in done.err
        assert "--max-ctx" in done.err
        assert "with q8_0" in done.err
    else:
        assert "8192 does not fit" in done.out


def test_without_a_model_the_shipped_one_is_fitted() -> None:
    done = dflash("fit", "--threads", "1")
    assert done.code == 0
    assert done.err.startswith("dflash: no MODEL given")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--device-cap", "XPU9=5"), "'XPU9'"),
        (("--device-cap", "CPU=5", "--device-cap", "CPU=6"), "twice"),
        (("--slots", "0"), "slots is 0"),
        (("--max-ctx", "9k"), "max_ctx is 9216"),
        (("--fit-margin", "10GiB"), "'10GiB'"),
        (("--device-reserve-mib", "-1"), "device_reserve_mib is -1"),
    ],
)
def test_values_that_cannot_be_used_exit_2(flags: tuple[str, ...], words: str) -> None:
    done = dflash("fit", str(PICO), *flags)
    assert done.code == 2
    assert words in done.err


def test_several_slots_are_fitted_and_run() -> None:
    assert "in each of 2 slots" in told("fit", str(PICO), "--slots", "2", "--threads", "1")
    one, two = (told("run", str(PICO), "--raw", "-p", "Once", "-n", "8", "--slots", n) for n in "12")
    assert one == two


def test_a_bad_trim_variable_warns_and_the_answer_comes() -> None:
    done = dflash("run", str(PICO), "--raw", "-p", "Once", "-n", "2", env={TRIM_VARIABLE: "8k"})
    assert done.code == 0
    assert f"{TRIM_VARIABLE} is '8k'" in done.err
