"""/metrics: what Prometheus reads is what was served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.live import Live, live

PAGE = Path(__file__).resolve().parents[2] / "workbench" / "server" / "README.md"
N_MADE = 3 * 5 + 7


class Metrics(NamedTuple):
    """Type by family; value by name of the sample and its labels."""

    types: dict[str, str]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def value(self, name: str, **labels: str) -> float:
        return self.values[f"workbench:{name}", tuple(labels.items())]


def read(server: Live) -> Metrics:
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert len({f.name for f in families}) == len(families)
    values = {(s.name, tuple(s.labels.items())): s.value for f in families for s in f.samples}
    return Metrics({f.name: f.type for f in families}, values)


@pytest.fixture(scope="module")
def found(texts) -> Metrics:
    with live(texts, step_s=0.001) as server:
        server.complete(prompt=[1, 2], n=3, max_tokens=5)
        server.complete(prompt=[1], max_tokens=7, stream=True)
        assert server.answer("/v1/completions", {"prompt": "a", "n": -2}).status_code == 400
        return read(server)


def test_counters_are_what_was_served(found):
    assert found.value("tokens_predicted_total") == found.value("engine_tokens_total") == N_MADE
    assert found.value("prompt_tokens_total") == 3 * 2 + 1
    assert found.value("requests_total", outcome="length") == 4
    assert found.value("requests_total", outcome="invalid") == 1
    assert found.value("requests_pending") == found.value("requests_processing") == 0
    assert found.value("kv_cache_usage_ratio") == 0


@pytest.mark.parametrize(
    "name",
    ["time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"],
)
def test_histograms_count_each_request_or_token_once(found, name):
    name, n = f"{name}_seconds", N_MADE - 4 if "token_latency" in name else 4
    buckets = [v for (of, _), v in found.values.items() if of == f"workbench:{name}_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == found.value(f"{name}_count") == n
    assert found.types[f"workbench:{name}"] == "histogram" and 0 < found.value(f"{name}_sum") < 60


def test_the_page_has_every_metric(found):
    table = PAGE.read_text().partition("| metric |")[2].partition("\n\n")[0]
    listed = dict(re.findall(r"^\| `workbench:(\w+)` \| (\w+) \|", table, re.M))
    types = {name.removeprefix("workbench:"): kind for name, kind in found.types.items()}
    assert listed == types and len(types) > 15


def test_counters_rise_while_requests_run(texts):
    body = {"prompt": [1, 2, 3], "max_tokens": 300, "stream": True}
    with live(texts, step_s=0.01) as server, server.http() as http:
        assert read(server).value("e2e_request_latency_seconds_count") == 0
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first, later = ([next(lines) for _ in range(5)] and read(server) for _ in range(2))
    for name in ("tokens_predicted_total", "engine_steps_total", "kv_cache_usage_ratio"):
        assert 0 < first.value(name) < later.value(name)
    assert first.value("prompt_tokens_total") == 3 and first.value("requests_processing") == 1
