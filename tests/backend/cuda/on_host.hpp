// What CUDA C++ needs to run on a CPU, one block after another: a block's threads are fibers of one
// thread of the system. A fiber runs until it waits for others, in an order that a seed decides, so
// a barrier that is missing shows in some order.
//
// A collective wants all lanes of a warp, and a barrier all threads of a block. Where some never
// come, or come to another one, the process says so and ends.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)
using std::max;
using std::min;

struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline Index threadIdx, blockIdx, blockDim, gridDim;
constexpr int SHARED_BYTES = 1 << 17;
alignas(16) inline unsigned char shared_memory[SHARED_BYTES];

namespace on_host {

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "on_host: %s (block %u, %u, thread %u)\n", what, blockIdx.x, blockIdx.y,
                 threadIdx.x);
    std::abort();
}

constexpr int STACK = 1 << 17;
struct Fiber {
    ucontext_t context;
    bool done;
};
// Those who wait for each other: how many have come, to what, and with which values.
struct Meeting {
    int want = 0, come = 0, generation = 0, kind = 0;
    uint64_t values[1024], all[1024];
};
inline std::vector<Fiber> fibers;
inline std::vector<char> stacks;
inline ucontext_t scheduler;
inline Meeting warps[32], block;
inline int progress;  // fibers that have come to a meeting, or ended, since the last round

inline void yield(unsigned self) {
    swapcontext(&fibers[self].context, &scheduler);
}

// Brings `value`; gives what all have brought.
inline const uint64_t* meet(Meeting& m, int kind, int at, uint64_t value) {
    const unsigned self = threadIdx.x;
    if (m.come && m.kind != kind) fail("lanes are at different collectives");
    m.kind = kind, m.values[at] = value, progress++;
    const int generation = m.generation;
    if (++m.come == m.want) {
        std::memcpy(m.all, m.values, sizeof(uint64_t) * m.want);
        m.come = 0, m.generation++;
    } else {
        while (m.generation == generation) yield(self);
    }
    return m.all;
}

template <class T>
T exchange(int kind, T value, int from) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    const int lane = threadIdx.x % 32;
    bits = meet(warps[threadIdx.x / 32], kind, lane, bits)[from < 0 || from > 31 ? lane : from];
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

inline float half_to_float(uint16_t h) { _Float16 f; std::memcpy(&f, &h, 2); return float(f); }
inline uint16_t float_to_half(float x) {
    const _Float16 f = _Float16(x);
    uint16_t h;
    std::memcpy(&h, &f, 2);
    return h;
}

template <class T>
T argument(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), const uint64_t* args, std::index_sequence<I...>) {
    kernel(argument<A>(args[I])...);
}

inline void (*entry)();
inline void run_fiber() {
    const unsigned self = threadIdx.x;
    entry();
    fibers[self].done = true, progress++;
    yield(self);
}

// Runs a kernel of `n` threads a block over a grid; blocks from the first to the last, or backwards.
template <class... A>
void launch(void (*kernel)(A...), const uint64_t* args, unsigned grid_x, unsigned grid_y, unsigned n,
            unsigned seed) {
    static void (*of)(A...);
    static const uint64_t* with;
    of = kernel, with = args;
    entry = [] { call(of, with, std::index_sequence_for<A...>{}); };
    fibers.assign(n, {}), stacks.resize(size_t(n) * STACK);
    blockDim = {n, 1, 1}, gridDim = {grid_x, grid_y, 1};
    std::mt19937 random(seed);
    std::vector<unsigned> order(n);
    for (unsigned number = 0; number < grid_x * grid_y; number++) {
        const unsigned at = seed % 2 ? grid_x * grid_y - 1 - number : number;
        blockIdx = {at % grid_x, at / grid_x, 0};
        std::memset(shared_memory, 0xff, SHARED_BYTES);  // NaN
        block = {}, block.want = int(n);
        for (unsigned w = 0; w < n / 32; w++) warps[w].want = 32, warps[w].come = 0;
        for (unsigned i = 0; i < n; i++) {
            order[i] = i, fibers[i].done = false;
            getcontext(&fibers[i].context);
            fibers[i].context.uc_stack.ss_sp = stacks.data() + size_t(i) * STACK;
            fibers[i].context.uc_stack.ss_size = STACK;
            fibers[i].context.uc_link = nullptr;
            makecontext(&fibers[i].context, run_fiber, 0);
        }
        std::shuffle(order.begin(), order.end(), random);
        for (unsigned left = n; left;) {
            left = 0, progress = 0;
            for (const unsigned i : order) {
                if (fibers[i].done) continue;
                threadIdx = {i, 0, 0};
                swapcontext(&scheduler, &fibers[i].context);
                left += !fibers[i].done;
            }
            if (left && !progress) fail("some threads wait for others that never come");
        }
    }
}

}  // namespace on_host

enum { SYNCTHREADS, SYNCTHREADS_OR, SYNCWARP, SHUFFLE, SHUFFLE_UP, SHUFFLE_XOR, BALLOT, ANY, MOST };
inline void __syncthreads() { on_host::meet(on_host::block, SYNCTHREADS, threadIdx.x, 0); }
inline int __syncthreads_or(int x) {
    const uint64_t* all = on_host::meet(on_host::block, SYNCTHREADS_OR, threadIdx.x, x != 0);
    return std::any_of(all, all + blockDim.x, [](uint64_t one) { return one != 0; });
}
inline void __syncwarp() { on_host::exchange(SYNCWARP, 0, 0); }
template <class T>
T __shfl_sync(unsigned, T x, int from) {
    return on_host::exchange(SHUFFLE, x, from);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int by) {
    return on_host::exchange(SHUFFLE_XOR, x, int(threadIdx.x % 32) ^ by);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
    return on_host::exchange(SHUFFLE_UP, x, int(threadIdx.x % 32) - by);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const uint64_t* all =
        on_host::meet(on_host::warps[threadIdx.x / 32], BALLOT, threadIdx.x % 32, x);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= unsigned(all[i]) << i;
    return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const uint64_t* all =
        on_host::meet(on_host::warps[threadIdx.x / 32], MOST, threadIdx.x % 32, x);
    return unsigned(*std::max_element(all, all + 32));
}
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline float __int_as_float(int x) { return on_host::argument<float>(unsigned(x)); }
inline float __uint_as_float(unsigned x) { return on_host::argument<float>(x); }
inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
// rounded by themselves: g++ would join both in one instruction
inline float __fmul_rn(float a, float b) { volatile float x = a * b; return x; }
inline float __fadd_rn(float a, float b) { volatile float x = a + b; return x; }
template <class T>
T atomicAdd(T* at, T x) {  // fibers of one thread
    return std::exchange(*at, T(*at + x));
}
inline float __expf(float x) { return std::exp(x); }
template <class T>
T __ldg(const T* p) {
    return *p;
}
inline uint64_t __cvta_generic_to_shared(const void* p) { return uint64_t(p); }
