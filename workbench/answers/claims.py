"""What was said in llama.cpp's threads: the words, the figures, and who said them of which card.

A claim is what the author of a change says that it gains. A measurement is what somebody read from
a clock, a guess is a cause that nobody tested, and history is what became of the change later. Only
a claim or a measurement has figures that a run here can be held against.

`words` are quoted from the thread, without its markup. Where they could not be had, `words` is
empty and `figures` is a paraphrase of the thread. Notebooks, the results page and the verdicts of
conclusions take their figures from here; `tests/notebooks` holds the notebooks to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from workbench.common.errors import UsageError
from workbench.common.tables import Table, markdown

HEADING = "## What the threads say"
SAID = ("thread", "who", "kind", "words or figures", "card", "model")
LATER = ("thread", "who", "words")


class QuoteKind(StrEnum):
    """What a quote is; see the module."""

    CLAIM = "claim"
    MEASUREMENT = "measurement"
    GUESS = "guess"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Claim:
    """One quote.

    thread: `#17795` of ggml-org/llama.cpp; another repository's has its name before the `#`.
    who: the writer and the day.
    words: as written there; empty where only the figures are known.
    figures: what was measured, in words of ours; may be empty beside `words`.
    low, high: speedups, 1.02 for 2 % more tokens a second; both 0 where none is given, and `low`
        is 1 where the words are "up to".
    card, model: as named there; empty where they are not named.
    notebooks: where it is shown.
    verdict: its figures are the thread's side of those notebooks' first sentence.
    """

    thread: str
    who: str
    kind: QuoteKind
    words: str
    figures: str = ""
    low: float = 0.0
    high: float = 0.0
    card: str = ""
    model: str = ""
    notebooks: tuple[str, ...] = ()
    verdict: bool = False

    @property
    def gain(self) -> str:
        """`2 to 7 %`, `up to 30 %` or `-8 %`: the share of tokens a second; empty without one."""
        if not self.high:
            return ""
        low, high = (round(100 * (speedup - 1)) for speedup in (self.low, self.high))
        if low == high:
            return f"{low} %"
        return f"up to {high} %" if low == 0 and "up to" in self.said() else f"{low} to {high} %"

    def said(self) -> str:
        """The words in quotation marks, then the figures."""
        quoted = f'"{self.words}"' if self.words else ""
        return " ".join(filter(None, (quoted, self.figures)))


TOUR, SYNC, REUSE, PLANS = ("00_tour",), ("02_sync_modes",), ("03_graph_reuse",), ("04_plans",)
GAPS, STREAMS, MASKED, SERVING = (
    ("01_baseline_gaps",), ("05_streams",), ("06_masked_kv",), ("07_batched_serving",),
)  # fmt: skip

CLAIMS = (
    # 00
    Claim(
        "#7456", "agray3, 2024-05-22", QuoteKind.MEASUREMENT,
        "The remaining 10-15% of the time is taken by CPU activities",
        "(of each token's; the rest is the device's graph)",
        card="A100, H100", model="Llama 2 7B and 13B Q4_K_M", notebooks=(*TOUR, *GAPS),
    ),
    # 02
    Claim(
        "#17795", "aendk, 2025-12-05", QuoteKind.CLAIM,
        "I see between 1% and 2% perf gain depending on the model, GPU and settings.",
        "(Linux; gpt-oss 20B 1.4 % or less)", 1.01, 1.02, "RTX Pro 6000 Blackwell", "several", SYNC,
        verdict=True,
    ),
    Claim(
        "#17795", "aendk, 2026-01-13", QuoteKind.MEASUREMENT,
        "I see speedups between 3-9% on windows", "(`aaaag`; gpt-oss 20B 8 to 9 %)", 1.03, 1.09,
        "RTX Pro 6000 Blackwell", "several", SYNC,
    ),
    Claim(
        "#17795", "aendk, 2026-01-19", QuoteKind.MEASUREMENT,
        "On windows, we lose between ~1% and ~2% compared to earlier tests",
        "(`saaaasg`, as merged: 2 to 8 % more; gpt-oss 295.02 -> 317.25 t/s)", 1.02, 1.08,
        "RTX Pro 6000 Max-Q", "gpt-oss 20B MXFP4, Llama 3B Q4_K_M, Qwen3 4B Q4_K_M", SYNC,
    ),
    Claim(
        "#17795", "aendk", QuoteKind.MEASUREMENT, "",
        "20 waits of a token can be removed; each is 0.40 to 0.45 % of it (Windows)",
        card="RTX Pro 6000 Blackwell", model="gpt-oss 20B", notebooks=(*SYNC, *GAPS),
    ),
    Claim(
        "#17795", "aendk, 2026-01-13", QuoteKind.GUESS,
        "The likely reason for this is that the CUDA API is slower on windows.", notebooks=SYNC,
    ),
    Claim(
        "#20463", "ggerganov, 2026-03-12", QuoteKind.HISTORY,
        "So for now also reverting that change.",
        "(#17795 is rolled back: wrong perplexity on several GPUs)", notebooks=SYNC,
    ),
    Claim(
        "#20793", "aendk, 2026-03-20", QuoteKind.HISTORY,
        "it was rolled back due to a bug surfacing in multi-GPU pipeline parallel settings",
        "(merged again, with a fix)", notebooks=SYNC,
    ),
    Claim(
        "#25138", "ORippler, 2026-06-29", QuoteKind.HISTORY,
        "Seems the perf regressions are not restriced to EOL AMD HW",
        "(#20793 is reverted)", notebooks=SYNC,
    ),
    Claim(
        "#25319", "JohannesGaessler, 2026-07-05", QuoteKind.HISTORY,
        "Part of the problem is that the ggml backend interface is incomplete in some places",
        "(a redesign, open)", notebooks=SYNC,
    ),
    # 03
    Claim(
        "#8366", "agray3, 2024-07-08", QuoteKind.CLAIM,
        "Here are the BS 1 inference performance improvements I have measured for this "
        "optimization",
        "(3 to 7 % with 7B, 2 to 5 % with 13B)", 1.02, 1.07,
        "H100-SXM, H100-PCIe, A100-PCIe, L40S, RTX 4090, A40", "Llama 7B and 13B Q4",
        REUSE, verdict=True,
    ),
    Claim(
        "ik_llama.cpp#94", "ikawrakow, 2024-10-18", QuoteKind.MEASUREMENT,
        "Here is what we get in performance improvement on CUDA",
        "(1.017 with 8B, 1.029 with 3B, 1.038 with 1B, 1.117 with 46 MiB)", 1.017, 1.117,
        "RTX 4080", "Llama 8B, 3B and 1B Q4_0, TriLM 99.76 M", REUSE,
    ),
    Claim(
        "#8366", "agray3, 2024-10-10", QuoteKind.HISTORY,
        "It's not obvious to me that there's any way to adapt this patch",
        "(closed, not merged)", notebooks=REUSE,
    ),
    Claim(
        "#14482", "ggerganov, 2025-07-01", QuoteKind.HISTORY,
        "its topology (shapes, strides, parameters, etc.) has to be entirely defined by the set of "
        "input tensors",
        "(merged: `set_rows`, llama.cpp's way today)", notebooks=REUSE,
    ),
    # 04
    Claim(
        "#16548", "wishstudio, 2025-10-13", QuoteKind.CLAIM,
        "this universally accelerate hybrid inference tg performance by up to 30%",
        "", 1.0, 1.30, "", "", PLANS, verdict=True,
    ),
    Claim(
        "#16548", "wishstudio, 2025-10-13", QuoteKind.CLAIM,
        "even repeatitively build a graph then execute it only once is always faster than calling "
        "the kernels individually",
        notebooks=PLANS,
    ),
    Claim(
        "#16548", "DocShotgun, 2025-10-16", QuoteKind.MEASUREMENT,
        "Unfortunately appears to be non-beneficial on my setup (maybe very minmally "
        "detrimental).",
        "(Linux)", card="RTX PRO 6000 and a Xeon of the 5th generation",
        model="GLM-4.6, experts of most layers on the CPU", notebooks=PLANS,
    ),
    Claim(
        "#16548", "testers on Linux", QuoteKind.MEASUREMENT, "",
        "from a regression to a bit over 2 % more", 1.0, 1.02, notebooks=PLANS,
    ),
    Claim(
        "#16548", "a tester on Windows", QuoteKind.MEASUREMENT, "", "8 % fewer tokens a second",
        0.92, 0.92, notebooks=PLANS,
    ),
    Claim(
        "#16548", "DocShotgun, 2025-10-17", QuoteKind.GUESS,
        "perhaps the lower kernel launch overhead on Linux makes this not necessarily true there?",
        notebooks=PLANS,
    ),
    Claim(
        "#18934", "am17an, 2026-01-19", QuoteKind.HISTORY,
        "This PR adds a cuda graph per split (a split is keyed via the first node in the split)",
        "(merged; 4 to 10 % more, glm4moe 106B IQ4_XS, 8 to 64 layers' experts on the CPU)",
        1.04, 1.10, "2x RTX 4090, RTX 5090", "glm4moe 106B IQ4_XS", PLANS,
    ),
    # 05
    Claim(
        "#16991", "am17an", QuoteKind.CLAIM, "",
        "tg128 1.03 to 1.09 times as fast (RTX 5090), 1.01 to 1.08 (4090); fused inside branches",
        1.01, 1.09, "RTX 5090, RTX 4090",
        "gpt-oss 20B MXFP4, Llama 8B Q8_0, Qwen3 8B F16, Qwen3 30B.A3B Q4_K_M", STREAMS,
        verdict=True,
    ),
    Claim(
        "#16991", "am17an", QuoteKind.MEASUREMENT, "",
        "without fusion 1.03 to 1.06 (RTX 5090), 1.01 to 1.06 (4090)", 1.01, 1.06,
        "RTX 5090, RTX 4090", "the same", STREAMS,
    ),
    Claim(
        "#16991", "am17an", QuoteKind.MEASUREMENT, "", "pp512 1.00 throughout: the control",
        1.0, 1.0, "RTX 5090, RTX 4090", "the same", STREAMS,
    ),
    Claim(
        "#16991", "IMbackK, 2025-11-12", QuoteKind.MEASUREMENT,
        "the mi100 performance is indeed just unchanged. On the other hand rx6800xt sees a small "
        "perf decrease",
        "(0.97)", 0.97, 1.0, "MI100, RX 6800 XT", "Llama 7B Q4_0", STREAMS,
    ),
    Claim(
        "#16991", "ORippler, 2025-11-17", QuoteKind.GUESS,
        "I would still love to fully root-cause what happens in SET_ROWS for qwen3 when FA is "
        "enabled that leads to garbled output (which I presume is memory-related).",
        notebooks=STREAMS,
    ),
    Claim(
        "#18496", "am17an, 2025-12-30", QuoteKind.HISTORY,
        "To reduce surface area, the forking node needs to be of the form attn_norm, since that is "
        "only pattern (QKV) I've tested extensively",
        "(merged; off by default)", notebooks=STREAMS,
    ),
    Claim(
        "#21897", "JohannesGaessler, 2026-04-15", QuoteKind.HISTORY,
        "Right now we are determining memory re-use under the assumption that nodes in a graph are "
        "executed in the exact order as their indices.",
        "(open: sources are not protected)", notebooks=STREAMS,
    ),
    # 06
    Claim(
        "#14924", "JohannesGaessler, 2025-07-28", QuoteKind.CLAIM,
        "The main benefit is higher batched server throughput with LLAMA_SET_ROWS but it also "
        "makes prompt processing with batch sizes >= 1024 a bit faster.",
        "(server: up to 1.15 times as fast, 1.25 by the fit's asymptote)", 1.0, 1.15,
        "6x RTX 4090 at 1350 MHz, 32 slots", "Llama 3.2 1B Q4_K_M", MASKED, verdict=True,
    ),
    Claim(
        "#14924", "JohannesGaessler", QuoteKind.MEASUREMENT, "",
        "pp8192, 1024 tokens and more at once: P40 1.03 to 1.10, RTX 4090 1.00 to 1.02, RX 6800 "
        "1.08 to 1.18; fewer at once: 1.00",
        1.0, 1.18, "P40, RTX 4090, RX 6800", "Llama 8B Q4_0", MASKED,
    ),
    Claim(
        "#14924", "JohannesGaessler, 2025-07-28", QuoteKind.MEASUREMENT, "overhead <1% end-to-end",
        "(of the kernel that looks at the mask)", notebooks=MASKED,
    ),
    Claim(
        "#14924", "JohannesGaessler", QuoteKind.GUESS, "",
        "the gain of batched decode comes about equally from skipping and from the mma kernel in "
        "place of the vector kernel",
        notebooks=MASKED,
    ),
    Claim(
        "#14735", "JohannesGaessler, 2025-07-17", QuoteKind.MEASUREMENT,
        "master and the PR are running different kernels for the RTX 4090, master is running the "
        "vector kernel, the PR is running the mma kernel",
        "(of an earlier attempt)", card="RTX 4090", model="Llama 3 8B Q4_0", notebooks=MASKED,
    ),
    Claim(
        "#28943", "moristeven477-ship-it, 2026-09-15", QuoteKind.HISTORY,
        "It covers the measured -ub 512 --kv-unified configuration, in which the existing "
        "flash_attn_mask_to_KV_max helper is not launched.",
        "(closed: the gate of #14924 stays shut for the server's defaults)", notebooks=MASKED,
    ),
    # 07
    Claim(
        "#14924", "JohannesGaessler, 2025-07-29", QuoteKind.MEASUREMENT, "",
        "989 requests, 1.01 M tokens in, 121 k out: vLLM 130.76 s, llama.cpp 209.46 s",
        model="Qwen 2.5 (\"4b\" as written)", notebooks=SERVING, verdict=True,
    ),
    Claim(
        "#14924", "JohannesGaessler, 2025-07-29", QuoteKind.MEASUREMENT, "With 128 slots I get:",
        "174.37 s, 5.67 requests/s, 693.41 tokens/s", model="the same", notebooks=SERVING,
    ),
    Claim(
        "#14924", "JohannesGaessler, 2025-07-29", QuoteKind.GUESS,
        "presumably since the requests sent by vllm is following a Poisson distribution some of "
        "the requests are stalling since all slots are in use",
        notebooks=SERVING,
    ),
    Claim(
        "#14924", "in the thread", QuoteKind.GUESS, "",
        "sampling on one thread of the host; streams sliced where active slots are not neighbours, "
        "at 128 slots",
        notebooks=SERVING,
    ),
    Claim(
        "#14948", "JohannesGaessler, 2025-07-29", QuoteKind.MEASUREMENT,
        "I doesn't seem to make a difference",
        "(another choice of slots; 349.66 s and 349.38 s with 8, 176.16 s and 174.51 s with 128)",
        notebooks=SERVING,
    ),
    Claim(
        "#14948", "JohannesGaessler, 2025-07-30", QuoteKind.HISTORY,
        "Sorry, I did the benchmark wrong. The default of vllm bench is to front-load all of the "
        "requests (infinite rate) rather than to schedule them with a Poisson distribution.",
        notebooks=SERVING,
    ),
    Claim(
        "#27050", "swiftjiang, 2026-08-14", QuoteKind.HISTORY,
        "backend sampling (-bs) gives +48% throughput at 32 slots (706 -> 1046 tok/s)",
        "(draws by the device)", 1.48, 1.48, "RTX 5090", "", SERVING,
    ),
)  # fmt: skip

# of #17795: a token of gpt-oss 20B on Windows, tokens/s before, and the share of it that each of
# its removable waits took
WINDOWS_TPS, WAIT_SHARE = 295.02, (0.0040, 0.0045)
# of #14924: slots, with all 989 requests of some 1024 + 128 tokens there at once -> seconds:
# llama.cpp, vLLM
SERVED_S = {
    1: (1340.8, 1394.9), 2: (815.6, 885.7), 3: (616.5, 485.0), 4: (526.5, 485.9),
    8: (349.7, 288.4), 16: (254.1, 186.6), 32: (208.5, 131.9), 64: (184.0, 114.8),
    128: (176.2, 115.2),
}  # fmt: skip


def of(notebook: str) -> tuple[Claim, ...]:
    """What the threads say about a notebook's question."""
    return tuple(claim for claim in CLAIMS if notebook in claim.notebooks)


def verdict(notebook: str) -> Claim:
    """The claim that a notebook's first sentence holds its run against.

    Raises UsageError where no claim, or more than one, is marked for it.
    """
    found = [claim for claim in of(notebook) if claim.verdict]
    if len(found) != 1:
        raise UsageError(f"{len(found)} claims are the verdict's of notebook {notebook!r}, not one")
    return found[0]


def threads_us() -> tuple[float, float]:
    """us of one wait in the thread of #17795, on Windows: the least and the most."""
    token_us = 1e6 / WINDOWS_TPS
    low, high = (share * token_us for share in WAIT_SHARE)
    return low, high


def tables(notebook: str) -> tuple[Table, Table]:
    """What was said then, and what became of it: a row for each quote, `-` where a card or model
    is not named."""
    said, later = list[dict[str, str]](), list[dict[str, str]]()
    for one in of(notebook):
        row = {"thread": one.thread, "who": one.who}
        if one.kind == QuoteKind.HISTORY:
            later.append(row | {"words": one.said()})
        else:
            row |= {"kind": one.kind.value, "words or figures": one.said()}
            said.append(row | {"card": one.card or "-", "model": one.model or "-"})
    return Table(said, columns=list(SAID)), Table(later, columns=list(LATER))


def cell(notebook: str) -> str:
    """The source of the notebook's markdown cell with its quotes; empty where it has none."""
    return "\n\n".join(_paragraphs(notebook))


def _paragraphs(notebook: str) -> Iterator[str]:
    said, later = tables(notebook)
    if said.empty:
        return
    yield HEADING
    yield (
        "In quotation marks: the words of the thread. Without: its figures. A *guess* is a cause "
        "that was not tested there."
    )
    yield markdown(said)
    if not later.empty:
        yield "What became of it:"
        yield markdown(later)
