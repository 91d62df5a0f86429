// attention: softmax(scale * q.k + mask) v, over cells 0 .. n_kv - 1 of a cache of halves. The slow
// twin of attention.cu: float throughout, and a query head at a time.
//
//   attention_split    few query tokens: a block has one head of one token and one share of the
//                      cells; 16-byte loads, lanes side by side along a cell's head_dim
//   attention_combine  adds the shares of attention_split, in order
//   attention_tile_d1, _d2, _d4, _d8   many query tokens: a block has one head and a tile of query
//                      tokens, and goes through all cells 32 at a time, K and V in shared memory;
//                      head_dim up to 32, 64, 128, 256
//
// All of them keep a running maximum and sum (online softmax). Masked cells are read like any other
// and count for nothing, whatever they hold. A query whose every cell is masked gives zeros.
// head_dim is a multiple of 8, at most 256. Query head h reads kv head h / (n_head / n_head_kv).
//
// Arguments of all but the combine: dst, q, k, v, mask, scratch, n_tokens, n_head, n_head_kv,
// head_dim, n_kv, scale.
//
// Not tuned since it became the twin: version 1 of attention.cu, before commit 43147c1.
#include "common.cuh"

#define SPLIT_WARPS 16
#define IN_FLIGHT 2  // cells requested by a group of lanes before the first is used

// Per share: head_dim sums, then the maximum and the sum of weights.
DEVICE i64 share_floats(i64 head_dim) { return head_dim + 2; }

// Weights of two running sums under their common maximum; a maximum of -inf weighs nothing.
DEVICE float rescale(float own, float most) { return own == NEG_INFINITY ? 0.f : expf(own - most); }

// Grid: (n_tokens * n_head, shares); 512 threads. With one share the result goes to dst, with more
// to scratch (n_tokens * n_head, shares, head_dim + 2).
extern "C" __global__ void __launch_bounds__(32 * SPLIT_WARPS, 2)
    attention_split(float* __restrict__ dst, const float* __restrict__ q,
                    const u16* __restrict__ k, const u16* __restrict__ v,
                    const u16* __restrict__ mask, float* __restrict__ scratch, i64 n_tokens,
                    i64 n_head, i64 n_head_kv, i64 head_dim, i64 n_kv, float scale) {
    __shared__ float sums[SPLIT_WARPS][256];
    __shared__ float maxima[SPLIT_WARPS], weights[SPLIT_WARPS], factors[SPLIT_WARPS];
    const int dim = int(head_dim), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 token = blockIdx.x / n_head, head = blockIdx.x % n_head;
    const i64 head_kv = head / (n_head / n_head_kv), row = n_head_kv * head_dim;

    int lanes = 1;  // per cell: a power of two of at least head_dim / 8
    while (lanes * 8 < dim) lanes *= 2;
    const int at = lane % lanes * 8, group = lane / lanes, groups = 32 / lanes;
    const bool active = at < dim;

    const int share = int((n_kv + gridDim.y - 1) / gridDim.y + 31) / 32 * 32;
    const int begin = blockIdx.y * share, end = min(begin + share, int(n_kv));

    float query[8] = {}, acc[8] = {};
    if (active) {
        const float* from = q + blockIdx.x * head_dim + at;
#pragma unroll
        for (int i = 0; i < 8; i++) query[i] = from[i] * scale;
    }
    float most = NEG_INFINITY, weight = 0;
    const int stride = SPLIT_WARPS * groups;
    for (int base = begin; base < end; base += stride * IN_FLIGHT) {
        uint4 keys[IN_FLIGHT], values[IN_FLIGHT];
        float score[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const int cell = base + u * stride + warp * groups + group;
            const bool there = cell < end;
            const i64 from = cell * row + head_kv * head_dim + at;
            keys[u] = values[u] = make_uint4(0, 0, 0, 0);
            if (there && active) {
                keys[u] = *reinterpret_cast<const uint4*>(k + from);
                values[u] = *reinterpret_cast<const uint4*>(v + from);
            }
            score[u] = there ? half_to_float(mask[token * n_kv + cell]) : NEG_INFINITY;
        }
        float next = most;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            float key[8], dot = 0;
            halves_to_floats(keys[u], key);
#pragma unroll
            for (int i = 0; i < 8; i++) dot += query[i] * key[i];
            for (int o = lanes / 2; o; o >>= 1) dot += __shfl_xor_sync(~0u, dot, o);
            if (score[u] != NEG_INFINITY) score[u] += dot;
            next = fmaxf(next, score[u]);
        }
        const float keep = rescale(most, next);
        weight *= keep;
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i] *= keep;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            if (score[u] == NEG_INFINITY) continue;
            const float p = expf(score[u] - next);
            float value[8];
            halves_to_floats(values[u], value);
            weight += p;
#pragma unroll
            for (int i = 0; i < 8; i++) acc[i] += p * value[i];
        }
        most = next;
    }
    // groups of lanes, then warps
    for (int o = lanes; o < 32; o *= 2) {
        const float other = __shfl_xor_sync(~0u, most, o), next = fmaxf(most, other);
        const float mine = rescale(most, next), theirs = rescale(other, next);
        weight = weight * mine + __shfl_xor_sync(~0u, weight, o) * theirs;
#pragma unroll
        for (int i = 0; i < 8; i++)
            acc[i] = acc[i] * mine + __shfl_xor_sync(~0u, acc[i], o) * theirs;
        most = next;
    }
    if (group == 0 && active) {
#pragma unroll
        for (int i = 0; i < 8; i++) sums[warp][at + i] = acc[i];
    }
    if (lane == 0) maxima[warp] = most, weights[warp] = weight;
    __syncthreads();
    most = NEG_INFINITY;
    for (int w = 0; w < SPLIT_WARPS; w++) most = fmaxf(most, maxima[w]);
    if (threadIdx.x < SPLIT_WARPS) factors[threadIdx.x] = rescale(maxima[threadIdx.x], most);
    __syncthreads();
    if (threadIdx.x < dim) {
        float sum = 0;
        weight = 0;
        for (int w = 0; w < SPLIT_WARPS; w++) {
            weight += weights[w] * factors[w];
            sum += sums[w][threadIdx.x] * factors[w];
        }
        if (gridDim.y == 1) {
            dst[blockIdx.x * head_dim + threadIdx.x] = weight > 0 ? sum / weight : 0.f;
        } else {
            float* out = scratch + (i64(blockIdx.x) * gridDim.y + blockIdx.y) * share_floats(dim);
            out[threadIdx.x] = sum;
            if (threadIdx.x == 0) out[dim] = most, out[dim + 1] = weight;
        }
    }
}

// Arguments: dst, scratch, shares, head_dim. Grid: n_tokens * n_head; 256 threads.
extern "C" __global__ void attention_combine(float* __restrict__ dst,
                                             const float* __restrict__ scratch, i64 shares,
                                             i64 head_dim) {
    const i64 size = share_floats(head_dim);
    const float* part = scratch + blockIdx.x * shares * size;
    if (threadIdx.x >= head_dim) return;
    float most = NEG_INFINITY, weight = 0, sum = 0;
    for (i64 s = 0; s < shares; s++) most = fmaxf(most, part[s * size + head_dim]);
    for (i64 s = 0; s < shares; s++) {
        const float scale = rescale(part[s * size + head_dim], most);
        weight += part[s * size + head_dim + 1] * scale;
        sum += part[s * size + threadIdx.x] * scale;
    }
    dst[blockIdx.x * head_dim + threadIdx.x] = weight > 0 ? sum / weight : 0.f;
}

// A block of 4 warps, each with QUERIES query tokens; lanes are cells while scores are formed, and
// columns of head_dim (D of them per lane) while values are added.
template <int D, int QUERIES>
DEVICE void attention_tile(float* dst, const float* q, const u16* k, const u16* v, const u16* mask,
                           i64 n_tokens, i64 n_head, i64 n_head_kv, i64 head_dim, i64 n_kv,
                           float scale) {
    constexpr int most_dim = 32 * D, tile = 4 * QUERIES;
    __shared__ __align__(16) float query[tile][most_dim];
    __shared__ __align__(16) u16 keys[32][most_dim + 8];  // 8 more: no two lanes on one bank
    __shared__ __align__(16) u16 values[32][most_dim];
    const int dim = int(head_dim), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 first = i64(blockIdx.x) * tile, head = blockIdx.y;
    const i64 head_kv = head / (n_head / n_head_kv), row = n_head_kv * head_dim;

    for (int i = threadIdx.x; i < tile * dim; i += 128) {
        const i64 token = first + i / dim;
        query[i / dim][i % dim] =
            token < n_tokens ? q[(token * n_head + head) * head_dim + i % dim] * scale : 0.f;
    }
    float acc[QUERIES][D] = {}, most[QUERIES], weight[QUERIES];
#pragma unroll
    for (int j = 0; j < QUERIES; j++) most[j] = NEG_INFINITY, weight[j] = 0;

    for (int base = 0; base < n_kv; base += 32) {
        __syncthreads();
        for (int i = threadIdx.x; i < 32 * (dim / 8); i += 128) {
            const int cell = i / (dim / 8), at = i % (dim / 8) * 8;
            uint4 key = make_uint4(0, 0, 0, 0), value = key;
            if (base + cell < n_kv) {
                const i64 from = (base + cell) * row + head_kv * head_dim + at;
                key = *reinterpret_cast<const uint4*>(k + from);
                value = *reinterpret_cast<const uint4*>(v + from);
            }
            *reinterpret_cast<uint4*>(&keys[cell][at]) = key;
            *reinterpret_cast<uint4*>(&values[cell][at]) = value;
        }
        __syncthreads();
        float p[QUERIES] = {};
        for (int at = 0; at < dim; at += 8) {
            float key[8];
            halves_to_floats(*reinterpret_cast<const uint4*>(&keys[lane][at]), key);
#pragma unroll
            for (int j = 0; j < QUERIES; j++) {
                const float4* x = reinterpret_cast<const float4*>(&query[warp * QUERIES + j][at]);
                const float4 a = x[0], b = x[1];
                p[j] += a.x * key[0] + a.y * key[1] + a.z * key[2] + a.w * key[3] +
                        b.x * key[4] + b.y * key[5] + b.z * key[6] + b.w * key[7];
            }
        }
#pragma unroll
        for (int j = 0; j < QUERIES; j++) {
            const i64 token = first + warp * QUERIES + j, cell = base + lane;
            const float bias = token < n_tokens && cell < n_kv
                                   ? half_to_float(mask[token * n_kv + cell])
                                   : NEG_INFINITY;
            const float score = bias == NEG_INFINITY ? bias : p[j] + bias;
            const float next = fmaxf(most[j], warp_max(score));
            const float keep = rescale(most[j], next);
            p[j] = rescale(score, next);
            weight[j] = weight[j] * keep + warp_sum(p[j]);
            most[j] = next;
#pragma unroll
            for (int i = 0; i < D; i++) acc[j][i] *= keep;
        }
        for (int cell = 0; cell < 32; cell++) {
            float value[D];
#pragma unroll
            for (int i = 0; i < D; i++) value[i] = half_to_float(values[cell][lane + 32 * i]);
#pragma unroll
            for (int j = 0; j < QUERIES; j++) {
                const float share = __shfl_sync(~0u, p[j], cell);
                if (share == 0.f) continue;  // in all lanes; an excluded cell may hold anything
#pragma unroll
                for (int i = 0; i < D; i++) acc[j][i] += share * value[i];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
        const i64 token = first + warp * QUERIES + j;
#pragma unroll
        for (int i = 0; i < D; i++) {
            if (token < n_tokens && lane + 32 * i < dim)
                dst[(token * n_head + head) * head_dim + lane + 32 * i] =
                    weight[j] > 0 ? acc[j][i] / weight[j] : 0.f;
        }
    }
}

// Grid: (ceil(n_tokens / (4 QUERIES)), n_head); 128 threads.
#define TILE(D, QUERIES)                                                                         \
    extern "C" __global__ void __launch_bounds__(128) attention_tile_d##D(                       \
        float* __restrict__ dst, const float* __restrict__ q, const u16* __restrict__ k,         \
        const u16* __restrict__ v, const u16* __restrict__ mask, float* __restrict__ scratch,    \
        i64 n_tokens, i64 n_head, i64 n_head_kv, i64 head_dim, i64 n_kv, float scale) {          \
        attention_tile<D, QUERIES>(dst, q, k, v, mask, n_tokens, n_head, n_head_kv, head_dim,    \
                                   n_kv, scale);                                                 \
    }
TILE(1, 4)
TILE(2, 4)
TILE(4, 4)
TILE(8, 2)
