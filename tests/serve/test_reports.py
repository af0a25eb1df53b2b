"""What the server says of itself agrees with the engine."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from itertools import accumulate
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from pyggml_dflash import Engine
from pyggml_dflash.serve.app import app_of
from pyggml_dflash.serve.service import Service
from pyggml_dflash.serve.settings import ServeOptions
from tests.engine.test_trim import MIB, ScriptedPools
from tests.engine.tiny import LLAMA, opened
from tests.serve.live import CHAT, STORY, Live, busy, live, until
from tests.serve.told import telling


def test_a_loaded_server_is_healthy(server: Live) -> None:
    answer = server.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_until_the_model_is_loaded_everything_is_told_to_come_back(pico: Engine) -> None:
    service = Service(ServeOptions())
    service.loaded_part = 0.25
    transport = httpx.ASGITransport(app_of(service))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "loading", "loaded_part": 0.25})
            for path in ("/v1/models", "/props", "/slots", "/metrics"):
                assert (await client.get(path)).status_code == 503
            answer = await client.post(CHAT, json={"messages": STORY, "max_tokens": 1})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert "25 % of the weights" in answer.json()["error"]["message"]
            service.open(pico)
            assert (await client.get("/health")).status_code == 200

    asyncio.run(ask())


def test_models_are_listed_under_the_names_they_were_given(pico: Engine) -> None:
    with (
        live(pico, model_names=("gpt-4o", "small")) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client,
    ):
        assert [model.id for model in client.models.list()] == ["gpt-4o", "small"]
        assert client.models.retrieve("small").owned_by == "pyggml-dflash"
        answer = client.chat.completions.create(model="small", messages=STORY, max_tokens=1)  # type: ignore[arg-type]
        assert answer.model == "gpt-4o"


def test_props_has_what_the_engine_chose(server: Live, pico: Engine) -> None:
    props, info = server.get("/props").json(), pico.info
    assert props["model"]["arch"] == info.architecture
    assert props["model_path"] == info.model.name
    assert str(info.model) not in json.dumps(props)
    assert props["runtime"]["max_ctx"] == props["default_generation_settings"]["n_ctx"] == info.n_ctx
    told = ("chunk", "granule", "slots", "decode_mode", "decode_reason", "device", "split", "placement")
    assert {name: props["runtime"][name] for name in told} == {name: getattr(info, name) for name in told}
    assert props["runtime"]["devices"] == list(info.devices)
    assert {"POST /v1/chat/completions", "GET /props", "POST /admin/park"} <= set(props["api"]["endpoints"])
    assert props["prefix_cache"]["capacity"] == pico.options.prefix_cache_entries
    assert props["prefix_cache"]["in_use"] == props["prefix_cache"]["stored"]["n_states"]
    assert props["memory"] == pico.memory()
    assert props["memory_plan"]["n_ctx"] == pico.fit_report().n_ctx
    assert props["speculative_mode"] == "off"
    assert props["build_info"].endswith("props_schema=2")


def test_props_has_every_part_that_clients_of_other_servers_look_for(server: Live, pico: Engine) -> None:
    props, options = server.get("/props").json(), ServeOptions()
    assert {"api", "build_info", "capabilities", "daemon", "default_generation_settings", "model"} <= set(
        props
    )
    assert {"memory_plan", "prefix_cache", "reasoning", "runtime", "sampling", "server"} <= set(props)
    assert props["model_alias"] == server.get("/v1/models").json()["first_id"]
    assert props["daemon"] == {"alive": True}
    assert props["model"]["tokenizer_id"] == pico.info.tokenizer != ""
    assert props["model"]["draft_path"] is None
    settings, sampling = props["default_generation_settings"], props["sampling"]
    assert {"n_ctx", "temperature", "top_k", "top_p", "min_p", "repeat_penalty"} <= set(settings)
    assert sampling["repetition_penalty"] == settings["repeat_penalty"] == options.sampling.repetition_penalty
    assert props["budget_envelope"] == {"default_max_tokens": None, "reasoning_budget": -1}
    runtime = props["runtime"]
    assert runtime["backend"] == "CPU"
    assert {"cache_type_k", "cache_type_v", "granule", "slots", "decode_mode", "fit", "pool"} <= set(runtime)
    assert runtime["device_memory"]["CPU"]["total_bytes"] == pico.stats().devices["CPU"].total_bytes
    names = ("kind", "trim_strategy", "interval", "trims", "bytes")
    assert [runtime["pool"][name] for name in names] == ["none", "none", 0, 0, 0]


def test_capabilities_are_what_requests_may_ask_for(server: Live, tmp_path: Path) -> None:
    def found(server: Live) -> set[str]:
        capabilities = server.get("/props").json()["capabilities"]
        asked = {"messages": STORY, "max_tokens": 1}
        calls = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
        for name, more in (("chat", {}), ("tools", calls)):
            status = server.post(CHAT, {**asked, **more}).status_code
            assert status == (200 if capabilities[name] else 400)
        return {name for name, is_there in capabilities.items() if is_there}

    always = {"structured_output", "logprobs", "logit_bias", "streaming"}
    assert found(server) == always | {"chat", "reasoning", "prefix_cache"}
    with opened(LLAMA, max_ctx=256, prefix_cache_max_mib=0) as engine, live(engine) as other:
        assert found(other) == always
    with telling(tmp_path, "Yes.") as other:
        assert found(other) == always | {"chat", "tools", "reasoning", "prefix_cache"}


def test_scratch_pools_and_their_trims_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for, since a CPU has none: one that holds blocks, which the idle engine trims."""
    with opened(None, max_ctx=256, trim_interval=8192) as engine, live(engine) as server:
        pools = ScriptedPools(cached=5 * MIB, live=MIB)
        monkeypatch.setattr(engine._loaded.core.trims, "_pools", pools)
        until(lambda: server.get("/props").json()["runtime"]["pool"]["trims"])
        pools.cached = 3 * MIB
        monkeypatch.setattr(pools, "is_busy", True)  # so they stay
        pool = server.get("/props").json()["runtime"]["pool"]
        assert pool == {
            "kind": "legacy",
            "trim_strategy": "overlay",
            "interval": 8192,
            "trims": 1,
            "bytes": 5 * MIB,
            "live_bytes": MIB,
            "cached_bytes": 3 * MIB,
            "vmm_bytes": 0,
        }
        assert server.metric("dflash_pool_live_bytes") == MIB
        assert server.metric("dflash_pool_cached_bytes") == 3 * MIB
        assert server.metric("dflash_trimmed_bytes_total", reason="idle") == 5 * MIB


def test_an_engine_that_stopped_is_not_healthy() -> None:
    with opened(None, max_ctx=256) as engine, live(engine) as server:
        assert server.get("/props").json()["daemon"] == {"alive": True}
        engine.close()
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "stopped")
        assert server.get("/props").json()["daemon"] == {"alive": False}


@pytest.mark.parametrize(
    "path",
    ["/", "/health", "/props", "/slots", "/metrics", "/v1/models", "/v1/models/no", "/openapi.json", "/no"],
)
def test_head_is_answered_like_get_without_a_body(server: Live, path: str) -> None:
    with server.client() as client:
        asked, told = client.get(path), client.head(path)
        assert client.get("/health").status_code == 200  # on the same connection: nothing was left on it
    assert (told.status_code, told.content) == (asked.status_code, b"")
    assert told.headers["content-type"] == asked.headers["content-type"]
    assert int(told.headers["content-length"]) > 0


def test_head_needs_the_key_that_get_needs_and_posts_have_none(pico: Engine) -> None:
    with live(pico, api_key="k") as server, server.client() as client:
        assert [client.head(path).status_code for path in ("/health", "/props")] == [200, 401]
        told = client.head(CHAT, headers={"x-api-key": "k"})
        assert (told.status_code, told.headers["allow"]) == (405, "POST")


def test_props_shows_whole_paths_only_when_asked_to(pico: Engine) -> None:
    with live(pico, show_paths=True) as server:
        assert server.get("/props").json()["model_path"] == str(pico.info.model)


def test_reports_do_not_wait_for_the_engine(lasting: Engine) -> None:
    with live(lasting) as server:
        before = server.get("/props").json()
        with busy(server):
            props, slot = server.get("/props").json(), server.slots()["slots"][0]
            assert server.slots()["slots"][0]["state"] == "decode"  # so it did not wait for the end
    assert props["memory"].keys() == before["memory"].keys()
    assert slot["n_prompt"] == slot["n_prefilled"] > 0
    assert slot["n_generated"] > 0


def test_counters_are_the_sums_of_answers(pico: Engine) -> None:
    with live(pico) as server:
        usages = [
            server.post(CHAT, {"messages": STORY, "max_tokens": n, "stream": False}).json()["usage"]
            for n in (1, 2, 3)
        ]
        n_prompt = sum(usage["prompt_tokens"] for usage in usages)
        assert server.metric("dflash_prompt_tokens_total") == n_prompt
        assert server.metric("dflash_generated_tokens_total") == 6
        assert server.metric("dflash_answers_total", reason="length") == 3
        assert server.metric("dflash_requests_total", path=CHAT, status="200") == 3
        assert server.metric("dflash_first_token_seconds_count") == 3
        assert server.metric("dflash_queue_seconds_count") == 3
        assert server.post("/v1/nowhere", {}).status_code == 404
        assert server.metric("dflash_requests_total", path="other", status="404") == 1
        totals = server.get("/props").json()["totals"]
        assert (totals["answers"], totals["prompt_tokens"], totals["completion_tokens"]) == (3, n_prompt, 6)


def test_metrics_are_what_prometheus_reads(server: Live, pico: Engine) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    held = {(s.labels["device"], s.labels["kind"]): s.value for s in families["dflash_memory_bytes"].samples}
    memory = pico.memory()
    assert held == {(d, kind): n for d, kinds in memory.items() for kind, n in kinds.items()}
    assert families["dflash_max_ctx"].samples[0].value == 512
    assert families["dflash_slots"].samples[0].value == 1
    assert all(name.startswith("dflash_") for name in families)
    room = {s.labels["device"]: s.value for s in families["dflash_device_total_bytes"].samples}
    assert room == {name: memory.total_bytes for name, memory in pico.stats().devices.items()}
    assert 0 < families["dflash_device_free_bytes"].samples[0].value < room["CPU"]
    assert families["dflash_allocation_retries"].samples[0].value == 0
    assert families["dflash_joined_prompts"].samples[0].value == 0  # there is one slot


def test_what_steps_and_states_took_are_histograms(pico: Engine) -> None:
    with live(pico) as server:
        for _ in range(2):
            story = [{"role": "user", "content": "The fox and the hen. " * 15}]
            server.post(CHAT, {"messages": story, "max_tokens": 1})
        stats = pico.stats()
        families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics").text)}
    stored = stats.snapshots
    assert stored is not None
    times = {"granule": stats.granule_times, "capture": stored.capture_times, "restore": stored.restore_times}
    for name, expected in times.items():
        family = families[f"dflash_{name}_seconds"]
        assert family.type == "histogram"
        found = [s.value for s in family.samples if s.name.endswith("_bucket")]
        assert found == list(accumulate(expected.counts))
        assert found[-1] == expected.n > 0


def test_drafting_is_counted() -> None:
    with opened(None, max_ctx=256, spec="dflash", spec_width=4) as engine, live(engine) as server:
        answer = server.post(CHAT, {"messages": STORY, "max_tokens": 30}).json()
        props = server.get("/props").json()
        assert answer["timings"]["acceptance_length"] > 1
        assert props["speculative_mode"] == "dflash"
        assert props["speculative"]["acceptance_length"] == pytest.approx(
            answer["timings"]["acceptance_length"]
        )
        assert server.metric("dflash_drafted_tokens_total") == props["speculative"]["drafted"] > 0
        assert server.metric("dflash_accepted_tokens_total") == props["speculative"]["accepted"] > 0
        plain = server.post(CHAT, {"messages": STORY, "max_tokens": 30, "spec": "off"}).json()
        assert plain["choices"][0]["message"] == answer["choices"][0]["message"]


def test_every_answer_bears_an_id(server: Live) -> None:
    ids = [server.get(path).headers["x-request-id"] for path in ("/health", "/health", "/nowhere")]
    assert len(set(ids)) == 3


def test_the_page_may_load_nothing_but_itself(pico: Engine) -> None:
    with live(pico, api_key="k") as server:
        answer = server.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        allowed = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'sha256-" in allowed
        assert "unsafe" not in allowed
        for element in ("script", "style"):
            (text,) = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{element}-src 'sha256-{digest}'" in allowed
        leads_to = re.findall(r'(?:src|href|action)="([^"]*)"', answer.text)
        assert leads_to == ["data:,", "#message"]
