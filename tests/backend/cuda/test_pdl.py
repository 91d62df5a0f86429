"""Programmatic dependent launch: every kernel that says it waits does so, proved on its PTX."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.backend.cuda import ptx
from tests.backend.cuda.launch_cases import chosen_works, one_of_each, some_works
from tests.profiles import exhaustive, tiers
from workbench.backend.cuda.kernels import nvrtc
from workbench.backend.cuda.kernels.kernel import Kernel

# body of a kernel (float* p, const float* q, const float* __restrict__ w, int n), what is found
PLANTED = [
    ("if (n > 3) p[0] = 1; pdl_wait(); p[1] = 2;", "store before the wait"),
    ("set(p); pdl_wait();", "calls"),
    ("if (n > 3) p[0] = 1;", "ends without the wait"),
    ('float v; asm volatile("ld.f32 %0, [%1];" : "=f"(v) : "l"(q)); pdl_wait(); p[0] = v;',
     "load before the wait"),
    ("atomicAdd((int*)p, 1); pdl_wait();", "store before the wait"),
    ("if (n > 3) pdl_wait(); p[0] = 1;", "store before the wait"),
    ('asm volatile("{.reg .pred c; setp.gt.s32 c, %0, 3; @c griddepcontrol.wait;}" :: "r"(n));'
     "p[0] = 1;", "store before the wait"),
    ("__shared__ __align__(16) float s[4]; unsigned a = __cvta_generic_to_shared(s);"
     'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(a), "l"(q));'
     "pdl_wait(); p[0] = s[n];", "load before the wait"),
    ("switch (n) { case 0: case 1: case 2: pdl_wait(); break; case 3: pdl_wait(); break;"
     " case 4: p[4] = 1; pdl_wait(); break; case 5: pdl_wait(); p[5] = 2; break;"
     " default: pdl_wait(); } p[0] = n;", "store before the wait"),
    # nothing is wrong with these
    ("float v = __ldg(w + n); pdl_wait(); if (n > 3) return; p[0] = v + q[0];", ""),
    ("if (n > 3) { float v = __ldg(w + n); pdl_wait(); p[0] = v; return; } pdl_wait(); p[1] = 1;",
     ""),
    ("__shared__ float s[64]; s[threadIdx.x] = n; float own[40];"
     "for (int i = 0; i < n; i++) own[(i * n) % 40] = s[i]; __syncthreads(); pdl_wait();"
     "p[0] = own[n % 40];", ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), PLANTED)
def test_the_checker_finds_what_is_wrong(body: str, says: str):
    source = f"""#include "common.cuh"
    __noinline__ __device__ void set(float* p) {{ *(volatile float*)p = 1; }}
    extern "C" __global__ void k(float* p, const float* q, const float* __restrict__ w, int n) {{
        pdl_trigger();
        {body}
    }}"""
    found = ptx.check(ptx.compile_ptx("planted", source.encode()), "k")
    if says:
        assert any(says in violation for violation in found.violations), found
    else:
        assert not found.violations and found.triggers
        assert bool(found.early_loads) == ("__ldg" in body), found.early_loads


Modules = dict[tuple[str, tuple[str, ...]], set[str]]
# Those with a kernel that declares its wait, and some more. Asking the launch table which those
# are takes seconds, too long for what every worker does to find the tests.
FILES = sorted(path.stem for path in nvrtc.source_dir().glob("*.cu"))
# `make test` compiles those that take a second
SLOW = ("product", "product_qkv", "sampling", "tensor_product")
SLOW += ("attention", "attention_tile", "attention_vec")
MARKS = {file: [pytest.mark.slow] if file in SLOW else [] for file in FILES}
ASKED = [pytest.param(file, one_of_each, marks=MARKS[file]) for file in FILES]
ASKED += [exhaustive(file, chosen_works) for file in FILES]


def waiting(works: Callable[[], Iterable[Kernel]], file: str) -> Modules:
    """(file, defines) -> its functions that some node launches and that declare their wait."""
    found: Modules = {}
    for work in works():
        if work.waits and work.file.startswith(file):
            found.setdefault((work.file, work.defines), set()).add(work.function)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("file", "works"), ASKED)
def test_nothing_dependent_comes_before_the_wait(file: str, works):
    for (own, defines), names in waiting(works, file).items():
        for name in names if own == file else ():
            verdict = ptx.check(ptx.kernel_ptx(file, defines), name)
            assert not verdict.violations, f"{name} {defines}: {verdict.violations[0]}"
            assert verdict.triggers, f"{name} {defines} does not let the next kernel begin"


@pytest.mark.long
@pytest.mark.parametrize(
    ("works", "every"), [(one_of_each, 8), *tiers((some_works, 1), (chosen_works, 1))]
)
def test_products_request_weights_before_they_wait(works, every):
    """What the toggle is for: a product that loads nothing early gains nothing from it."""
    products = list(waiting(works, "product").items())[::every]
    assert products
    for (file, defines), names in products:
        for name in names:
            assert ptx.check(ptx.kernel_ptx(file, defines), name).early_loads, (name, defines)
