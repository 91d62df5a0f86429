// The end of tensor_product.cu. The sums of the blocks of a tile are added, and a bias. Then the
// results, or silu(gate) * up, are stored as floats or as Q8_ACT.
//
// Versions (times: tensor_product.cu): sums added in a cluster, or through memory; quantisation
// with 32 columns a warp, or with four columns a thread.
#pragma once
#include "quantise.cuh"
#include "tile_block.cuh"
#include "warpgroup.cuh"

DEVICE void multipliers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// In shared memory, results that are to be quantised lie after the sums of the block, because other
// blocks may still read the sums. PITCH spreads the stores of a warp, 8 columns of 4 tokens, over
// all banks.
constexpr int PITCH = BLOCK_ROWS + 4, VALUES_AT = GROUPS * THREADS * 16;
static_assert(!QUANTISED || VALUES_AT + TOKENS * PITCH * 4 <= FULL_AT, "no room for results");

struct Result {
    const Part& part;
    const float* other_bias;  // the bias of up
    i64 n_tokens;
    u8* shared;

    DEVICE static float biased(float v, const float* bias, i64 row) {
        return bias ? v + __ldg(bias + row) : v;
    }
#if GATED
    // Stores a thread's four sums of a group of 8 tokens: gate and up of two tokens.
    DEVICE void store(int group, float4 c) const {
        const i64 rows = part.segment.rows, row = part.row0 + row_of();
        const u32 t = 8 * group + threadIdx.x % 4 * 2;
        if (row >= rows) return;
        const float* bias = part.segment.bias;
        const float v[2] = {
            silu_times(biased(c.x, bias, row), biased(c.z, other_bias, row)),
            silu_times(biased(c.y, bias, row), biased(c.w, other_bias, row)),
        };
#pragma unroll
        for (int i = 0; i < 2; i++) {
#if QUANTISED
            reinterpret_cast<float*>(shared + VALUES_AT)[(t + i) * PITCH + row_of()] = v[i];
#else
            const i64 token = part.token + t + i;
            if (token < n_tokens) part.segment.dst[token * rows + row] = v[i];
#endif
        }
    }
#else
    // Stores a thread's four sums of a group of 8 tokens: two tokens of each of its two rows.
    DEVICE void store(int group, float4 c) const {
        const Segment& to = part.segment;
        const i64 row = part.row0 + row_of();
        const i64 first = part.token + 8 * group + threadIdx.x % 4 * 2;
        float* at = to.dst + first * to.rows + row;
        const bool there[2] = {first < n_tokens, first + 1 < n_tokens};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + 8 * r >= to.rows) return;
            const float b = to.bias ? __ldg(to.bias + row + 8 * r) : 0.f;
            if (there[0]) at[8 * r] = (r ? c.z : c.x) + b;
            if (there[1]) at[8 * r + to.rows] = (r ? c.w : c.y) + b;
        }
    }
#endif
    // Called before the first result, where no barrier stands between it and the products.
    DEVICE void begin() const {
        if constexpr (QUANTISED) multipliers_sync();  // no warp reads the stages any more
    }
    // Called after the last result of the groups first, first + step, .. of 8 tokens. Quantises
    // them, four columns a thread.
    DEVICE void end(int first, int step) const {
#if QUANTISED
        constexpr int QUADS = BLOCK_ROWS / 4;  // fours of columns of a token
        const i64 rows = part.segment.rows, bytes = act_row_bytes(rows);
        u8* to = reinterpret_cast<u8*>(part.segment.dst) + part.token * bytes;
        const float* values = reinterpret_cast<const float*>(shared + VALUES_AT);
        const int groups = (GROUPS - first + step - 1) / step;
        multipliers_sync();
#pragma unroll 2
        for (int i = threadIdx.x; i < groups * 8 * QUADS; i += THREADS) {  // whole warps
            const int t = 8 * (first + i / (8 * QUADS) * step) + i / QUADS % 8, c = i % QUADS * 4;
            const float4 v = *reinterpret_cast<const float4*>(values + t * PITCH + c);
            const bool there = part.token + t < n_tokens && part.row0 + c < rows;
            quantise4(to + t * bytes, rows, part.row0 + c, v, there);
        }
        if (part.row0 != 0) return;
        for (int group = first; group < GROUPS; group += step)
            for (int t = 8 * group; t < 8 * group + 8; t++)
                if (part.token + t < n_tokens) zero_padding(to + t * bytes, rows, threadIdx.x);
#endif
    }
};

DEVICE float4 four(const float (&c)[4]) { return make_float4(c[0], c[1], c[2], c[3]); }

// The sum of K_PARTS values, in order. load(r) is value r.
template <class Load>
DEVICE float4 sum_of(const Load& load) {
    float4 v[K_PARTS];
#pragma unroll
    for (int r = 0; r < K_PARTS; r++) v[r] = load(r);
#pragma unroll
    for (int r = 1; r < K_PARTS; r++)
        v[0].x += v[r].x, v[0].y += v[r].y, v[0].z += v[r].z, v[0].w += v[r].w;
    return v[0];
}

// Adds the sums of the blocks of a tile, and stores the results.
DEVICE void finish(const Accumulators& acc, u8* shared, const Result& to, const Part& part,
                   float* partial, u32* counters) {
#if CLUSTERS
    multipliers_sync();  // no warp reads the stages any more
    float4* own = reinterpret_cast<float4*>(shared) + threadIdx.x;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) own[n * THREADS] = four(acc[n]);
    cluster_sync();
    const u32 at = shared_address(own);
#pragma unroll 2
    for (int n = part.number; n < GROUPS; n += K_PARTS)
        to.store(n, sum_of([&](int r) { return take_from(at + n * (THREADS * 16), r); }));
    to.end(part.number, K_PARTS);
    cluster_sync();  // no block ends while another block reads its sums
#else
    if constexpr (K_PARTS > 1) {
        u32& is_last = *reinterpret_cast<u32*>(shared + LAST_AT);
        float4* tile = reinterpret_cast<float4*>(partial) +
                       i64(part.tile) * (K_PARTS * GROUPS * THREADS) + threadIdx.x;
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
            tile[(part.number * GROUPS + n) * THREADS] = four(acc[n]);
        __threadfence();
        multipliers_sync();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(counters + part.tile, 1u) == K_PARTS - 1;
            if (is_last) counters[part.tile] = 0;
        }
        multipliers_sync();
        if (!is_last) return;
        __threadfence();
#pragma unroll 2
        for (int n = 0; n < GROUPS; n++)
            to.store(n, sum_of([&](int r) { return tile[(r * GROUPS + n) * THREADS]; }));
    } else {
        to.begin();
#pragma unroll
        for (int n = 0; n < GROUPS; n++) to.store(n, four(acc[n]));
    }
    to.end(0, 1);
#endif
}
