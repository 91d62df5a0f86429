"""lm-eval's own `local-completions` against the server, where lm-eval is installed."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from tests.serve.test_whole_server import model as model
from tests.serve.test_whole_server import real as real
from workbench.engine.engine import Engine
from workbench.server.text import TokenTexts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="no lm_eval"),
]

QUESTIONS = [
    ("The engine waits for", [" the device", " a token", " nothing, and goes on"]),
    ("A stream is", [" a queue", " a river of many events"]),
]


class Words:
    """A tokenizer as lm-eval wants one: that of the file."""

    def __init__(self, texts: TokenTexts):
        self.encode = lambda text, **_: texts.tokenizer.encode(text, False)
        self.bos_token_id = self.eos_token_id = texts.tokenizer.eos_id


def language_model(url: str, texts: TokenTexts):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    made = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="chats", tokenizer_backend=None, batch_size=2,
        num_concurrent=2, max_length=512,
    )  # fmt: skip
    made.tokenizer, made.tokenized_requests = Words(texts), True
    made.tok_encode = made.tokenizer.encode
    return made


def test_loglikelihoods_are_those_of_the_logits(real, texts):
    from lm_eval.api.instance import Instance

    pairs = [(context, end) for context, ends in QUESTIONS for end in ends]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = language_model(real.url, texts).loglikelihood(asked)
    encode = texts.tokenizer.encode
    with Engine.load(real.model, device="embedded", n_ctx=512) as engine:
        for (context, end), (said, _) in zip(pairs, found, strict=True):
            ids, n = encode(context + end, False), len(encode(context, False))
            engine.reset()
            wide = engine.prefill(ids, outputs="all").astype(np.float64)
            known = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
            wanted = sum(known[i - 1, ids[i]] for i in range(n, len(ids)))
            assert said == pytest.approx(wanted, abs=0.1)


def test_a_task_of_choices_is_evaluated(real, texts, tmp_path, monkeypatch):
    import lm_eval

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"q": q, "choices": ends, "gold": 0} for q, ends in QUESTIONS]
    data = tmp_path / "task.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "choices", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(data)}}, "output_type": "multiple_choice",
        "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}", "doc_to_target": "gold",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    made = lm_eval.simple_evaluate(
        model=language_model(real.url, texts), tasks=[task], bootstrap_iters=0
    )
    assert made["results"]["choices"]["acc,none"] in (0.0, 0.5, 1.0)
    assert made["n-samples"]["choices"]["effective"] == len(rows)
